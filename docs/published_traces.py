"""Write docs/reference/published_traces.json: steps of GPUs, from traces published by others.

python docs/published_traces.py FOLDER     # a checkout of the repository in SOURCE

It keeps the report of `utils.measure` on each trace, and when its GPU was busy in one step.
Lesson 11 draws it.
"""

import argparse
import json
from pathlib import Path

from utils.measure import traces
from utils.measure.findings import report
from utils.paths import ROOT

OUT = ROOT / "docs" / "reference" / "published_traces.json"
SOURCE = {
    "repository": "https://github.com/facebookresearch/HolisticTraceAnalysis",
    "commit": "f4d0062c382f42bd8a74838bcdad1916c7d5d2da",
    "license": "MIT",
}
STEP = 1  # the second step of each trace
FILES = {  # name: (file, world size and GPU, from the trace)
    "DDP": ("tests/data/nccl_parser_config/nccl_data.json.gz", "2 × NVIDIA A100-PG509-200"),
    "all at the end": (
        "tests/data/df_index_resolver/df_index_resolver.json.gz",
        "2 × Tesla V100-SXM2-32GB",
    ),
    "sharded tables": (
        "tests/data/trace_diff/control/control.json.gz",
        "8 × NVIDIA A100-PG509-200",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    stored = {
        "about": "Published traces of GPUs; ms; busy: % of 200 equal moments of a step",
        "source": SOURCE,
        "traces": {
            name: {"file": file, "gpus": gpus} | _kept(folder / file)
            for name, (file, gpus) in FILES.items()
        },
    }
    OUT.write_text(json.dumps(stored, indent=1) + "\n")


def _kept(file: Path) -> dict:
    (trace,) = traces.read(file)
    made, step = report([trace]), trace.steps[STEP]
    ops: dict[str, list[traces.Collective]] = {}
    for one in trace.collectives:
        if step.start <= one.start < step.end:
            ops.setdefault(one.op, []).append(one)
    return {
        "split": {kind: round(getattr(made.steps[STEP], kind), 2) for kind in traces.KINDS},
        "collectives": {
            op: {
                "calls": len(some),
                "bytes": None if some[0].bytes is None else sum(one.bytes for one in some),
                "first": round(some[0].start - step.start, 2),
                "last": round(some[-1].end - step.start, 2),
            }
            for op, some in ops.items()
        },
        "waits": [  # of the host, 1 ms or longer
            {"op": one.op, "start": round(one.start - step.start, 2), "ms": round(one.ms, 2)}
            for one in trace.waits
            if step.start <= one.start < step.end and one.ms >= 1
        ],
        "findings": [one.text for one in made.findings],  # over all its steps
        "busy": {  # as a string: one value per line is no easier to read
            kind: " ".join(f"{100 * share:.0f}" for share in shares)
            for kind, shares in traces.busy(trace, STEP).items()
        },
    }


if __name__ == "__main__":
    main()
