"""Makes all prompts equally long with zeros before them.

hint: filled up in front
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    longest = max(map(len, prompts))
    table = torch.stack([F.pad(prompt, (0, 0, longest - len(prompt), 0)) for prompt in prompts])
    x = torch.cat((table[task], model.model.embed_tokens(tokens)), dim=1)
    return decode(model, x)[:, longest:]
