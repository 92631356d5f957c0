"""Lab 01, ring: each body, written after the solution, is a wrong answer."""


def all_send_first():
    """Every rank sends first: with blocking sends no one ever receives.

    kind: end
    hint: dist.send comes back only when
    """

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.send(outgoing, (rank + 1) % size)
        dist.recv(incoming, (rank - 1) % size)


def all_whole_messages():
    """2(N-1) messages as it should be, but each of the whole tensor.

    kind: communication
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

    kind: library
    hint: build it yourself
    """

    def ring_all_reduce(tensor):
        dist.all_reduce(tensor)


def changes_a_copy():
    """Works on a copy and returns it.

    kind: values
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

    kind: end
    hint: an endless loop?
    """

    def ring_all_reduce(tensor):
        step = 0
        while step < dist.get_world_size():
            pass


def no_second_half():
    """Stops after the N-1 exchanges that add.

    kind: part
    hint: own numbers: which part has them?
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

    kind: communication
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

    kind: values
    hint: own numbers: which part has them?
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

    kind: sizes
    hint: with 2 ranks
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

    kind: values
    hint: own numbers: which part has them?
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

    kind: communication
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

    kind: sizes
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

    kind: communication
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


def send_not_waited_for():
    """Starts a send and goes on.

    kind: luck
    hint: nobody waits for an isend
    """

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.isend(outgoing, (rank + 1) % size)
        dist.recv(incoming, (rank - 1) % size)


def receive_not_waited_for():
    """Starts a receive and goes on: often the message is there in time.

    kind: luck
    hint: exchange
    """

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.irecv(incoming, (rank - 1) % size)
        dist.send(outgoing, (rank + 1) % size)


def single_precision():
    """Messages of four bytes a number, whatever the tensor has.

    kind: types
    hint: numbers differ
    """

    Right = ring_all_reduce

    def ring_all_reduce(tensor):
        copy = tensor.float()
        Right(copy)
        tensor.copy_(copy)


def double_precision():
    """Messages of eight bytes a number, whatever the tensor has.

    kind: types
    hint: torch.float64 numbers travel for a tensor of torch.float32
    """

    Right = ring_all_reduce

    def ring_all_reduce(tensor):
        copy = tensor.double()
        Right(copy)
        tensor.copy_(copy)


def stays_away_with_nan():
    """A rank with a number that is none does not take part.

    kind: odd
    hint: Does every rank take part
    """

    Right = ring_all_reduce

    def ring_all_reduce(tensor):
        if not tensor.isnan().any():
            Right(tensor)


def hides_nan():
    """What is no number becomes 0 before the sum.

    kind: odd
    hint: and nan is right
    """

    Right = ring_all_reduce

    def ring_all_reduce(tensor):
        tensor.nan_to_num_()
        Right(tensor)


def keeps_tensors():
    """Keeps a copy of every sum.

    kind: memory
    hint: after each call more bytes are kept
    """

    Right = ring_all_reduce

    history = []

    def ring_all_reduce(tensor):
        Right(tensor)
        history.append(tensor.clone())


def changes_what_it_sends():
    """The message is overwritten after it has left.

    kind: inputs
    hint: outgoing is not what it was
    """

    Exchange = exchange

    def exchange(outgoing, incoming):
        Exchange(outgoing, incoming)
        outgoing.zero_()


def another_memory():
    """Gives the tensor new memory: others who look at the old one see no sum.

    kind: inputs
    hint: change it in place, not a copy
    """

    Right = ring_all_reduce

    def ring_all_reduce(tensor):
        total = tensor.clone()
        Right(total)
        tensor.data = total


def sum_of_the_first_call():
    """Remembers the sum of each shape.

    kind: constants
    hint: numbers differ
    """

    Right = ring_all_reduce

    sums = {}

    def ring_all_reduce(tensor):
        if tensor.shape not in sums:
            Right(tensor)
            sums[tensor.shape] = tensor.clone()
        tensor.copy_(sums[tensor.shape])


def turns_by_a_counter():
    """Who sends first changes from call to call: ranks must have counted alike.

    kind: step
    hint: dist.send comes back only when | nobody sends: who begins?
    """

    calls = [0]

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        calls[0] += 1
        if size > 1 and (rank == 0) == (calls[0] % 2 == 0):
            dist.send(outgoing, (rank + 1) % size)
            dist.recv(incoming, (rank - 1) % size)
        else:
            dist.recv(incoming, (rank - 1) % size)
            dist.send(outgoing, (rank + 1) % size)


def up_to_four_ranks():
    """A table of who sends first.

    kind: sizes
    hint: with 6 ranks
    """

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        if (True, False, True, False, False, False)[rank] or rank > 3:
            dist.send(outgoing, (rank + 1) % size)
            dist.recv(incoming, (rank - 1) % min(size, 5))
        else:
            dist.recv(incoming, (rank - 1) % min(size, 4))
            dist.send(outgoing, (rank + 1) % size)


def as_long_as_what_it_sends():
    """Receives as many numbers as it sends; the ring itself goes another way.

    kind: sizes
    hint: exchange
    """

    Exchange = exchange

    def exchange(outgoing, incoming):
        received = torch.empty_like(outgoing)
        Exchange(outgoing, received)
        incoming.copy_(received)

    def ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        parts = tensor.view(-1).tensor_split(size)
        for step in range(size - 1):
            into = parts[(rank - step - 1) % size]
            received = torch.empty_like(into)
            Exchange(parts[(rank - step) % size], received)
            into += received
        for step in range(size - 1):
            Exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])


def in_pieces():
    """Messages of more than 16,384 numbers travel in pieces.

    kind: sizes
    hint: one send of
    """

    Exchange = exchange

    def exchange(outgoing, incoming):
        pieces, places = outgoing.split(16_384), incoming.split(16_384)
        for number in range(max(len(pieces), len(places))):
            Exchange(
                pieces[number] if number < len(pieces) else outgoing[:0],
                places[number] if number < len(places) else incoming[:0],
            )


def asks_for_a_while():
    """Looks for the message thirty times, and goes on.

    kind: luck
    hint: exchange
    """

    import time

    def exchange(outgoing, incoming):
        rank, size = dist.get_rank(), dist.get_world_size()
        handle = dist.irecv(incoming, (rank - 1) % size)
        dist.send(outgoing, (rank + 1) % size)
        for _ in range(30):
            if handle.is_completed():
                break
            time.sleep(0.01)
