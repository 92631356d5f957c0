"""Exercise 10f: meet the limit.

    planned(recompute="full").memory        # {kind: bytes, …, "total": bytes}, by the planner
    attempt(recompute="full")               # on real ranks, under the cap

Two ranks, of which each may hold 24 MB, train a model whose plain run needs far more: see
`labs/support/five_dimensions/limit.py` (given). What may be changed are the options of
`python -m utils.train` that leave the run what it is:

    accumulate, precision ("fp32", "bf16"), recompute ("none", "selective", "full"),
    shard (1, 2, 3), offload ("optimizer", "activations"), tp, sequence_parallel, pp, cp, context
"""

from typing import Any


def ladder() -> list[tuple[dict[str, Any], float]]:
    """[(options, MB predicted for the fullest rank), …]: five rungs or more, the first ({}, …).

    Each rung lowers the peak of the one before; the last one fits. Predict before you run: the
    planner is nearly always near enough, not always.
    """
    raise NotImplementedError("list your rungs, each with the MB that you predict")


def largest_model() -> tuple[dict[str, Any], dict[str, Any]]:
    """(sizes, options): the largest model that you can train under the same cap. The open task.

    sizes: layers, hidden, heads, kv_heads and tie; what is not named is as in the run.
    """
    raise NotImplementedError("name the sizes of a model and the options with which it trains")
