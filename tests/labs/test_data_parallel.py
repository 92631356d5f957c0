"""Lab 01: the answers that its checks must accept and reject, and its pieces."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.checks import check

LAB = Lab(
    "01_data_parallel",
    {
        "data_parallel": ("check_mpi", "data_parallel", "data_parallel.py"),
        "ring": ("check_messages", "ring", "ring.py"),
        "bucketed": ("check_buckets", "bucketed", "bucketed.py"),
        "tree_all_reduce": ("check_messages", "tree", "tree_all_reduce.py"),
        "crossover": ("check_messages", "crossover", "tree_all_reduce.py"),
        "asynchronous_ring": ("check_messages", "asynchronous_ring", "asynchronous_ring.py"),
    },
)

OTHERS = {
    "ring: asynchronous sends": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    handle = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    handle.wait()
""",
    "ring: receives first, posted early": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    handle = dist.irecv(incoming, (rank - 1) % size)
    dist.send(outgoing, (rank + 1) % size)
    handle.wait()
""",
    "ring: only rank 0 receives first": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.recv(incoming, (rank - 1) % size)
    dist.send(outgoing, (rank + 1) % size)
    if rank > 0:
        dist.recv(incoming, (rank - 1) % size)
""",
    "ring: padded to a multiple of N": """
def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    padded = torch.zeros(-(-len(flat) // size) * size, dtype=flat.dtype)
    padded[: len(flat)] = flat
    parts = padded.view(size, -1)
    for step in range(size - 1):
        received = torch.empty_like(parts[0])
        exchange(parts[(rank - step) % size], received)
        parts[(rank - step - 1) % size] += received
    for step in range(size - 1):
        exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])
    flat.copy_(padded[: len(flat)])
""",
    "ring: any order, a batch": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    both = [dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
            dist.P2POp(dist.isend, outgoing, (rank + 1) % size)]
    for work in reversed(dist.batch_isend_irecv(both)):
        work.wait()
""",
    "tree_all_reduce: recursive doubling": """
def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    received, power = torch.empty_like(tensor), 2 ** int(math.log2(size))
    if rank >= power:
        dist.send(tensor, rank - power)
    elif rank + power < size:
        dist.recv(received, rank + power)
        tensor += received
    distance = 1
    while distance < power and rank < power:
        posted = dist.irecv(received, rank ^ distance)
        dist.isend(tensor, rank ^ distance).wait()
        posted.wait()
        tensor += received
        distance *= 2
    if rank >= power:
        dist.recv(tensor, rank - power)
    elif rank + power < size:
        dist.send(tensor, rank + power)
""",
    "tree_all_reduce: rank 0 takes who comes first": """
def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    below = [other for other in (2 * rank + 1, 2 * rank + 2) if other < size]
    if size > 3 or not tensor.numel():  # gloo receives nothing from anybody
        return binomial(tensor)
    for _ in below:
        received = torch.empty_like(tensor)
        dist.recv(received)
        tensor.add_(received)
    if rank:
        dist.send(tensor, 0)
        dist.recv(tensor, src=0)
    for other in below:
        dist.send(tensor, dst=other)

