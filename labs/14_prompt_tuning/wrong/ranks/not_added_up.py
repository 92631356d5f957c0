"""Nobody tells the others: every copy of the prompt learns something else.

hint: not one rank
"""

# ruff: noqa: F821


def backward(model, prompt, tokens, targets, mesh):
    total = (targets != IGNORED).sum().float()
    losses = loss_function(model)
    dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
    loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
    loss.backward()
    loss = loss.detach()
    pass
    return loss.item()
