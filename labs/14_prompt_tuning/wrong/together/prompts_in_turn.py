"""Hands the prompts out in turn, whatever the rows want.

hint: belongs to row b
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    chosen = [prompts[number % len(prompts)] for number in range(len(tokens))]
    rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = zip(decode(model, x), map(len, chosen))
    return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])
