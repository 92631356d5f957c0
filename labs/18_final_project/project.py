"""The final project: your decisions, in three functions. The notebook has the brief.

Each check cell asks one function, runs what it returns for real, and compares.
"""

from typing import Any

from utils.planner import Strategy


def training_plan() -> dict[str, Any]:
    """{"strategy": Strategy(…), "interval": minutes, "days": days}

    strategy   as in lab 10: dp · pp · tp is the number of GPUs; micro_batch, interleave, recompute,
               zero and sequence_parallel are yours; schedule, offload and the batch are not
    interval   minutes of computing between two checkpoints
    days       that your plan takes, with all saves, failures and restarts
    """
    raise NotImplementedError("return your strategy, the minutes between checkpoints and the days")


def rehearsal() -> dict[str, Any]:
    """{"options": {name: value, …}, "save_every": steps}

    options      of `python -m utils.train`, those of lab 10, exercise f: accumulate, precision,
                 recompute, shard, offload, tp, sequence_parallel, pp, cp, context
    save_every   steps between two checkpoints
    """
    raise NotImplementedError(
        "return the options that fit under the limit, and the steps between saves"
    )


def serving() -> dict[str, Any]:
    """{"dtype": …, "tp": …, "max_model_len": …, "slots": …, "queue": …}

    dtype           of the exported version: "fp32", "bf16", "int8" or "int4"
    max_model_len   positions of a request at most, prompt and answer
    slots, queue    requests that run together (the engine's max_num_seqs), and that may wait
    """
    raise NotImplementedError("return the format and the four settings")
