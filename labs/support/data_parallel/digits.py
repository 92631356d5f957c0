"""Given: real images of handwritten digits, and a small network with one hidden layer, in NumPy.

All parameters are one flat vector, and so is the gradient: 2,410 values, 19,280 bytes.
"""

import importlib.util
from pathlib import Path

import numpy as np

PIXELS, HIDDEN, CLASSES = 64, 32, 10
SHAPES = [(PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]  # of weights and biases
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


def load() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of 8×8 pixels, (1797, 64), from 0 to 1; and their labels, (1797,).

    The file comes with scikit-learn (`sklearn.datasets.load_digits`). Reading it directly spares
    every rank the import of scikit-learn, which takes longer than the whole training.
    """
    package = importlib.util.find_spec("sklearn").submodule_search_locations[0]
    table = np.loadtxt(Path(package) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1] / 16, table[:, -1].astype(int)


def new_parameters(seed: int) -> np.ndarray:
    """Random parameters, (SIZE,), different for each seed."""
    random = np.random.default_rng(seed)
    parts = [random.normal(0, shape[0] ** -0.5, shape) * (len(shape) > 1) for shape in SHAPES]
    return np.concatenate([part.ravel() for part in parts])


def loss_and_gradient(
    parameters: np.ndarray, images: np.ndarray, labels: np.ndarray
) -> tuple[float, np.ndarray]:
    """Mean cross-entropy of these images, and its gradient, (SIZE,); zeros without images."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
    w1, b1, w2, b2 = (p.reshape(s) for p, s in zip(np.split(parameters, ends), SHAPES))
    hidden = np.tanh(images @ w1 + b1)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    log_probability = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows, count = np.arange(len(labels)), max(len(labels), 1)
    loss = -log_probability[rows, labels].sum() / count

    d_scores = np.exp(log_probability)
    d_scores[rows, labels] -= 1
    d_scores /= count
    d_hidden = (d_scores @ w2.T) * (1 - hidden**2)
    gradient = [images.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_scores, d_scores.sum(0)]
    return float(loss), np.concatenate([part.ravel() for part in gradient])
