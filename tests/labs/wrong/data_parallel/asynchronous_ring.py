"""Lab 01, asynchronous_ring: each body, written after the solution, is a wrong answer."""


def blocking():
    """The ring of exercise b: a rank that sends does not receive.

    kind: communication
    hint: messages one after another
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            if rank % 2 == 0:
                dist.send(outgoing, following)
                dist.recv(received, previous)
            else:
                dist.recv(received, previous)
                dist.send(outgoing, following)
            if adds:
                into += received


def waits_between():
    """Asynchronous by name: even ranks wait for the send before they start to receive.

    kind: communication
    hint: messages one after another
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            if rank % 2 == 0:
                dist.isend(outgoing, following).wait()
                dist.irecv(received, previous).wait()
            else:
                dist.irecv(received, previous).wait()
                dist.isend(outgoing, following).wait()
            if adds:
                into += received


def all_wait_for_the_send():
    """Every rank waits for its send before it starts to receive.

    kind: end
    hint: Who waits for a message
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            dist.isend(outgoing, following).wait()
            dist.irecv(received, previous).wait()
            if adds:
                into += received


def receive_not_waited_for():
    """Waits for the send only.

    kind: luck
    hint: the sum | nobody waits for an irecv
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            send.wait()
            if adds:
                into += received


def send_not_waited_for():
    """Waits for the receive only.

    kind: luck
    hint: nobody waits for an isend | did not complete within
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            receive.wait()
            if adds:
                into += received


def last_send_only():
    """Waits for the sends at the end, for the last one.

    kind: luck
    hint: nobody waits for an isend
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            receive.wait()
            if adds:
                into += received
        if size > 1:
            send.wait()


def late_sends():
    """Waits for all sends at the end: parts change while they may still travel.

    kind: luck
    hint: changed after isend
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        sends = []
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            sends.append(dist.isend(outgoing, following))
            dist.recv(received, previous)
            if adds:
                into += received
        for handle in sends:
            handle.wait()


def calls_all_reduce():
    """Lets the library do it, asynchronously.

    kind: library
    hint: build it yourself
    """

    def asynchronous_ring_all_reduce(tensor):
        dist.all_reduce(tensor, async_op=True).wait()


def all_to_everyone():
    """Every rank sends its tensor to each other rank at once.

    kind: communication
    hint: a ring sends at most
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        others = [other for other in range(size) if other != rank]
        received = [torch.empty_like(tensor) for _ in others]
        message = tensor.clone()
        handles = [dist.isend(message, other) for other in others]
        handles += [dist.irecv(into, other) for into, other in zip(received, others)]
        for handle in handles:
            handle.wait()
        for part in received:
            tensor += part


def single_precision():
    """Messages of four bytes a number.

    kind: types
    hint: numbers differ
    """

    Right = asynchronous_ring_all_reduce

    def asynchronous_ring_all_reduce(tensor):
        copy = tensor.float()
        Right(copy)
        tensor.copy_(copy)


def only_where_n_divides():
    """Cuts N parts of length // N: the rest is never summed.

    kind: sizes
    hint: with 2 ranks
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1)[: tensor.numel() // size * size].view(size, -1)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            send.wait()
            receive.wait()
            if adds:
                into += received


def too_few_parts():
    """`chunk` makes fewer than N parts of a short tensor.

    kind: sizes
    hint: IndexError
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).chunk(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            send.wait()
            receive.wait()
            if adds:
                into += received


def no_second_half():
    """Stops after the exchanges that add.

    kind: part
    hint: own numbers: which part has them?
    """

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(size - 1):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            send.wait()
            receive.wait()
            if adds:
                into += received


def hides_nan():
    """What is no number becomes 0 before the sum.

    kind: odd
    hint: and nan is right
    """

    Right = asynchronous_ring_all_reduce

    def asynchronous_ring_all_reduce(tensor):
        tensor.nan_to_num_()
        Right(tensor)


def keeps_what_it_received():
    """Keeps each received part in a list.

    kind: memory
    hint: after each call more bytes are kept
    """

    history = []

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            send, receive = dist.isend(outgoing, following), dist.irecv(received, previous)
            send.wait()
            receive.wait()
            history.append(received)
            if adds:
                into += received


def another_memory():
    """Gives the tensor new memory.

    kind: inputs
    hint: change it in place, not a copy
    """

    Right = asynchronous_ring_all_reduce

    def asynchronous_ring_all_reduce(tensor):
        total = tensor.clone()
        Right(total)
        tensor.data = total


def asks_for_a_while():
    """Looks for each message thirty times, and goes on.

    kind: luck
    hint: nobody waits for an | changed after isend | numbers differ
    """

    import time

    def asynchronous_ring_all_reduce(tensor):
        rank, size = dist.get_rank(), dist.get_world_size()
        following, previous = (rank + 1) % size, (rank - 1) % size
        parts = tensor.view(-1).tensor_split(size)
        for step in range(2 * (size - 1)):
            adds = step < size - 1
            outgoing, into = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            received = torch.empty_like(into) if adds else into
            for handle in (dist.isend(outgoing, following), dist.irecv(received, previous)):
                for _ in range(30):
                    if handle.is_completed():
                        break
                    time.sleep(0.001)
            if adds:
                into += received


def a_buffer_for_each_length():
    """Receives into a buffer that it keeps for a length, whatever the type.

    kind: types
    hint: in turn
    """

    Right = asynchronous_ring_all_reduce

    buffers = {}

    def asynchronous_ring_all_reduce(tensor):
        before = torch.empty_like
        torch.empty_like = lambda t: buffers.setdefault(len(t), before(t))
        try:
            Right(tensor)
        finally:
            torch.empty_like = before
