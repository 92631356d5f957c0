"""Shards nothing in the training: right numbers, no speed.

hint: the work is not shared
"""

import numpy as np

from labs.support.data_parallel import digits


def train(comm, epochs=4, batch=200, lr=0.5):
    images, labels = digits.load()
    parameters = digits.new_parameters(seed=comm.rank)
    broadcast(parameters, comm)  # noqa: F821
    curve = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        for first in range(0, len(images), batch):
            everyone = order[first : first + batch]
            _, gradient = digits.loss_and_gradient(parameters, images[everyone], labels[everyone])
            all_reduce_gradient(gradient, 1, comm.size, comm)  # noqa: F821
            parameters -= lr * gradient
            curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
    return curve
