"""Makes all prompts equally long with zeros behind them, which the words see.

hint: the words see the filling
"""

# ruff: noqa: F821


def together(model, prompts, task, tokens):
    table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    x = torch.cat((table[task], model.model.embed_tokens(tokens)), dim=1)
    return decode(model, x)[:, table.shape[1] :]
