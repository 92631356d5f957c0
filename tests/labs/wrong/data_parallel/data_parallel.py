"""Lab 01, data_parallel: each body, written after the solution, is a wrong answer."""


def another_order_on_each_rank():
    """Each rank shuffles with a seed of its own: the batches do not fit together.

    kind: values
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

    kind: values
    hint: still has its own gradient
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        pass


def forgotten_broadcast():
    """Every rank begins with a network of its own.

    kind: values
    hint: does not have rank 0's parameters
    """

    def broadcast(parameters, comm):
        pass


def gather_to_root():
    """Rank 0 collects all gradients, adds them and sends the mean back.

    kind: communication
    hint: One Allreduce of the whole
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

    kind: sizes
    hint: rows belong to no rank
    """

    def shard(rows, rank, size):
        each = rows // size
        return slice(rank * each, (rank + 1) * each)


def mean_of_means():
    """Divides by the ranks: wrong where ranks have different numbers of rows.

    kind: constants
    hint: must weigh more
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        comm.Allreduce(MPI.IN_PLACE, gradient)
        gradient /= comm.size


def missing_scale():
    """Sums the ranks' mean gradients and forgets to divide.

    kind: values
    hint: the sum of the ranks' means
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        comm.Allreduce(MPI.IN_PLACE, gradient)


def rank_0_stays_away():
    """Rank 0 leaves the others alone in the all-reduce.

    kind: end
    hint: the ranks wait for each other
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global
        if comm.rank > 0:
            comm.Allreduce(MPI.IN_PLACE, gradient)


def rebinds_the_name():
    """Makes a new array in place of changing the given one.

    kind: values
    hint: does not have rank 0's parameters
    """

    def broadcast(parameters, comm):
        parameters = comm.bcast(parameters, root=0)


def rest_to_the_last():
    """The last rank takes all that is left over.

    kind: sizes
    hint: the others wait for the longest
    """

    def shard(rows, rank, size):
        each = rows // size
        return slice(rank * each, rows if rank == size - 1 else (rank + 1) * each)


def scaled_twice():
    """Weights by the rows and divides by the ranks as well.

    kind: values
    hint: times the mean over the global batch
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global / comm.size
        comm.Allreduce(MPI.IN_PLACE, gradient)


def unsharded():
    """Every rank takes all rows.

    kind: values
    hint: some rows belong to several ranks
    """

    def shard(rows, rank, size):
        return slice(0, rows)


def work_not_shared():
    """Shards nothing in the training: right numbers, no speed.

    kind: work
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


def pickled():
    """A method with a small letter: each message is a pickle.

    kind: communication
    hint: A method with a small letter pickles
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient[:] = comm.allreduce(gradient * (rows / rows_global))


def padded():
    """Sends a buffer four times as long.

    kind: communication
    hint: One Bcast of the whole vector
    """

    def broadcast(parameters, comm):
        buffer = np.zeros(4 * len(parameters))
        buffer[: len(parameters)] = parameters
        comm.Bcast(buffer, root=0)
        parameters[:] = buffer[: len(parameters)]


def barrier_first():
    """Waits for everybody before each sum, though the sum itself waits.

    kind: communication
    hint: calls Barrier (0 bytes), Allreduce
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global
        comm.Barrier()
        comm.Allreduce(MPI.IN_PLACE, gradient)


def broadcast_by_sum():
    """The other ranks send zeros: twice the bytes of a broadcast.

    kind: communication
    hint: calls Allreduce
    """

    def broadcast(parameters, comm):
        if comm.rank > 0:
            parameters[:] = 0
        comm.Allreduce(MPI.IN_PLACE, parameters)


def single_precision():
    """Half of the bytes, half of the digits.

    kind: types
    hint: numbers differ
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        short = (gradient * (rows / rows_global)).astype(np.float32)
        comm.Allreduce(MPI.IN_PLACE, short)
        gradient[:] = short


def length_of_today():
    """A buffer for 2,410 numbers, whatever the vector has.

    kind: sizes
    hint: ValueError in data_parallel.py line
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        total = np.empty(2410)
        comm.Allreduce(gradient * (rows / rows_global), total)
        gradient[:] = total


