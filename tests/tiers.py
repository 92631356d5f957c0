"""Which cases `make test` runs, and which only `make test-all`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Values of parameters, of which those behind the first `count` are `thorough`: tuples, or of
    one parameter the values themselves."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    now = [pytest.param(*case) for case in found[:count]]
    return now + [pytest.param(*case, marks=pytest.mark.thorough) for case in found[count:]]
