"""Which cases `make test` runs, and which only `make test-all` does."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """Parameter values, `thorough` after the first `count`: tuples, or bare values of a single
    parameter."""
    found = [case if isinstance(case, tuple) else (case,) for case in cases]
    now = [pytest.param(*case) for case in found[:count]]
    return now + [pytest.param(*case, marks=pytest.mark.thorough) for case in found[count:]]
