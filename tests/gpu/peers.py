"""Our training step against nanoGPT's and transformers', by tests/bench/bench_train.py.

The environment variable NANOGPT names a clone of nanoGPT. Half of that program's layers and a third
of its rounds fit into the part's time, most of which is compilation.
"""

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.bench.bench_train import BUILDERS, contenders, measure

SIZES = {"layers": 6, "hidden": 1024, "heads": 16, "batch": 16, "seq": 1024, "vocab": 32768}
TINY = {"layers": 2, "hidden": 32, "heads": 2, "batch": 2, "seq": 32, "vocab": 256}


def steps(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """A row for each, eager and compiled: `ours_over` is the ratio of speeds within a round."""
    clone = os.environ.get("NANOGPT")
    sizes = argparse.Namespace(
        **(TINY if rehearse else SIZES), kv_heads=None, threads=None, cpu_time=False,
        bf16=not rehearse, steps=3, litgpt=None, nanogpt=Path(clone) if clone else None,
    )
    yield "sizes", TINY if rehearse else SIZES
    for compiled in (False,) if rehearse else (False, True):
        sizes.compile = compiled
        started = contenders(sizes)
        seconds = measure(started, 2 if rehearse else 5)
        for name in BUILDERS:
            row = {"absent": "it is not installed"}
            if times := seconds.get((name, compiled)):
                ratios = [a / b for a, b in zip(times, seconds["utils.train", compiled])]
                rate = sizes.batch * sizes.seq / statistics.median(times)
                row = {"tokens_per_s": rate, "ours_over": statistics.median(ratios)}
            yield f"{name}, compiled" if compiled else name, row
