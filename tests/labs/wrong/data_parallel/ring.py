"""Lab 01, ring: each body, written after the solution, is a wrong answer."""


def all_send_first():
    """Every rank sends first: with blocking sends no one ever receives.

    hint: dist.send comes back only when
    """

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.send(outgoing, (rank + 1) % size)
        dist.recv(incoming, (rank - 1) % size)


def all_whole_messages():
    """2(N-1) messages as it should be, but each of the whole tensor.

    hint: the whole tensor,
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.view(-1)
        parts = flat.tensor_split(size)
        for step in range(size - 1):
            received = flat.clone()
            exchange(flat, received)
            into = (rank - step - 1) % size
            parts[into].add_(received.tensor_split(size)[into])
        for step in range(size - 1):
            received = flat.clone()
            exchange(flat, received)
            into = (rank - step) % size
            parts[into].copy_(received.tensor_split(size)[into])


def calls_all_reduce():
    """Lets the library do it.

    hint: build it yourself
    """

    def ring_all_reduce(tensor):
        dist.all_reduce(tensor)


def changes_a_copy():
    """Works on a copy and returns it.

    hint: change it in place, not a copy
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.clone().view(-1)
        parts = flat.tensor_split(size)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            exchange(parts[(rank - step) % size], received)
            into += received
        for step in range(size - 1):
            exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])
        return flat.view_as(tensor)


def endless():
    """A loop that never ends.

    hint: an endless loop?
    """

    def ring_all_reduce(tensor):
        step = 0
        while step < dist.get_world_size():
            pass


def no_second_half():
    """Stops after the N-1 exchanges that add.

    hint: N-1 that add and N-1 that copy
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.view(-1)
        parts = flat.tensor_split(size)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            exchange(parts[(rank - step) % size], received)
            into += received


def number_by_number():
    """Sends every number as a message of its own.

    hint: messages where a ring sends
    """

    def ring_all_reduce(tensor):
        flat = tensor.view(-1)
        for place in range(len(flat)):
            travelling = flat[place : place + 1].clone()
            for _ in range(dist.get_world_size() - 1):
                received = travelling.clone()
                exchange(travelling, received)
                flat[place] += received[0]
                travelling = received


def off_by_one():
    """Sends the part of its own rank in the second half: it is not complete.

    hint: Which part does each rank send
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.view(-1)
        parts = flat.tensor_split(size)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            exchange(parts[(rank - step) % size], received)
            into += received
        for step in range(size - 1):
            exchange(parts[(rank - step) % size], parts[(rank - step - 1) % size])


def only_where_n_divides():
    """Cuts N parts of length // N: the rest is never summed.

    hint: parts of different lengths
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.view(-1)
        parts = flat[: len(flat) // size * size].view(size, -1)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            exchange(parts[(rank - step) % size], received)
            into += received
        for step in range(size - 1):
            exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])


def overwrites():
    """Copies in the first half in place of adding.

    hint: Which part does each rank send
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.view(-1)
        parts = flat.tensor_split(size)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            exchange(parts[(rank - step) % size], received)
            into.copy_(received)
        for step in range(size - 1):
            exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])


def rank_0_adds():
    """Everyone sends to rank 0, which adds and sends the sum to everyone.

    hint: the whole tensor,
    """

    def ring_all_reduce(tensor):
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


def too_few_parts():
    """`chunk` makes fewer than N parts of a short tensor.

    hint: IndexError
    """

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        flat = tensor.view(-1)
        parts = flat.chunk(size)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            exchange(parts[(rank - step) % size], received)
            into += received
        for step in range(size - 1):
            exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])


def whole_tensor():
    """Sends the whole tensor around: N-1 times as many bytes as needed.

    hint: the whole tensor,
    """

    def ring_all_reduce(tensor):
        total, travelling = tensor.clone(), tensor.clone()
        for _ in range(dist.get_world_size() - 1):
            received = travelling.clone()
            exchange(travelling, received)
            total += received
            travelling = received
        tensor.copy_(total)
