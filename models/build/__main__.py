"""Rebuilds the workshop's own language models: `base` and two smaller ones.

python -m models.build train        # pretrain all three on the standard library
python -m models.build train --only tiny --seconds 60 --folder scratch/models
python -m models.build measure      # held-out bits, gzip, xz, n-grams, samples, fewer bits
python -m models.build card         # models/base/README.md from the measurements
"""

import argparse
import sys
from pathlib import Path

from models.build.card import write_card
from models.build.measure import EVERYTHING, measure
from models.build.train import RUNS, train
from utils.models.shipped import MODELS, SIZES


def main(arguments=None):
    """Runs `python -m models.build`; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "train":
            names = list(SIZES) if options.only is None else [options.only]
            changes = {
                key: getattr(options, key)
                for key in ("steps", "seconds")
                if getattr(options, key) is not None
            }
            for name in names:
                train(name, options.folder, options.runs, options.ranks, options.text, **changes)
        elif options.command == "measure":
            names = EVERYTHING if options.only is None else [options.only]
            measure(names, options.folder, options.runs)
        else:
            print(f"written: {write_card(options.folder)}")
    except ValueError as error:
        print(f"models.build: {error}", file=sys.stderr)
        return 2
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m models.build",
        description="Pretrain and measure the workshop's models.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="pretrain the models, or resume it")
    training.add_argument("--steps", type=int, help="total steps; default: 900")
    training.add_argument("--seconds", type=float, help="train for this long instead")
    training.add_argument("--ranks", type=int, help="processes; default: one per GPU, or at most 2")
    training.add_argument("--text", default="library", help="as for utils.train")
    training.add_argument("--only", choices=SIZES, help="one model; default: all")
    measuring = commands.add_parser("measure", help="write models/base/measured.json")
    measuring.add_argument("--only", choices=EVERYTHING, help="one part; default: all")
    card = commands.add_parser("card", help="write models/base/README.md from measured.json")
    for command in (training, measuring):
        command.add_argument("--runs", default=RUNS, help="where the checkpoints are")
    for command in (training, measuring, card):
        command.add_argument("--folder", default=MODELS, type=Path, help="where the models are")
    return parser


if __name__ == "__main__":
    sys.exit(main())
