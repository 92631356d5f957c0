"""Which cases `make test` runs, and which only `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[tuple]) -> list[Any]:
    """Values of parameters, of which those behind the first `count` are `thorough`."""
    found = list(cases)
    late = [pytest.param(*case, marks=pytest.mark.thorough) for case in found[count:]]
    return found[:count] + late
