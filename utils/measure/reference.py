"""Figures measured on a real GPU, which `make gpu` has stored in docs/reference/<gpu>.json.

    reference.show("mfu", tokens_per_s="{:,.0f}".format, mfu="{:.0%}".format)   # a table
    reference.rows("adamw")["torch, fused"]["of_copy"]

Each part of the record has its own date and commit: it shows what that commit achieved on that GPU.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from utils.paths import ROOT

FOLDER = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class Card:
    """A measured GPU: its name, and the results of `make gpu` by name of the part."""

    gpu: str
    parts: dict[str, dict]

    @property
    def date(self) -> str:
        """The date of the newest part."""
        return max((part.get("date", "") for part in self.parts.values()), default="")


def newest() -> Card | None:
    """The GPU measured most recently; None if none is stored."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json"))
    cards = [Card(one["gpu"], one["parts"]) for one in records if one.get("gpu", "CPU") != "CPU"]
    return max(cards, key=lambda card: card.date, default=None)


def rows(part: str) -> dict[str, dict]:
    """{name: figures} of a part for the newest GPU; {} if nothing is stored."""
    card = newest()
    return {} if card is None else card.parts.get(part, {}).get("rows", {})


def show(
    *parts: str, only: Sequence[str] | None = None, **columns: Callable[[float], str]
) -> None:
    """Print a table of the newest GPU's figures, headed by its name, date and commit.

    parts     names of `python -m tests.gpu --list`
    only      the rows to show; None: all
    columns   {figure: its formatter}; a row without any of these figures is left out
    """
    card, found, said = newest(), {}, None
    for part in parts:
        chosen = {name: row for name, row in rows(part).items() if only is None or name in only}
        found[part] = {name: row for name, row in chosen.items() if columns.keys() & row.keys()}
    width = max((len(name) for table in found.values() for name in table), default=0)
    for part, table in found.items():
        if not table:
            print(f"{part}: no card's figures are stored; `make gpu PARTS={part}` stores them")
            continue
        facts = card.parts[part]
        heading = f"one {card.gpu}, {facts['date'][:10]}, commit {facts['commit'][:7]}, "
        heading += f"{facts['threads']} CPU threads"
        if heading != said:
            print(heading)
            print(" " * width, *(f"{name:>18}" for name in columns))
        said = heading
        for name, row in table.items():
            texts = (text(row[one]) if one in row else "" for one, text in columns.items())
            print(f"{name:{width}}", *(f"{text:>18}" for text in texts))
