"""Sums the ranks' mean gradients and forgets to divide.

hint: the sum of the ranks' means
"""

from mpi4py import MPI


def all_reduce_gradient(gradient, rows, rows_global, comm):
    comm.Allreduce(MPI.IN_PLACE, gradient)
