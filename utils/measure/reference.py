"""Figures of one real card, which `make gpu` has stored in docs/reference/<gpu>.json.

    reference.show("mfu", tokens_per_s="{:,.0f}", mfu="{:.0%}")   # a table, with the card's name
    reference.rows("adamw")["torch, fused"]["of_copy"]

Each part of the record has its own date and commit: it is what that commit could do.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from utils.paths import ROOT

FOLDER = ROOT / "docs" / "reference"


@dataclass(frozen=True)
class Card:
    """A card that was measured: its name, and by name of a part what `make gpu` found then."""

    gpu: str
    parts: dict[str, dict]

    @property
    def date(self) -> str:
        """Of the newest part."""
        return max((part.get("date", "") for part in self.parts.values()), default="")


def newest(folder: Path = FOLDER) -> Card | None:
    """The stored card that was measured last; None where none is stored."""
    records = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json"))
    cards = [Card(one["gpu"], one["parts"]) for one in records if one.get("gpu", "CPU") != "CPU"]
    return max(cards, key=lambda card: card.date, default=None)


def rows(part: str, folder: Path = FOLDER) -> dict[str, dict]:
    """{name: figures} of a part of the newest card; {} where nothing is stored."""
    card = newest(folder)
    return {} if card is None else card.parts.get(part, {}).get("rows", {})


def show(*parts: str, folder: Path = FOLDER, **columns: str) -> None:
    """Prints a table of the newest card's figures.

    parts     names of `python -m tests.gpu --list`
    columns   {figure: how it is formatted}; a row without any of these figures is left out
    """
    card, said = newest(folder), None
    if card is None or not any(part in card.parts for part in parts):
        print("no card's figures are stored for this: `make gpu` stores them")
        return
    found = {part: rows(part, folder) for part in parts}
    width = max(len(name) for table in found.values() for name in table)
    for part, table in found.items():
        facts = card.parts.get(part)
        if facts is None:
            continue
        heading = f"one {card.gpu}, {facts['date'][:10]}, commit {facts['commit'][:7]}"
        if heading != said:
            print(heading)
            print(" " * width, *(f"{name:>16}" for name in columns))
        said = heading
        for name, row in table.items():
            if columns.keys() & row.keys():
                known = (how.format(row[one]) if one in row else "" for one, how in columns.items())
                print(f"{name:{width}}", *(f"{value:>16}" for value in known))
