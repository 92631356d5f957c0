"""Lab 01, data_parallel: each body, written after the solution, is a wrong answer."""


def another_order_on_each_rank():
    """Each rank shuffles with a seed of its own: the batches do not fit together.

    hint: leaves that of one rank at step 0
    """

    def train(comm, epochs=4, batch=200, lr=0.5):
        images, labels = digits.load()
        parameters = digits.new_parameters(seed=comm.rank)
        broadcast(parameters, comm)
        curve = []
        for epoch in range(epochs):
            order = np.random.default_rng(epoch + comm.rank).permutation(len(images))
            for first in range(0, len(images), batch):
                everyone = order[first : first + batch]
                mine = everyone[shard(len(everyone), comm.rank, comm.size)]
                _, gradient = digits.loss_and_gradient(parameters, images[mine], labels[mine])
                all_reduce_gradient(gradient, len(mine), len(everyone), comm)
                parameters -= lr * gradient
                curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
        return curve


def forgotten_all_reduce():
    """Every rank keeps its own gradient.

    hint: still has its own gradient
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        pass


def forgotten_broadcast():
    """Every rank begins with a network of its own.

    hint: does not have rank 0's parameters
    """

    def broadcast(parameters, comm):
        pass


def gather_to_root():
    """Rank 0 collects all gradients, adds them and sends the mean back.

    hint: One collective of the whole
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global
        everyone = np.empty((comm.size, len(gradient)))
        comm.Gather(gradient, everyone, root=0)
        if comm.rank == 0:
            gradient[:] = everyone.sum(axis=0)
        comm.Bcast(gradient, root=0)


def lost_rest():
    """Drops the rows that are left over by the division.

    hint: rows belong to no rank
    """

    def shard(rows, rank, size):
        each = rows // size
        return slice(rank * each, (rank + 1) * each)


def mean_of_means():
    """Divides by the ranks: wrong where ranks have different numbers of rows.

    hint: must weigh more
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        comm.Allreduce(MPI.IN_PLACE, gradient)
        gradient /= comm.size


def missing_scale():
    """Sums the ranks' mean gradients and forgets to divide.

    hint: the sum of the ranks' means
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        comm.Allreduce(MPI.IN_PLACE, gradient)


def rank_0_stays_away():
    """Rank 0 leaves the others alone in the all-reduce.

    hint: the ranks wait for each other
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global
        if comm.rank > 0:
            comm.Allreduce(MPI.IN_PLACE, gradient)


def rebinds_the_name():
    """Makes a new array in place of changing the given one.

    hint: does not have rank 0's parameters
    """

    def broadcast(parameters, comm):
        parameters = comm.bcast(parameters, root=0)


def rest_to_the_last():
    """The last rank takes all that is left over.

    hint: the others wait for the longest
    """

    def shard(rows, rank, size):
        each = rows // size
        return slice(rank * each, rows if rank == size - 1 else (rank + 1) * each)


def scaled_twice():
    """Weights by the rows and divides by the ranks as well.

    hint: times the mean over the global batch
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global / comm.size
        comm.Allreduce(MPI.IN_PLACE, gradient)


def unsharded():
    """Every rank takes all rows.

    hint: some rows belong to several ranks
    """

    def shard(rows, rank, size):
        return slice(0, rows)


def work_not_shared():
    """Shards nothing in the training: right numbers, no speed.

    hint: the work is not shared
    """

    def train(comm, epochs=4, batch=200, lr=0.5):
        images, labels = digits.load()
        parameters = digits.new_parameters(seed=comm.rank)
        broadcast(parameters, comm)
        curve = []
        for epoch in range(epochs):
            order = np.random.default_rng(epoch).permutation(len(images))
            for first in range(0, len(images), batch):
                everyone = order[first : first + batch]
                _, gradient = digits.loss_and_gradient(
                    parameters, images[everyone], labels[everyone]
                )
                all_reduce_gradient(gradient, 1, comm.size, comm)
                parameters -= lr * gradient
                curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
        return curve
