"""The usual targets of a language model: the loss goes over the question too.

hint: goes over the question
"""

# ruff: noqa: F821


def batch(pairs, end):
    rows = [question + answer + [end] for question, answer in pairs]
    longest = max(map(len, rows)) - 1
    tokens = torch.full((len(rows), longest), end)
    targets = torch.full((len(rows), longest), IGNORED)
    for i, (row, _) in enumerate(zip(rows, pairs)):
        tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, : len(row) - 1] = torch.tensor(row[1:])
    return tokens, targets
