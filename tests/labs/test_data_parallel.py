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
    },
    {"labs.support.data_parallel.check_mpi.HANG": 20.0},  # several are judged at once
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
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 40

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
