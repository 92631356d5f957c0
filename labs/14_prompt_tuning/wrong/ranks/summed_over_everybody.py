"""Adds up over all ranks there are, whatever they share.

hint: added up over tp
"""

# ruff: noqa: F821


def backward(model, prompt, tokens, targets, mesh):
    total = (targets != IGNORED).sum().float()
    losses = loss_function(model)
    dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
    loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(prompt.grad)
    if mesh.dp.size > 1:
        dist.all_reduce(loss)
    return loss.item()