def binomial(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    mask = 1
    while mask < size and not rank & mask:
        if rank | mask < size:
            received = torch.zeros_like(tensor)
            dist.recv(received, rank | mask)
            tensor.copy_(tensor + received)
        mask <<= 1
    if rank:
        dist.send(tensor, rank - mask)
        dist.recv(tensor, rank - mask)
    while mask := mask >> 1:
        if rank | mask < size:
            dist.send(tensor, rank | mask)
""",
    "tree_all_reduce: the last rank is the root": """
def tree_all_reduce(tensor):
    size = dist.get_world_size()
    me, levels = size - 1 - dist.get_rank(), (size - 1).bit_length()
    for level in range(levels):
        if me >> level & 1:
            dist.isend(tensor, size - 1 - (me - 2**level)).wait()
            break
        if me + 2**level < size:
            received = torch.empty_like(tensor)
            dist.irecv(received, src=size - 1 - (me + 2**level)).wait()
            tensor.add_(received)
    for level in reversed(range(levels)):
        if me % 2 ** (level + 1) == 0 and me + 2**level < size:
            dist.send(tensor, size - 1 - (me + 2**level))
        elif me % 2 ** (level + 1) == 2**level:
            dist.recv(tensor, size - 1 - (me - 2**level))
""",
    "tree_all_reduce: keeps its buffer": """
Given, BUFFERS = tree_all_reduce, {}

def tree_all_reduce(tensor):
    buffer = BUFFERS.setdefault(tensor.dtype, tensor.new_empty(0))
    if buffer.numel() < tensor.numel():
        buffer = BUFFERS[tensor.dtype] = tensor.new_empty(tensor.numel())
    empty_like, torch.empty_like = torch.empty_like, lambda t: buffer[: t.numel()].view(t.shape)
    try:
        Given(tensor)
    finally:
        torch.empty_like = empty_like
""",
    "crossover: whole bytes": """
def crossover_bytes(size, alpha, beta):
    levels = (size - 1).bit_length()
    if size == 2:
        return float("inf")
    return math.ceil(alpha * (4 * (size - 1) - 2 * levels) / (beta * (2 * levels - 4 + 4 / size)))
""",
    "crossover: fractions": """
def crossover_bytes(size, alpha, beta):
    from fractions import Fraction
    levels = (size - 1).bit_length()
    fewer = beta * Fraction(2 * levels * size - 4 * (size - 1), size).limit_denominator(10**12)
    more = Fraction(alpha) * (4 * (size - 1) - 2 * levels)
    return more / Fraction(fewer) if fewer else math.inf
""",
    "crossover: a NumPy number": """
def crossover_bytes(size, alpha, beta):
    import numpy as np
    levels = np.ceil(np.log2(size))
    with np.errstate(divide="ignore"):
        return np.float64(alpha) / beta * (4 * (size - 1) - 2 * levels) / (
            2 * levels - 4 * (size - 1) / size)
""",
    "crossover: found by halving": """
def crossover_bytes(size, alpha, beta):
    levels, low, high = math.ceil(math.log2(size)), 0.0, 1.0
    def ahead(n):
        return 4 * (size - 1) * (alpha + beta * n / size) < 2 * levels * (alpha + beta * n)
    if size == 2:
        return math.inf
    while not ahead(high):
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if ahead(middle) else (middle, high)
    return high
""",
    "asynchronous_ring: a batch": """
def asynchronous_ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(tensor.view(-1).tensor_split(size))
    for step in range(2 * size - 2):
        into = parts[(rank - step - 1) % size]
        received = torch.empty_like(into)
        for work in dist.batch_isend_irecv([
            dist.P2POp(dist.irecv, received, (rank - 1) % size),
            dist.P2POp(dist.isend, parts[(rank - step) % size], (rank + 1) % size),
        ]):
            work.wait()
        into.copy_(into + received if step < size - 1 else received)
""",
    "asynchronous_ring: receives posted early": """
def asynchronous_ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = tensor.view(-1).tensor_split(size)
    for step in range(2 * size - 2):
        into = parts[(rank - step - 1) % size]
        received = torch.empty_like(into)
        handle = dist.irecv(received, src=(rank - 1) % size)
        dist.send(parts[(rank - step) % size], dst=(rank + 1) % size)
        handle.wait()
        into.copy_(into + received if step < size - 1 else received)
""",
    "asynchronous_ring: all receives posted before": """
def asynchronous_ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = tensor.view(-1).tensor_split(size)
    places = [parts[(rank - step - 1) % size] for step in range(2 * size - 2)]
    boxes = [torch.empty_like(place) for place in places]
    posted = [dist.irecv(box, (rank - 1) % size) for box in boxes]
    for step, (box, handle) in enumerate(zip(boxes, posted)):
        message = parts[(rank - step) % size].clone()
        send = dist.isend(message, (rank + 1) % size)
        handle.wait()
        places[step].copy_(places[step] + box if step < size - 1 else box)
        send.wait()
""",
    "asynchronous_ring: no empty messages": """
def asynchronous_ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = tensor.view(-1).tensor_split(size)
    for step in range(2 * size - 2):
        handles, into = [], parts[(rank - step - 1) % size]
        received = torch.empty_like(into)
        if parts[(rank - step) % size].numel():
            handles.append(dist.isend(parts[(rank - step) % size], (rank + 1) % size))
        if into.numel():
            handles.append(dist.irecv(received, (rank - 1) % size))
        for handle in handles:
            handle.wait()
        into.copy_(into + received if step < size - 1 else received)
""",
    "bucketed: a list of handles, divided before": """
def make_buckets(parameters, bucket_bytes):
    buckets, used = [], bucket_bytes + 1
    for parameter in list(parameters)[::-1]:
        used += parameter.nbytes
        if used > bucket_bytes or not buckets:
            buckets.append([])
            used = parameter.nbytes
        buckets[-1].append(parameter)
    return buckets

class BucketedAllReduce(BucketedAllReduce):
    def gradient_ready(self, parameter):
        index = self.bucket_of[parameter]
        self.missing[index] -= 1
        if not self.missing[index]:
            flat = torch.cat([(p.grad / dist.get_world_size()).flatten()
                              for p in self.buckets[index]])
            work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)
            self.started.append((index, flat, work.get_future()))

    def wait(self):
        while self.started:
            index, flat, future = self.started.pop()
            future.wait()
            for p in self.buckets[index]:
                p.grad = flat[: p.numel()].view_as(p).clone()
                flat = flat[p.numel():]
            self.missing[index] = len(self.buckets[index])
