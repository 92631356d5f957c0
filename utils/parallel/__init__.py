"""The ways to break a model over ranks, one file each; `utils/train.py` composes them."""
