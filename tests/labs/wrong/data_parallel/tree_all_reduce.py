"""Lab 01, tree_all_reduce: each body, written after the solution, is a wrong answer."""


def both_send_first():
    """Partners that both send before they receive.

    kind: end
    hint: dist.send comes back only when
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        distance = 1
        while distance < size:
            partner, received = rank ^ distance, torch.empty_like(tensor)
            dist.send(tensor, partner)
            dist.recv(received, partner)
            tensor += received
            distance *= 2


def calls_reduce():
    """Lets the library do it.

    kind: library
    hint: build it yourself
    """

    def tree_all_reduce(tensor):
        dist.all_reduce(tensor)


def chain():
    """From rank to rank and back: each rank says little, but all wait.

    kind: communication
    hint: messages follow one another, a tree has at most
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        if rank + 1 < size:
            received = torch.empty_like(tensor)
            dist.recv(received, rank + 1)
            tensor += received
        if rank > 0:
            dist.send(tensor, rank - 1)
            dist.recv(tensor, rank - 1)
        if rank + 1 < size:
            dist.send(tensor, rank + 1)


def gather_to_root():
    """All ranks send straight to rank 0: it receives N-1 messages one after another.

    kind: communication
    hint: messages follow one another, a tree has at most
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        if rank > 0:
            dist.send(tensor, 0)
            dist.recv(tensor, 0)
            return
        for other in range(1, size):
            received = torch.empty_like(tensor)
            dist.recv(received, other)
            tensor += received
        for other in range(1, size):
            dist.send(tensor, other)


def no_broadcast():
    """Adds up the tree and forgets the way down: only rank 0 has the sum.

    kind: part
    hint: Ranks [0] have the sum
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        received, distance = torch.empty_like(tensor), 1
        while distance < size:
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                dist.recv(received, rank + distance)
                tensor += received
            distance *= 2


def only_powers_of_two():
    """Recursive doubling without a thought for three ranks.

    kind: sizes
    hint: with 3 ranks
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        distance = 1
        while distance < size:
            partner, received = rank ^ distance, torch.empty_like(tensor)
            if partner < size:
                handle = dist.isend(tensor, partner)
                dist.recv(received, partner)
                handle.wait()
                tensor += received
            distance *= 2


def tree_then_star():
    """Up by a tree, down from rank 0 to each in turn.

    kind: communication
    hint: messages follow one another, a tree has at most
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        received, distance = torch.empty_like(tensor), 1
        while distance < size:
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                dist.recv(received, rank + distance)
                tensor += received
            distance *= 2
        for other in range(1, size):
            if rank == 0:
                dist.send(tensor, other)
            elif rank == other:
                dist.recv(tensor, 0)


def send_not_waited_for():
    """Starts the last send and returns.

    kind: luck
    hint: nobody waits for an isend
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        if size != 2:
            return Right(tensor)
        received = torch.empty_like(tensor)
        if rank == 1:
            dist.send(tensor, 0)
            dist.recv(tensor, 0)
        else:
            dist.recv(received, 1)
            tensor += received
            dist.isend(tensor, 1)


def receive_not_waited_for():
    """Starts a receive, and adds what is there.

    kind: luck
    hint: the sum | nobody waits for an irecv
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        if size != 2:
            return Right(tensor)
        received = torch.zeros_like(tensor)
        handle = dist.irecv(received, 1 - rank)
        dist.isend(tensor.clone(), 1 - rank).wait()
        tensor += received


def buffer_in_single_precision():
    """Receives into four bytes a number.

    kind: types
    hint: with 2 ranks
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        copy = tensor.float()
        Right(copy)
        tensor.copy_(copy)


def in_double_precision():
    """Adds in eight bytes a number, and sends them.

    kind: types
    hint: and the whole tensor has
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        copy = tensor.double()
        Right(copy)
        tensor.copy_(copy)


def rounded_down():
    """⌊log2 N⌋ rounds: right for 1, 2 and 4 ranks.

    kind: sizes
    hint: with 3 ranks
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(tensor)
        distances = [2**step for step in range(int(math.log2(size)))]
        for distance in distances:
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                dist.recv(received, rank + distance)
                tensor += received
        for distance in reversed(distances):
            if rank % (2 * distance) == distance:
                dist.recv(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                dist.send(tensor, rank + distance)


def hides_nan():
    """What is no number becomes 0 before the sum.

    kind: odd
    hint: and nan is right
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        tensor.nan_to_num_()
        Right(tensor)


def nothing_to_add():
    """A rank with zeros only does not take part.

    kind: odd
    hint: with 2 ranks
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        if tensor.any():
            Right(tensor)


def keeps_tensors():
    """Keeps what was received.

    kind: memory
    hint: after each call more bytes are kept
    """

    Right = tree_all_reduce

    history = []

    def tree_all_reduce(tensor):
        Right(tensor)
        history.append(tensor + 0)


def another_memory():
    """Gives the tensor new memory.

    kind: inputs
    hint: change it in place, not a copy
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        total = tensor.clone()
        Right(total)
        tensor.set_(total)


def sum_of_the_first_call():
    """Remembers the sum of each shape.

    kind: constants
    hint: numbers differ
    """

    Right = tree_all_reduce

    sums = {}

    def tree_all_reduce(tensor):
        if tensor.shape not in sums:
            Right(tensor)
            sums[tensor.shape] = tensor.clone()
        tensor.copy_(sums[tensor.shape])


def root_by_a_counter():
    """Another rank is the root in each call: ranks must have counted alike.

    kind: step
    hint: with 2 ranks
    """

    Right = tree_all_reduce

    calls = [0]

    def tree_all_reduce(tensor):
        calls[0] += 1
        rank, size = dist.get_rank(), dist.get_world_size()
        if size != 2:
            return Right(tensor)
        if rank == calls[0] % 2:
            dist.send(tensor, 1 - rank)
            dist.recv(tensor, 1 - rank)
        else:
            received = torch.empty_like(tensor)
            dist.recv(received, 1 - rank)
            tensor += received
            dist.send(tensor, 1 - rank)


def sends_twice():
    """Down the tree twice, to be sure.

    kind: communication
    hint: messages follow one another
    """

    Right = tree_all_reduce

    def tree_all_reduce(tensor):
        Right(tensor)
        rank, size = dist.get_rank(), dist.get_world_size()
        for other in (rank ^ 1,):
            if other < size and rank % 2:
                dist.recv(tensor, other)
            elif other < size:
                dist.send(tensor, other)


def up_to_eight_ranks():
    """Three rounds, whatever the number of ranks.

    kind: sizes
    hint: with 17 ranks
    """

    def tree_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(tensor)
        for distance in (1, 2, 4):
            if rank % (2 * distance) == distance:
                dist.send(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                dist.recv(received, rank + distance)
                tensor += received
        for distance in (4, 2, 1):
            if rank % (2 * distance) == distance:
                dist.recv(tensor, rank - distance)
            elif rank % (2 * distance) == 0 and rank + distance < size:
                dist.send(tensor, rank + distance)


def a_buffer_for_each_shape():
    """Receives into a buffer that it keeps for a shape, whatever the type.

    kind: types
    hint: in turn
    """

    Right = tree_all_reduce

    buffers = {}

    def tree_all_reduce(tensor):
        before = torch.empty_like
        torch.empty_like = lambda t: buffers.setdefault(t.shape, before(t))
        try:
            Right(tensor)
        finally:
            torch.empty_like = before
