"""Returns the tensor, and keeps every pass of the training alive.

hint: not a float
"""

# ruff: noqa: F821


def step(model, prompt, optimizer, tokens, targets):
    optimizer.zero_grad()
    loss = answer_loss(forward(model, prompt, tokens), targets)
    loss.backward()
    optimizer.step()
    return loss
