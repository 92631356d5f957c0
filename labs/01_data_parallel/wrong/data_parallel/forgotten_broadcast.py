"""Every rank begins with a network of its own.

hint: does not have rank 0's parameters
"""


def broadcast(parameters, comm):
    pass
