"""Pairwise testing: a few runs that cover every feasible pair of option values.

    rows = covering_rows(axes, possible, cost)     [{option: value}, …]; the search takes minutes
    write_rows(file, rows)                         stores them as a table
    rows = read_rows(file, axes)
    pairs_of(axes)                                 the pairs to cover

A bug that takes two options to appear shows up in tens of runs instead of millions. `axes` maps
each option's name to the values to try.
"""

import csv
import itertools
import math
import random
from collections import Counter


def pairs(row):
    """Return every pair of (option, value) in a row, with the options sorted by name."""
    return set(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))


def pairs_of(axes):
    """Return every pair of values of two options, feasible or not, in the form of `pairs`."""
    found = set()
    for one, other in itertools.combinations(sorted(axes), 2):
        options = itertools.product(axes[one], axes[other])
        found |= {((one, value), (other, second)) for value, second in options}
    return found


def covering_rows(axes, possible, cost, *, seed=0, tries=30, patience=3000):
    """Find inexpensive rows that cover every feasible pair, by greedy search.

    possible(row)   whether a row can be run; a pair with no such row in `patience` random draws
                    counts as infeasible
    cost(row)       the cost of running it, in any unit
    Each row is the one of `tries` that covers the most new pairs per cost.
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
        """Return a row that no change of a single option improves."""
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
        """Return a cheaper row with the pairs that only this one covers, or None without such."""
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
    """Write a CSV table with one line per row."""
    with open(file, "w", newline="") as table:
        writer = csv.DictWriter(table, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: str(value) for name, value in row.items()} for row in rows)


def read_rows(file, axes):
    """Read the rows of a table; raise KeyError for an option or a value that is not in `axes`."""
    values = {name: {str(value): value for value in axes[name]} for name in axes}
    with open(file, newline="") as table:
        return [
            {name: values[name][text] for name, text in line.items()}
            for line in csv.DictReader(table)
        ]
