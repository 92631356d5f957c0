"""Lab 08: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "08_pipeline_parallel",
    {
        "memory": ("check_schedules", "less_memory", "less_memory.py"),
        "halves": ("check_halves", "halves", "halves.py"),
        "bubble": ("check_schedules", "less_bubble", "less_bubble.py"),
        "executor": ("check_executor", "executor", "executor.py"),
    },
)

OTHERS = {
    "memory: counts what is in flight": """
def order(rank, ranks, micro_batches):
    actions, begun, done = [], 0, 0
    while done < micro_batches:
        if begun < micro_batches and begun - done < ranks - rank:
            actions.append(["F", begun])
            begun += 1
        else:
            actions.append(["B", done])
            done += 1
    return actions
""",
    "memory: a generator of NumPy integers": """
def order(rank, ranks, micro_batches):
    import numpy as np

    ahead = min(ranks - rank - 1, micro_batches)
    forward, backward = iter(np.arange(micro_batches)), iter(np.arange(micro_batches))
    for _ in range(ahead):
        yield "F", next(forward)
    for number in forward:
        yield "F", number
        yield "B", next(backward)
    for number in backward:
        yield "B", number
""",
    "memory: by the time at which each would begin": """
def order(rank, ranks, micro_batches):
    begin = {("F", n): (rank if n < ranks - rank else 2 * n - ranks + 2 * rank + 1)
             for n in range(micro_batches)}
    begin |= {("B", n): 2 * ranks - rank - 1 + 2 * n for n in range(micro_batches)}
    for n in range(min(ranks - rank, micro_batches)):
        begin["F", n] = rank - ranks + n  # ahead, one after another
    for n in range(ranks - rank, micro_batches):
        begin["F", n] = begin["B", n - ranks + rank] + 0.5
    return tuple(sorted(begin, key=begin.get))
""",
    "memory: recursive": """
def order(rank, ranks, micro_batches):
    room = ranks - rank

    def rest(begun, done):
        if done == micro_batches:
            return ()
        if begun < micro_batches and begun - done < room:
            return (("F", begun), *rest(begun + 1, done))
        return (("B", done), *rest(begun, done + 1))

    return rest(0, 0)
""",
    "halves: einsum, two functions": """
class LaterLinear(LaterLinear):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach()
        weight, bias = ctx.weight, ctx.bias
        of_weight = lambda: torch.einsum("...o,...i->oi", gradient, x)
        ctx.waiting.append(lambda: accumulate(weight, of_weight()))
        if bias is not None:
            ctx.waiting.append(lambda: accumulate(bias, gradient.flatten(0, -2).sum(dim=0)))
        return torch.einsum("...o,oi->...i", gradient, weight), None, None, None
""",
    "halves: a callable object, rows by reshape": """
class Later:
    def __init__(self, x, gradient, weight, bias):
        self.x, self.gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        self.weight, self.bias = weight, bias

    def __call__(self):
        with torch.inference_mode(False), torch.no_grad():
            accumulate(self.weight, (self.x.T @ self.gradient).T)
            if self.bias is not None:
                accumulate(self.bias, self.gradient.new_ones(len(self.x)) @ self.gradient)


class LaterLinear(LaterLinear):
    @staticmethod
    def backward(ctx, gradient):
        ctx.waiting.append(Later(*ctx.saved_tensors, gradient, ctx.weight, ctx.bias))
        return torch.matmul(gradient, ctx.weight), None, None, None
""",
    "halves: partial, added in place where there is something": """
def add(parameter, product):
    if parameter.grad is None:
        parameter.grad = product()
    else:
        parameter.grad += product()


class LaterLinear(LaterLinear):
    @staticmethod
    @torch.no_grad()
    def backward(ctx, gradient):
        from functools import partial

        x, rows = ctx.saved_tensors[0].detach().flatten(0, -2), gradient.flatten(0, -2)
        ctx.waiting.append(partial(add, ctx.weight, lambda: torch.mm(rows.t(), x)))
        if ctx.bias is not None:
            ctx.waiting.append(partial(add, ctx.bias, lambda: rows.sum(0)))
        of_x = rows @ ctx.weight if ctx.needs_input_grad[0] else None
        return None if of_x is None else of_x.view(ctx.saved_tensors[0].shape), None, None, None
""",
    "halves: one row of the weight at a time": """
