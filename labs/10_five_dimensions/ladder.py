"""Exercise 10f: meet the limit.

    planned(recompute="full").memory        # {kind: bytes, …, "total": bytes}, by the planner
    attempt(recompute="full")               # on real ranks, under the cap

Two ranks, each of which may hold 24 MB, train a model whose plain run needs far more: see
`labs/support/five_dimensions/limit.py` (given). You may change those options of
`python -m utils.train` that do not change the result:

    accumulate, precision ("fp32", "bf16"), recompute ("none", "selective", "full"),
    shard (1, 2, 3), offload ("optimizer", "activations"), tp, sequence_parallel, pp, cp, context
"""

from typing import Any


def ladder() -> list[tuple[dict[str, Any], float]]:
    """[(options, MB predicted for the fullest rank), …]: at least five rungs, the first ({}, …).

    Each rung has a lower peak than the previous one; the last one fits. Predict before you run: the
    planner is nearly always close enough, but not always.
    """
    raise NotImplementedError("list your rungs, each with your prediction in MB")


def largest_model() -> tuple[dict[str, Any], dict[str, Any]]:
    """(sizes, options): the largest model that you can train under the same cap. The open task.

    sizes: layers, hidden, heads, kv_heads and tie; those not named are as in the run.
    """
    raise NotImplementedError("name a model's sizes and the options with which it trains")