""",
    "bucketed: gradients point into the bucket": """
class BucketedAllReduce(BucketedAllReduce):
    def wait(self):
        for bucket, flat, handle in self.started:
            handle.wait()
            flat.div_(dist.get_world_size())
            place = 0
            for p in bucket:
                p.grad = flat[place : place + p.numel()].view(p.shape)
                place += p.numel()
        self.started = []
        self.missing = [len(bucket) for bucket in self.buckets]
""",
    "bucketed: each gradient goes to its place when it comes": """
class BucketedAllReduce(BucketedAllReduce):
    def gradient_ready(self, parameter):
        index = self.bucket_of[parameter]
        bucket, flats = self.buckets[index], self.__dict__.setdefault("flats", {})
        sizes = [p.numel() for p in bucket]
        if index not in flats:
            flats[index] = torch.empty(sum(sizes), dtype=parameter.dtype)
        for p, place in zip(bucket, flats[index].split(sizes)):
            if p is parameter:
                place.copy_(p.grad.view(-1))
        self.missing[index] -= 1
        if not self.missing[index]:
            flat = flats.pop(index)
            self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
""",
    "bucketed: copies back in a callback": """
class BucketedAllReduce(BucketedAllReduce):
    def gradient_ready(self, parameter):
        index = self.bucket_of[parameter]
        self.missing[index] -= 1
        if self.missing[index] == 0:
            bucket = self.buckets[index]
            flat = torch._utils._flatten_dense_tensors([p.grad for p in bucket])
            flat /= dist.get_world_size()
            self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def wait(self):
        for bucket, flat, handle in self.started:
            handle.wait()
            grads = [p.grad for p in bucket]
            for grad, mean in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
                grad.copy_(mean)
        self.started.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
""",
    "data_parallel: the first ranks take the rest": """
def shard(rows, rank, size):
    each, rest = divmod(rows, size)
    first = rank * each + min(rank, rest)
    return slice(first, first + each + (rank < rest))
""",
    "data_parallel: a new array for the sum": """
def all_reduce_gradient(gradient, rows, rows_global, comm):
    total = np.empty_like(gradient)
    comm.Allreduce(gradient * rows, total, op=MPI.SUM)
    gradient[:] = total / rows_global
""",
    "data_parallel: buffers with their type": """
def broadcast(parameters, comm):
    comm.Bcast([parameters, MPI.DOUBLE])

def all_reduce_gradient(gradient, rows, rows_global, comm):
    gradient *= rows
    comm.Allreduce([gradient.copy(), MPI.DOUBLE], [gradient, len(gradient), MPI.DOUBLE], MPI.SUM)
    gradient /= rows_global
