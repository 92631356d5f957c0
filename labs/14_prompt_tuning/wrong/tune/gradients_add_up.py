"""Never sets the gradient to zero.

hint: gradients of earlier steps
"""

# ruff: noqa: F821


def step(model, prompt, optimizer, tokens, targets):
    loss = answer_loss(forward(model, prompt, tokens), targets)
    loss.backward()
    optimizer.step()
    return loss.item()
