"""`python -m utils.train`: the trainer of the course, as a program (utils/training/train.py)."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # it takes a quarter of the time of these imports
    from utils.training.train import main

    gc.enable()
    gc.freeze()
    sys.exit(main())
