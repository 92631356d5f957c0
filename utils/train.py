"""`python -m utils.train`: the course's trainer as a program (utils/training/train.py)."""

import sys

from utils.imports import collector_at_rest

if __name__ == "__main__":
    with collector_at_rest():
        from utils.training.train import main
    sys.exit(main())
