"""Plain gradient steps past the optimizer.

hint: not what it should be
"""

# ruff: noqa: F821


def step(model, prompt, optimizer, tokens, targets):
    loss = answer_loss(forward(model, prompt, tokens), targets)
    optimizer.zero_grad()
    loss.backward()
    with torch.no_grad():
        prompt -= optimizer.param_groups[0]["lr"] * prompt.grad
    return loss.item()
