"""One prompt for all rows.

hint: is the row with prompt 0
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    chosen = [prompts[0]] * len(tokens)
    rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = zip(decode(model, x), map(len, chosen))
    return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])
