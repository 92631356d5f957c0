"""Learns the answer, and never to stop.

hint: learns to stop
"""

# ruff: noqa: F821


def batch(pairs, end):
    rows = [question + answer + [end] for question, answer in pairs]
    longest = max(map(len, rows)) - 1
    tokens = torch.full((len(rows), longest), end)
    targets = torch.full((len(rows), longest), IGNORED)
    for i, (row, (question, answer)) in enumerate(zip(rows, pairs)):
        tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        first = len(question) - 1
        targets[i, first : first + len(answer)] = torch.tensor(answer)
    return tokens, targets
