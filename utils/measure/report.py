"""Where did the time go? A report on the traces of a run, one per rank.

    python -m utils.measure.report traces/
    python -m utils.measure.report rank0.json.gz rank1.json.gz --json report.json

Any traces of `torch.profiler` will do. `utils.measure.traces` says what to record and what the
kinds of time mean; `utils.measure.findings` has the report as a function.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from utils import cli
from utils.measure.findings import report
from utils.measure.traces import TraceError

PROGRAM = "utils.measure.report"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add("traces", nargs="+", type=cli.path, metavar="TRACES", help=".json, .json.gz, or folders")
    add("--json", metavar="FILE", type=Path, help="also write the report as JSON")
    options = parser.parse_args(arguments)

    def run():
        made = report(options.traces)
        if options.json:
            _write(options.json, json.dumps(made.as_dict(), indent=1))
        print(made)

    return cli.exit_status(PROGRAM, run, stopped="stopped")


def _write(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise TraceError(f"--json {path} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
