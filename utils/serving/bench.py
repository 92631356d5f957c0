"""Compares the served model with its peers; the benchmark itself is in tests/bench/serving."""

import sys

from tests.bench.serving.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
