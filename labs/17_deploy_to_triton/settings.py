"""Lab 17, exercise c: the workshop's own engine, tuned to a goal.

The checkpoint is models/small: 5 layers, 2 heads of 64, hidden size 128, 512 positions, 4096 words,
1.5 million parameters. The engine computes in fp32 here.

Goal:

1. A device has 12 MiB for the weights and the KV cache of its rank.
2. 16 simultaneous requests: all are served, with at least 3.3 tokens per step on average.
3. 32 simultaneous requests: at least 8 are refused at once, so that the waiting ones need not wait
   long; and every request gets an answer or a refusal.
"""


def settings() -> dict:
    """{"tp": ranks, "slots": requests that run together, "queue": requests that may wait}."""
    raise NotImplementedError("return the three numbers")
