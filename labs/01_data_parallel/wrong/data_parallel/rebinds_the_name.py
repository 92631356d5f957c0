"""Makes a new array in place of changing the given one.

hint: does not have rank 0's parameters
"""


def broadcast(parameters, comm):
    parameters = comm.bcast(parameters, root=0)
