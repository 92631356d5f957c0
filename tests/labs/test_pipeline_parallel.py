"""Lab 08: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "08_pipeline_parallel",
    {
        "memory": ("check_schedules", "less_memory", "less_memory.py"),
        "halves": ("check_halves", "halves", "halves.py"),
        "bubble": ("check_schedules", "less_bubble", "less_bubble.py"),
    },
    limits={
        "utils.course.checks.HANG": 30.0,
        "utils.course.checks.TOO_LONG": 60.0,
    },  # no answer waits for them
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
    "halves: einsum, two functions": """
class LaterLinear(LaterLinear):
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        of_weight = lambda: torch.einsum("...o,...i->oi", gradient, x)
        ctx.waiting.append(lambda: accumulate(weight, of_weight()))
        if bias is not None:
            ctx.waiting.append(lambda: accumulate(bias, gradient.flatten(0, -2).sum(dim=0)))
        return torch.einsum("...o,oi->...i", gradient, weight), None, None, None
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
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 20
