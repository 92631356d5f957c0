"""Adds up one virtual token at a time.

hint: messages of
"""

# ruff: noqa: F821


def backward(model, prompt, tokens, targets, mesh):
    total = (targets != IGNORED).sum().float()
    losses = loss_function(model)
    dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
    loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
    loss.backward()
    loss = loss.detach()
    if mesh.dp.size > 1:
        for row in prompt.grad:
            dist.all_reduce(row, group=mesh.dp.group)
        dist.all_reduce(loss, group=mesh.dp.group)
    return loss.item()
