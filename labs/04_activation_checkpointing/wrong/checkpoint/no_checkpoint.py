"""Just calls the function.

hint: in the backward pass the layers ran [0, 0, 0, 0, 0] times
"""


def checkpoint(function, *inputs):
    return function(*inputs)
