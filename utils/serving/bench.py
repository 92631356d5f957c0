"""The command that compares the served model with its peers; tests/bench/serving is the bench."""

import sys

from tests.bench.serving.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
