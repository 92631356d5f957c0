"""Divides by the ranks: wrong where ranks have different numbers of rows.

hint: must weigh more
"""

from mpi4py import MPI


def all_reduce_gradient(gradient, rows, rows_global, comm):
    comm.Allreduce(MPI.IN_PLACE, gradient)
    gradient /= comm.size