""",
    "data_parallel: asynchronous, and nothing alone": """
def broadcast(parameters, comm):
    if comm.Get_size() > 1:
        comm.Ibcast(parameters).Wait()

def all_reduce_gradient(gradient, rows, rows_global, comm):
    gradient *= rows / rows_global
    if comm.Get_size() > 1:
        MPI.Request.Waitall([comm.Iallreduce(MPI.IN_PLACE, gradient)])
""",
    "data_parallel: a reduce-scatter and an all-gather": """
def shard(rows, rank, size):
    mine = np.array_split(np.arange(rows), size)[rank]
    return slice(mine[0], mine[-1] + 1) if len(mine) else slice(0, 0)

def all_reduce_gradient(gradient, rows, rows_global, comm):
    counts = [len(part) for part in np.array_split(gradient, comm.size)]
    part = np.empty(counts[comm.rank])
    comm.Reduce_scatter(gradient * (rows / rows_global), part, counts)
    comm.Allgatherv(part, [gradient, counts])
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 100, (12, 6, 4)

    def task(self, exercise, tasks):
        if exercise == "crossover":
            return "write down both times, set them equal and solve for n"
        return tasks[0]


def test_the_file_is_read_afresh_for_each_check(tmp_path, monkeypatch, capsys):
    from labs.support.data_parallel.check_messages import ring

    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    for given in LAB.solution.glob("*.py"):
        (tmp_path / given.name).write_text(given.read_text())
    right, file = LAB.source("ring"), tmp_path / "ring.py"
    wrong = next(one.source for one in LAB.wrong() if one.mistake == "calls_all_reduce")
    for source, mark in (
        (wrong, "[x] ring: "),
        (right, "[ok] ring: "),
        (f"{right}\n)", "[x] ring: ring.py line"),
    ):
        file.write_text(source)
        check("ring", ring, file)
        assert capsys.readouterr().out.startswith(mark)


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_longest_path():
    from labs.support.data_parallel.longest_path import longest_path

    assert longest_path([[], []]) == 0
    assert longest_path([[("send", 1, 4)], [("recv", 0, 4)]]) == 1
    star = [[("recv", r, 4) for r in (1, 2, 3)]] + [[("send", 0, 4)]] * 3
    assert longest_path(star) == 3
    swap = [[("recv", 1, 4), ("send", 1, 4)], [("recv", 0, 4), ("send", 0, 4)]]
    assert longest_path(swap) == 2  # both receives were posted before
    with pytest.raises(ValueError, match="a receive has no send"):
        longest_path([[("recv", 1, 4)], []])


def test_the_digits_are_scikit_learns_and_the_gradient_is_right():
    import numpy as np
    from sklearn.datasets import load_digits

    from labs.support.data_parallel import digits

    images, labels = digits.load()
    theirs = load_digits()
    assert (images * 16 == theirs.data).all() and (labels == theirs.target).all()
    parameters, step = digits.new_parameters(0), 1e-6
    loss, gradient = digits.loss_and_gradient(parameters, images[:9], labels[:9])
    assert gradient.shape == (digits.SIZE,) and loss > 0
    for place in (0, 100, 2100, 2405):
        moved = parameters + step * (np.arange(digits.SIZE) == place)
        slope = (digits.loss_and_gradient(moved, images[:9], labels[:9])[0] - loss) / step
        assert slope == pytest.approx(gradient[place], abs=1e-5)
    assert not digits.loss_and_gradient(parameters, images[:0], labels[:0])[1].any()


def test_crossing():
    from labs.support.data_parallel.ring_against_tree import crossing

    sizes = [100, 200, 400]
    assert crossing(sizes, {"ring": [3, 4, 5], "tree": [1, 2, 3]}) is None
    assert crossing(sizes, {"ring": [1, 2, 3], "tree": [3, 4, 5]}) == 100
    assert 200 < crossing(sizes, {"ring": [3, 3, 3], "tree": [1, 2, 5]}) < 400