def always_200_rows():
    """The global batch is always 200.

    kind: constants
    hint: times the mean over the global batch
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / 200
        comm.Allreduce(MPI.IN_PLACE, gradient)


def share_of_the_first_step():
    """Works out this rank's share once, and keeps it.

    kind: constants
    hint: the gradient at [0]
    """

    share = {}

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= share.setdefault(comm.size, rows / rows_global)
        comm.Allreduce(MPI.IN_PLACE, gradient)


def product_with_a_fraction():
    """Rows that a rank has, as a fraction, cut off: 1 / 49 · 49 is less than 1.

    kind: sizes
    hint: rows belong to
    """

    def shard(rows, rank, size):
        each = rows / size
        return slice(int(rank * each), int((rank + 1) * each))


def rounded_up():
    """Every rank takes the share rounded up, as long as there are rows.

    kind: sizes
    hint: the others wait for the longest
    """

    def shard(rows, rank, size):
        each = -(-rows // size)
        return slice(min(rank * each, rows), min((rank + 1) * each, rows))


def up_to_four_ranks():
    """A table of what was tried.

    kind: sizes
    hint: rows belong to
    """

    def shard(rows, rank, size):
        each, rest = divmod(rows, size)
        before = (0, 1, 2, 3)
        first = rank * each + min(rank, rest, before[min(rank, 3)])
        return slice(first, first + each + (rank < min(rest, 3)))


def never_waits():
    """Starts the sum and goes on.

    kind: luck
    hint: nobody waits for Iallreduce
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global
        comm.Iallreduce(MPI.IN_PLACE, gradient)


def stays_away_without_rows():
    """A rank without rows has nothing to add, and leaves the others alone.

    kind: odd
    hint: the ranks wait for each other
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        if rows == 0:
            return
        gradient *= rows / rows_global
        comm.Allreduce(MPI.IN_PLACE, gradient)


def hides_nan():
    """What is no number becomes 0: the loss looks good and is wrong.

    kind: odd
    hint: and nan is right
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient[:] = np.nan_to_num(gradient) * (rows / rows_global)
        comm.Allreduce(MPI.IN_PLACE, gradient)


def keeps_them_all():
    """Puts each gradient into a list.

    kind: memory
    hint: bytes more after each step
    """

    history = []

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        history.append(gradient.copy())
        gradient *= rows / rows_global
        comm.Allreduce(MPI.IN_PLACE, gradient)


def everybody():
    """Takes all ranks of the program for the group that trains.

    kind: step
    hint: learning curve leaves that of one rank at step
    """

    def train(comm, epochs=4, batch=200, lr=0.5):
        images, labels = digits.load()
        parameters = digits.new_parameters(seed=comm.rank)
        broadcast(parameters, comm)
        world, curve = MPI.COMM_WORLD, []
        for epoch in range(epochs):
            order = np.random.default_rng(epoch).permutation(len(images))
            for first in range(0, len(images), batch):
                everyone = order[first : first + batch]
                mine = everyone[shard(len(everyone), world.rank, world.size)]
                _, gradient = digits.loss_and_gradient(parameters, images[mine], labels[mine])
                all_reduce_gradient(gradient, len(mine), len(everyone), comm)
                parameters -= lr * gradient
                curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
        return curve


def first_weights_only():
    """Only the first weights travel.

    kind: part
    hint: does not have rank 0's parameters
    """

    def broadcast(parameters, comm):
        comm.Bcast(parameters[:16], root=0)


def leaves_the_program():
    """Ends the process when there is nothing to do.

    kind: end
    hint: the code leaves the program in data_parallel.py line
    """

    def broadcast(parameters, comm):
        if comm.size == 1:
            raise SystemExit
        comm.Bcast(parameters, root=0)


def swallows_all():
    """Tries again for ever, whatever is raised.

    kind: end
    hint: no end: an endless loop?
    """

    def broadcast(parameters, comm):
        while True:
            try:
                parameters[len(parameters)] = 0.0
            except BaseException:
                continue


def rows_in_32_bits():
    """Counts rows in 32-bit floats: from 16,777,217 on, not every number is one.

    kind: types
    hint: shard: 16777
    """

    def shard(rows, rank, size):
        whole = np.float32(rows)
        return slice(int(whole * rank / size), int(whole * (rank + 1) / size))


def in_parts():
    """Long gradients travel in parts of 10,000 numbers.

    kind: sizes
    hint: One Allreduce of the whole vector
    """

    def all_reduce_gradient(gradient, rows, rows_global, comm):
        gradient *= rows / rows_global
        for first in range(0, len(gradient), 10_000):
            comm.Allreduce(MPI.IN_PLACE, gradient[first : first + 10_000])