class LaterLinear(LaterLinear):
    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach()
        weight, bias = ctx.weight, ctx.bias

        def add():
            rows, columns = gradient.flatten(0, -2), x.flatten(0, -2)
            accumulate(weight, torch.stack([rows[:, o] @ columns for o in range(rows.shape[1])]))
            if bias is not None:
                accumulate(bias, torch.stack([rows[:, o].sum() for o in range(rows.shape[1])]))

        ctx.waiting.append(add)
        return gradient.matmul(weight), None, None, None
""",
    "bubble: tuples of a generator, NumPy integers": """
solved = order


def order(rank, ranks, micro_batches):
    import numpy as np

    return ((kind, np.int32(number)) for kind, number in solved(rank, ranks, micro_batches))
""",
    "bubble: by two counters and what is next": """
def order(rank, ranks, micro_batches):
    forward, backward, weights = 0, 0, 0
    actions = []
    while weights < micro_batches:
        ahead = forward - backward
        full = forward - weights >= ranks
        if forward < micro_batches and ahead < ranks - rank and not full:
            actions.append(["F", forward])
            forward += 1
        elif backward < micro_batches and (ahead == ranks - rank or forward == micro_batches) and (
            actions[-1][0] != "B" or not (full or forward == micro_batches)
        ):
            actions.append(["B", backward])
            backward += 1
        else:
            actions.append(["W", weights])
            weights += 1
    return actions
""",
    "bubble: 1F1B first, then W's put in": """
def order(rank, ranks, micro_batches):
    ahead = min(ranks - 1 - rank, micro_batches)
    plain = [("F", n) for n in range(ahead)]
    for n in range(micro_batches):
        plain += [("F", ahead + n)] * (ahead + n < micro_batches) + [("B", n)]
    result, begun, waiting = [], 0, []
    for kind, n in plain:
        result.append((kind, n))
        begun += kind == "F"
        if kind == "B":
            waiting.append(n)
            if begun == micro_batches or begun - waiting[0] == ranks:
                result.append(("W", waiting.pop(0)))
    return (*result, *(("W", n) for n in waiting))
""",
    "bubble: a W makes room for the next F": """
def order(rank, ranks, micro_batches):
    actions, f, b, w = [], 0, 0, 0
    while w < micro_batches:
        if f < micro_batches and f - b < ranks - rank:
            if f - w == ranks:
                actions.append(("W", w))
                w += 1
            actions.append(("F", f))
            f += 1
        elif b < micro_batches:
            actions.append(("B", b))
            b += 1
            if f == micro_batches:
                actions.append(("W", w))
                w += 1
        else:
            actions.append(("W", w))
            w += 1
    return actions
""",
    "executor: receives begun at first, losses as a number": """
def run(actions, stage, micro_batches, loss, boundary):
    me, ranks = dist.get_rank(), dist.get_world_size()
    first, last = me == 0, me == ranks - 1
    coming = {"F": {}, "B": {}}
    for n, (x, _) in enumerate(micro_batches):
        for kind, none, source in (("F", first, me - 1), ("B", last, me + 1)):
            if not none:
                shape, dtype = boundary(x)
                place = torch.empty(shape, dtype=dtype)
                coming[kind][n] = place, dist.irecv(place, source, tag=n)
    graphs, works, losses = {}, [], []

    def arrived(kind, n):
        place, work = coming[kind].pop(n)
        work.wait()
        return place

    for kind, n in actions:
        if kind == "F":
            x = micro_batches[n][0] if first else arrived("F", n).requires_grad_()
            out = stage(x)
            work = None
            if last:
                out = loss(out, micro_batches[n][1])
                losses.append(out.item())
            else:
                work = dist.isend(out.detach().contiguous(), me + 1, tag=n)
            graphs[n] = (x, out, work)
        else:
            x, out, work = graphs.pop(n)
            torch.autograd.backward((out,), (None if last else arrived("B", n),))
            if work:
                work.wait()
            if not first:
                works.append(dist.isend(x.grad.clone(), me - 1, tag=n))
        del x, out, work
    while works:
        works.pop(0).wait()
    return sum(losses) if last else None
""",
    "executor: messages by batch_isend_irecv": """
def talk(operation, tensor, peer, n):
    return dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, tag=n)])


