"""Rows that cover every pair: few runs in which any two values of options meet that can meet.

    rows = covering_rows(axes, possible, cost)     [{option: value}, …], minutes of search
    write_rows(file, rows)                         kept as a table, which is quick to read
    rows = read_rows(file, axes)
    pairs_of(axes)                                 what the rows have to cover

A mistake that needs two options to show is then seen, with tens of runs instead of millions. An
axis is an option's name with the values to try.
"""

import csv
import itertools
import math
import random
from collections import Counter


def pairs(row):
    """Every pair of (option, value) in a row, the options in the order of their names."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def pairs_of(axes):
    """Every pair of values of two options, as `pairs` gives it; also those that cannot meet."""
    found = set()
    for one, other in itertools.combinations(sorted(axes), 2):
        options = itertools.product(axes[one], axes[other])
        found |= {((one, value), (other, second)) for value, second in options}
    return found


def covering_rows(axes, possible, cost, *, seed=0, tries=30, patience=3000):
    """Rows that hold all pairs that can meet, together cheap: a greedy search.

    possible(row)   whether a row can be run; a pair for which `patience` draws find no such row is
                    taken for one that cannot meet
    cost(row)       what a run of it takes, in any unit
    Each row is the one of `tries` that covers most new pairs for its cost.
    """
    draw, known = random.Random(seed), {}

    def is_possible(row):
        key = tuple(row.values())
        if key not in known:
            known[key] = possible(row)
        return known[key]

    def drawn(pair):
        for _ in range(patience):
            row = {name: draw.choice(axes[name]) for name in axes} | dict(pair)
            if is_possible(row):
                return row
        return None

    def climbed(row, worth):
        """A row that no other value of any one option makes better."""
        while True:
            names = draw.sample([*axes], len(axes))
            before = worth(row)
            for name in names:
                others = [{**row, name: value} for value in axes[name]]
                row = max([row, *filter(is_possible, others)], key=worth)
            if worth(row) <= before:
                return row

    missing, rows = pairs_of(axes), []

    def worth(row):
        return len(pairs(row) & missing) / cost(row)

    while missing:
        found = []
        while missing and len(found) < tries:
            pair = draw.choice(sorted(missing, key=str))
            row = drawn(pair)
            if row is None:
                missing.discard(pair)
            else:
                found.append(climbed(row, worth))
        if found:
            rows.append(max(found, key=worth))
            missing -= pairs(rows[-1])

    def cheapened(row, others):
        """The cheapest near one that holds what no other row holds; None if there is no such."""
        alone = {pair for pair in pairs(row) if not others[pair]}
        if not alone:
            return None
        return climbed(row, lambda row: -cost(row) if alone <= pairs(row) else -math.inf)

    for _ in range(5):
        for place in sorted(range(len(rows)), key=lambda place: -cost(rows[place])):
            others = Counter(
                p for i, row in enumerate(rows) if row and i != place for p in pairs(row)
            )
            rows[place] = cheapened(rows[place], others)
        rows = [row for row in rows if row]
    return rows


def write_rows(file, rows):
    """A table with one line for each row."""
    with open(file, "w", newline="") as table:
        writer = csv.DictWriter(table, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: str(value) for name, value in row.items()} for row in rows)


def read_rows(file, axes):
    """The rows of a table; raises KeyError for an option or a value that the axes do not have."""
    values = {name: {str(value): value for value in axes[name]} for name in axes}
    with open(file, newline="") as table:
        return [
            {name: values[name][text] for name, text in line.items()}
            for line in csv.DictReader(table)
        ]
