"""Averages the gradients, as DDP does: a token of the shorter answers weighs more.

hint: The mean of two means
"""

# ruff: noqa: F821


def backward(model, prompt, tokens, targets, mesh):
    loss = loss_function(model)(forward(model, prompt, tokens), targets)
    loss.backward()
    loss = loss.detach() / mesh.dp.size
    prompt.grad /= mesh.dp.size
    if mesh.dp.size > 1:
        dist.all_reduce(prompt.grad, group=mesh.dp.group)
        dist.all_reduce(loss, group=mesh.dp.group)
    return loss.item()
