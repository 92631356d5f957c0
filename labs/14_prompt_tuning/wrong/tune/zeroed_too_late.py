"""Sets the gradient to zero between the backward pass and the step.

hint: the prompt is what it was
"""

# ruff: noqa: F821


def step(model, prompt, optimizer, tokens, targets):
    loss = answer_loss(forward(model, prompt, tokens), targets)
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    return loss.item()
