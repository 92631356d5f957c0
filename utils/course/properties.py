"""Properties of drawn examples, and an object compared with a reference by the shortest story.

    def scenario(answer, seed):                                     # runs on a rank
        for_all(seed, st.integers(0, 99), lambda n: close(f"f({n})", "it", answer.f(n), right(n)))
        beside(
            seed,
            lambda options: (answer.Pages(**options), Pages(**options)),
            st.fixed_dictionaries({"pages": st.integers(1, 4)}),
            {"take": (st.integers(1, 3),), "give_back": ()},
            same=lambda where, mine, right: ...,
        )

Hypothesis draws, and shrinks a failure: a learner reads the smallest example, the fewest calls.
"""

import math
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from utils.course.assertions import Wrong, described
from utils.ranks.pool import PRELOADED

PRELOADED.append(__name__)
EXAMPLES = 100


def for_all(
    number: int,
    strategy: st.SearchStrategy,
    holds: Callable[[Any], None],
    examples: int = EXAMPLES,
) -> None:
    """Call `holds(example)` for drawn examples; raise what it raises for the smallest that fails.

    number: the seed. The message says so if an example fails after others but passes on its own.
    """

    @seed(number)
    @settings(
        max_examples=examples, database=None, deadline=None, print_blob=False,
        report_multiple_bugs=False, phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def run(example: Any) -> None:
        seen.append(example)
        try:
            holds(example)
        except Exception as error:
            failed.append(error)
            raise

    seen, failed = [], []
    try:
        run()
    except Flaky:
        raise Wrong(
            f"{failed[-1]}\nOn its own, the same example passes: what is kept from call to call?"
        ) from None


def beside(
    number: int,
    make: Callable[[Any], tuple[Any, Any]],
    options: st.SearchStrategy,
    calls: dict[str, tuple[st.SearchStrategy, ...]],
    same: Callable[[str, Any, Any], None] = lambda where, mine, right: None,
    examples: int = EXAMPLES,
    most: int = 20,
) -> None:
    """Give an object of the answer and its reference the same drawn calls, up to `most`; each must
    return the same or raise the same kind of error; otherwise Wrong, with the shortest story.

    make: options -> (the answer's object, the reference); calls: {method: its arguments};
    same: (story so far, mine, right), called after each call; raises Wrong.
    """
    one = st.one_of(*(st.tuples(st.just(name), st.tuples(*args)) for name, args in calls.items()))

    def tell(example: tuple) -> None:
        chosen, story = example
        mine, right = make(chosen)
        told = [f"({_listed(chosen)})"]
        same(told[0], mine, right)
        for name, args in story:
            told.append(f"{name}({', '.join(map(repr, args))})")
            where = ", ".join(told)
            got, wanted = (_outcome(getattr(side, name), args) for side in (mine, right))
            if isinstance(got, Exception) and not isinstance(wanted, type(got)):
                raise got
            if not equal(got, wanted):
                wanted = type(wanted).__name__ if isinstance(wanted, Exception) else repr(wanted)
                raise Wrong(f"{where}: it gives {described(got)}, but should give {wanted}.")
            same(where, mine, right)

    for_all(number, st.tuples(options, st.lists(one, max_size=most)), tell, examples)


def equal(got: Any, wanted: Any) -> bool:
    """Whether two values are the same, numbers up to rounding, errors by their kind."""
    if isinstance(wanted, Exception):
        return isinstance(got, type(wanted))
    if isinstance(wanted, float) and isinstance(got, int | float):
        return math.isclose(got, wanted, rel_tol=1e-9) or (got != got and wanted != wanted)
    if isinstance(wanted, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(wanted) and all(map(equal, got, wanted))
    return bool(got == wanted)


def _outcome(function: Callable, args: tuple) -> Any:
    try:
        return function(*args)
    except Exception as error:
        return error


def _listed(options: Any) -> str:
    if isinstance(options, dict):
        return ", ".join(f"{name}={value!r}" for name, value in options.items())
    return repr(options)
