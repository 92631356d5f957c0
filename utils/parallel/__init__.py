"""The ways to break a model over ranks, one file each; `utils/training/train.py` composes them."""
