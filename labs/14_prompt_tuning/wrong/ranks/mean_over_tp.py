"""The mean of equal gradients: right, and a message for nothing.

hint: 0 of 0 bytes will do
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
        dist.all_reduce(prompt.grad, group=mesh.dp.group)
        dist.all_reduce(loss, group=mesh.dp.group)
    if mesh.tp.size > 1:
        dist.all_reduce(prompt.grad, group=mesh.tp.group)
        prompt.grad /= mesh.tp.size
    return loss.item()
