"""Weights by the rows and divides by the ranks as well.

hint: times the mean over the global batch
"""

from mpi4py import MPI


def all_reduce_gradient(gradient, rows, rows_global, comm):
    gradient *= rows / rows_global / comm.size
    comm.Allreduce(MPI.IN_PLACE, gradient)
