"""Lab 06: the answers that its checks must accept and reject, and its pieces."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

EXERCISES = ("pair", "mlp", "attention", "loss")
LAB = Lab(
    "06_tensor_parallel",
    {name: ("check_megatron", name, "megatron.py") for name in EXERCISES},
    {
        "utils.course.checks.HANG": 20.0
    },  # none of the answers hangs; a busy machine must not look so
)

OTHERS = {
    "pair: an empty tensor, filled": """
class Leave(Leave):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
        dist.all_reduce(y, op=dist.ReduceOp.SUM)
        return y
""",
    "mlp: gate and up in one product": """
class ParallelMLP(ParallelMLP):
    def forward(self, x):
        both = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        biases = torch.cat((self.gate_proj.bias, self.up_proj.bias))
        gate, up = F.linear(Enter.apply(x), both, biases).chunk(2, dim=-1)
        return Leave.apply(F.linear(F.silu(gate) * up, self.down_proj.weight)) + self.down_proj.bias
""",
    "attention: lists instead of tuples": """
def head_sizes(heads, kv_heads, head_size):
    keys = [n * head_size for n in shares(kv_heads, dist.get_world_size())]
    return [n * (heads // kv_heads) for n in keys], keys
""",
    "loss: three messages": """
def vocabulary_loss(logits, targets, sizes):
    first = sum(sizes[: dist.get_rank()])
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    words = torch.arange(first, first + logits.shape[-1])
    target = Leave.apply((logits * (targets[..., None] == words)).sum(dim=-1))
    total = Leave.apply((logits - largest[..., None]).exp().sum(dim=-1))
    return (largest + total.log() - target).mean()
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 25
    untouched = ("pair",)


def test_the_lesson_of_the_last_cells():
    from labs.support.tensor_parallel.measurements import CONFIG, measured

    runs = {size: measured(size, LAB.solution / "megatron.py") for size in (1, 2, 3)}
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs[1]["losses"], abs=1e-4)
        assert run["others"] == 0 and run["calls"] == 4 * CONFIG.layers
    assert runs[3]["matrices"] * 3 == runs[1]["matrices"]  # 6 heads, 3 key-value heads, 132 columns
