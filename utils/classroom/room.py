"""The room as the page shows it: results of learners, requests for help, predictions.

It is in memory, is filled from the store when the board starts, and follows each message. An open
page is a `Watcher`: it is told which learners have changed.
"""

import asyncio
import bisect
import math
import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from utils.classroom.store import Taken
from utils.course.progress import Part

BINS = 24  # at most; a few numbers get fewer
MANY = 100  # above this ratio of the largest to the smallest positive value, the axis is log
FAR = 10.0  # median distances from the median: values farther away count as far off


@dataclass
class Learner:
    """A learner's latest reports. checks, predictions: {name: fields of the report}."""

    number: int
    alias: str = ""
    seen: float = 0.0
    checks: dict[str, dict] = field(default_factory=dict)
    predictions: dict[str, dict] = field(default_factory=dict)
    help: dict | None = None


class Watcher:
    """An open page: the learners whose changes it has not seen yet, and a bell."""

    def __init__(self) -> None:
        self.learners: set[int] = set()
        self.bell = asyncio.Event()


class Room:
    """parts: the course's lessons and labs, with the names that may be reported."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.place = {name: i for i, name in enumerate(n for p in parts for n in p.checks)}
        self.predictable = {name for part in parts for name in part.predictions}
        self.learners: dict[int, Learner] = {}
        self.removed: set[int] = set()  # by the instructor; their reports are not shown
        self.counts = dict.fromkeys(self.predictable, 0)  # numbers that are predictions
        self.watchers: set[Watcher] = set()

    def knows(self, report: dict) -> bool:
        """Whether the course has an exercise of the report's name."""
        kind, name = report["kind"], report["name"]
        known = {"check": self.place, "prediction": self.predictable, "help": ("",)}
        return name in known[kind]

    def take(self, taken: Taken) -> None:
        """Apply a message's changes."""
        if taken.learner in self.removed:
            return
        learner = self.learners.setdefault(taken.learner, Learner(taken.learner))
        learner.alias, learner.seen = taken.alias, taken.seen
        for report in taken.reports:
            if not self.knows(report):
                continue  # stored by another version of the course
            if report["kind"] == "check":
                learner.checks[report["name"]] = report
            elif report["kind"] == "prediction":
                before = learner.predictions.get(report["name"])
                counted = before is not None and not before["late"]
                self.counts[report["name"]] += (not report["late"]) - counted
                learner.predictions[report["name"]] = report
            else:
                learner.help = report if report["question"] is not None else None
        self.changed(taken.learner)

    def remove(self, number: int) -> None:
        """Remove a learner permanently."""
        self.removed.add(number)
        for name, said in self.learners.pop(number).predictions.items():
            self.counts[name] -= not said["late"]
        self.changed(number)

    def changed(self, learner: int | None = None) -> None:
        """Ring the bell of every open page."""
        for watcher in self.watchers:
            watcher.learners |= set() if learner is None else {learner}
            watcher.bell.set()

    def row(self, number: int) -> dict[str, Any]:
        """A learner for the page. checks: {place of the check: [done, tries, at, symptom]}."""
        if number in self.removed:
            return {"id": number, "removed": True}
        learner = self.learners[number]
        return {
            "id": number, "alias": learner.alias, "seen": learner.seen,
            "checks": {
                self.place[name]: [
                    said["done"], said["tries"], said["at"], problem_first(said["symptom"])
                ]
                for name, said in learner.checks.items()
            },
            "help": learner.help and [learner.help["question"], learner.help["at"]],
        }

    def course(self) -> list[dict[str, Any]]:
        """The parts for the page."""
        return [
            {"title": part.title, "checks": part.checks, "predictions": part.predictions}
            for part in self.parts
        ]

    def histogram(self, name: str, reveal: bool) -> dict[str, Any]:
        """The room's values of one prediction; with `reveal`, theory and measurement too.

        count, late: values before and after the reveal; only those before it are in the bins
        log: whether the bins are equal on a logarithmic scale
        edges: in `unit`; bins: the count between two edges
        below, above: the counts of values far off the others
        median: of the predictions
        theory, measured: {"count", "median", "low", "high"}, low and high being the 5th and the
            95th percentile, or None
        """
        said = [one.predictions[name] for one in self.learners.values() if name in one.predictions]
        values = sorted(one["value"] for one in said if not one["late"])
        units = [one["unit"] for one in said]
        shown: dict[str, Any] = {
            "name": name, "count": len(values), "late": len(said) - len(values),
            "unit": max(set(units), key=units.count) if units else "",
            "median": statistics.median(values) if values else None,
        }
        marks = []
        for kind in ("theory", "measured"):
            found = sorted(one[kind] for one in said if one[kind] is not None) if reveal else []
            shown[kind] = summary(found)
            marks += found and [statistics.median(found)]
        return shown | bins(values, marks)


def problem_first(symptom: str) -> str:
    """ "with 2 ranks: the sum is 41." becomes "the sum is 41. (with 2 ranks)", as a table shows
    only the beginning."""
    case, colon, problem = symptom.partition(": ")
    return f"{problem} ({case})" if colon and case.startswith("with ") else symptom


def summary(values: list[float]) -> dict[str, float] | None:
    """Count and percentiles of sorted values."""
    if not values:
        return None
    last = len(values) - 1
    return {
        "count": len(values), "median": statistics.median(values),
        "low": values[round(0.05 * last)], "high": values[round(0.95 * last)],
    }


def bins(values: list[float], marks: list[float]) -> dict[str, Any]:
    """Sorted values in bins of an axis that also covers the marks: 8 to BINS, about 2·√count.

    A few values far off do not squeeze the others into one bin: they are counted at the edges.
    """
    near = values
    if values:
        log = values[0] > 0 and values[-1] / values[0] > MANY
        at = [math.log10(value) if log else value for value in values]
        middle = statistics.median(at)
        reach = FAR * (
            statistics.median(abs(one - middle) for one in at)
            or (1.0 if log else 0.5 * abs(middle) or 1.0)
        )
        near = [value for value, one in zip(values, at) if abs(one - middle) <= reach]
    ends = near + marks or [0.0, 1.0]
    log = min(ends) > 0 and max(ends) / min(ends) > MANY
    place = math.log10 if log else float
    at = [place(value) if value > 0 or not log else -math.inf for value in values]
    low, high = place(min(ends)), place(max(ends))
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-290):  # all the same
        room = 0.5 if log else 0.5 * abs(low) or 0.5
        low, high = low - room, high + room
    count = min(max(round(2 * math.sqrt(len(values))), 8), BINS)
    edges = [low + (high - low) * i / count for i in range(count)] + [high]
    # a value on an inner edge belongs to the bin on its right, one on the last to the last bin
    begins = [bisect.bisect_left(at, edge) for edge in edges[:-1]] + [bisect.bisect_right(at, high)]
    back = (lambda x: 10.0**x) if log else float
    return {
        "log": log, "edges": [back(edge) for edge in edges],
        "bins": [after - before for before, after in pairwise(begins)],
        "below": begins[0], "above": len(at) - begins[-1],
    }
