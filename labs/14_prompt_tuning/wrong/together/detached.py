"""Makes one table of the prompts with torch.tensor: no gradient comes back.

hint: is not that of its rows
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    chosen = [torch.tensor(prompts[number].tolist(), dtype=prompts[0].dtype) for number in task]
    rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = zip(decode(model, x), map(len, chosen))
    return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])
