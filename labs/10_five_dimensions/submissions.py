"""Exercises 10b to 10d: submit a strategy for each machine.

    Strategy(dp=…, pp=…, tp=…, micro_batch=…, interleave=…, recompute="none" | "selective" | "full",
             zero=0 | 1 | 3, sequence_parallel=True | False)

dp · pp · tp must be the number of GPUs. The sizes of model, machine and batch are in `cases.py`.
Leave other fields at their defaults. You may call `utils.planner.plan`, but not its `search`: that
is exercise e.
"""

from utils.planner import Strategy


def one_node() -> Strategy:
    """Llama 2 13B on one DGX A100: 8 GPUs of 80 GB, 256 sequences of 4,096 tokens per step."""
    raise NotImplementedError(
        "return a Strategy on 8 GPUs that fits and is within 5 % of the fastest"
    )


def cluster() -> Strategy:
    """GPT-3 175B on 128 DGX A100: 1,024 GPUs, 1,536 sequences of 2,048 tokens per step."""
    raise NotImplementedError(
        "return a Strategy on 1024 GPUs that fits and is within 5 % of the fastest"
    )


def frontier() -> Strategy:
    """A trillion parameters on Frontier: 3,072 GPUs of 64 GB, 3,072 sequences of 2,048 tokens."""
    raise NotImplementedError(
        "return a Strategy on 3072 GPUs that fits and is within 5 % of the fastest"
    )