def run(actions, stage, micro_batches, loss, boundary):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kept, open_sends, losses = {}, [], []

    def forward(n):
        x, y = micro_batches[n]
        if rank > 0:
            shape, dtype = boundary(x)
            x = torch.zeros(shape, dtype=dtype)
            for work in talk(dist.irecv, x, rank - 1, n):
                work.wait()
            x = x.requires_grad_(True)
        out = stage(x)
        if rank == last:
            out = loss(out, y)
            losses.append(out.detach().clone())
        else:
            kept[n, "sent"] = talk(dist.isend, out.detach().contiguous(), rank + 1, n)
        kept[n] = x, out

    def backward(n):
        x, out = kept.pop(n)
        if rank == last:
            out.backward()
        else:
            gradient = torch.zeros(out.shape).to(out)
            for work in talk(dist.irecv, gradient, rank + 1, n) + kept.pop((n, "sent")):
                work.wait()
            out.backward(gradient)
        if rank > 0:
            open_sends.extend(talk(dist.isend, x.grad, rank - 1, n))

    for kind, n in actions:
        {"F": forward, "B": backward}[kind](n)
    for work in open_sends:
        work.wait()
    return torch.stack(losses).sum() if rank == last else None
""",
    "executor: an object with a method for each action": """
class Rank:
    def __init__(self, stage, loss, boundary):
        self.stage, self.loss, self.boundary = stage, loss, boundary
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.inputs, self.outputs, self.sends, self.total = {}, {}, {}, 0

    def F(self, n, x, y):
        self.inputs[n] = self.receive(x, self.rank - 1, n).requires_grad_() if self.rank else x
        self.outputs[n] = self.stage(self.inputs[n])
        if self.rank + 1 < self.size:
            self.send("F", self.outputs[n].detach(), self.rank + 1, n)
        else:
            self.outputs[n] = self.loss(self.outputs[n], y)
            with torch.no_grad():
                self.total = self.total + self.outputs[n]

    def B(self, n, x, y):
        gradient = self.receive(x, self.rank + 1, n) if self.rank + 1 < self.size else None
        self.outputs.pop(n).backward(gradient=gradient)
        mine = self.inputs.pop(n)
        if ("F", n) in self.sends:
            self.sends.pop(("F", n)).wait()
        if self.rank:
            self.send("B", mine.grad, self.rank - 1, n)

    def send(self, kind, tensor, to, n):
        self.sends[kind, n] = dist.isend(tensor.contiguous(), dst=to, tag=7 * n)

    def receive(self, x, source, n):
        shape, dtype = self.boundary(x)
        tensor = torch.empty(*shape, dtype=dtype)
        dist.irecv(tensor, src=source, tag=7 * n).wait()
        return tensor


def run(actions, stage, micro_batches, loss, boundary):
    me = Rank(stage, loss, boundary)
    for kind, n in actions:
        getattr(me, kind)(n, *micro_batches[n])
    for work in me.sends.values():
        work.wait()
    return me.total if me.rank + 1 == me.size else None
""",
    "executor: gradients sent are let go as soon as they have arrived": """
def run(actions, stage, micro_batches, loss, boundary):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    pending, on_their_way, total = [None] * len(micro_batches), [], None
    for kind, n in actions:
        on_their_way = [work for work in on_their_way if not work.is_completed()]
        x, y = micro_batches[n]
        shape, dtype = boundary(x)
        buffer = torch.empty(shape, dtype=dtype)
        if kind == "F":
            if rank:
                dist.recv(buffer, rank - 1, tag=2 * n)
                x = buffer.clone().requires_grad_()
            result = stage(x)
            pending[n] = [x, result]
            if rank < last:
                pending[n].append(dist.isend(result.detach().contiguous(), rank + 1, tag=2 * n))
            else:
                pending[n][1] = loss(result, y)
                total = pending[n][1].detach() + (0 if total is None else total)
        else:
            if rank < last:
                dist.recv(buffer, rank + 1, tag=2 * n + 1)
                pending[n].pop().wait()
                (pending[n][1] * buffer).sum().backward()
            else:
                pending[n][1].backward()
            if rank:
                gradient = pending[n][0].grad
                on_their_way.append(dist.isend(gradient, rank - 1, tag=2 * n + 1))
            pending[n] = None
        x = result = buffer = None
    for work in on_their_way:
        work.wait()
    return total
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 70, (12, 6, 4)
