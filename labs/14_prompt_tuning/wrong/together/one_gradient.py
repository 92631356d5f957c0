"""Only the first prompt learns.

hint: the gradient of prompt
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    chosen = [p if i == 0 else p.detach() for i, p in ((i, prompts[i]) for i in task.tolist())]
    rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    logits = zip(decode(model, x), map(len, chosen))
    return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])
