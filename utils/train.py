"""`python -m utils.train`: the trainer of the course, as a program (utils/training/train.py)."""

import sys

from utils.training.train import main

if __name__ == "__main__":
    sys.exit(main())
