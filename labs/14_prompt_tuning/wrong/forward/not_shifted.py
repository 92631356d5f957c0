"""The target of a token is the token.

hint: the token itself
"""

# ruff: noqa: F821


def batch(pairs, end):
    rows = [question + answer + [end] for question, answer in pairs]
    longest = max(map(len, rows)) - 1
    tokens = torch.full((len(rows), longest), end)
    targets = torch.full((len(rows), longest), IGNORED)
    for i, (row, (question, _)) in enumerate(zip(rows, pairs)):
        tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        first = len(question)
        targets[i, first : len(row) - 1] = torch.tensor(row[first:-1])
    return tokens, targets
