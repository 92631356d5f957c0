"""Lab 01, tree_all_reduce: each body, written after the solution, is a wrong answer."""


def both_send_first():
    """Partners that both send before they receive.

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

    hint: build it yourself
    """

    def tree_all_reduce(tensor):
        dist.all_reduce(tensor)


def chain():
    """From rank to rank and back: each rank says little, but all wait.

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
