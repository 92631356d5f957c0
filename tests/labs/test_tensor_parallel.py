"""Lab 06: the answers that its checks must accept and reject, and its pieces."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

EXERCISES = dict.fromkeys(("pair", "mlp", "attention"), "check_layers") | {
    "loss": "check_loss",
    "sequence": "check_sequence",
}
LAB = Lab(
    "06_tensor_parallel",
    {name: (module, name, "megatron.py") for name, module in EXERCISES.items()},
    {"utils.course.trial.HANG": 12.0},  # next to none hangs; a busy machine must not look so
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
    "pair: started, and waited for": """
class Enter(Enter):
    @staticmethod
    def backward(ctx, dy):
        dx = dy.contiguous().clone()
        work = dist.all_reduce(dx, async_op=True)
        work.get_future().wait()
        return dx
""",
    "pair: one rank says nothing": """
class Leave(Leave):
    @staticmethod
    def forward(ctx, x):
        if dist.get_world_size() == 1:
            return x.clone()
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y
""",
    "pair: the context beside": """
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return Leave.apply(dy)
""",
    "mlp: gate and up in one product": """
class ParallelMLP(ParallelMLP):
    def forward(self, x):
        both = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        biases = torch.cat((self.gate_proj.bias, self.up_proj.bias))
        gate, up = F.linear(Enter.apply(x), both, biases).chunk(2, dim=-1)
        return Leave.apply(F.linear(F.silu(gate) * up, self.down_proj.weight)) + self.down_proj.bias
""",
    "mlp: matrices and the sigmoid": """
class ParallelMLP(ParallelMLP):
    def forward(self, x):
        x = Enter.apply(x)
        gate, up = self.gate_proj(x), torch.einsum("btc,mc->btm", x, self.up_proj.weight)
        hidden = torch.sigmoid(gate) * gate * (up + self.up_proj.bias)
        return torch.add(Leave.apply(hidden @ self.down_proj.weight.mT), self.down_proj.bias)
""",
    "mlp: from, to": """
def column(linear, sizes):
    start = sum(sizes[: dist.get_rank()])
    own = slice(start, start + sizes[dist.get_rank()])
    return as_linear(torch.clone(linear.weight.data[own]), torch.clone(linear.bias.data[own]))


def row(linear, sizes):
    ends = torch.tensor([0, *sizes]).cumsum(0)
    start, end = ends[dist.get_rank()], ends[dist.get_rank() + 1]
    weight = linear.weight.data.T[start:end].T.clone(memory_format=torch.contiguous_format)
    return as_linear(weight, linear.bias.data.clone())
""",
    "mlp: flat rows": """
class ParallelMLP(ParallelMLP):
    def forward(self, x):
        rows = Enter.apply(x).flatten(0, 1)
        hidden = F.silu(self.gate_proj(rows)).mul(self.up_proj(rows))
        partial = torch.mm(hidden, self.down_proj.weight.t()).view(x.shape)
        return self.down_proj.bias + Leave.apply(partial)
""",
    "attention: lists instead of tuples": """
def head_sizes(heads, kv_heads, head_size):
    keys = [n * head_size for n in shares(kv_heads, dist.get_world_size())]
    return [n * (heads // kv_heads) for n in keys], keys
""",
    "attention: generators": """
def head_sizes(heads, kv_heads, head_size):
    keys = shares(kv_heads, dist.get_world_size())
    return (n * head_size * heads // kv_heads for n in keys), (n * head_size for n in keys)
""",
    "attention: NumPy's numbers": """
def head_sizes(heads, kv_heads, head_size):
    import numpy as np

    keys = np.array(shares(kv_heads, dist.get_world_size())) * head_size
    return keys * (heads // kv_heads), keys
""",
    "attention: q, k and v in one product, keys repeated": """
class ParallelAttention(ParallelAttention):
    def forward(self, x, cos, sin):
        three = (self.q_proj, self.k_proj, self.v_proj)
        weight, bias = (torch.cat([getattr(p, n) for p in three]) for n in ("weight", "bias"))
        parts = F.linear(Enter.apply(x), weight, bias).split([len(p.bias) for p in three], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_size)) for t in parts)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias
""",
    "loss: three messages": """
def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
    first, counts = sum(sizes[: dist.get_rank()]), targets.ne(IGNORED)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    largest = logits.detach().amax(dim=-1).to(dtype)
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
    here = (targets >= first) & (targets < first + sizes[dist.get_rank()])
    own = logits.gather(-1, ((targets - first) * here)[..., None])[..., 0].to(dtype)
    linear = torch.where(here, (1 - smoothing) * own, 0)
    if smoothing > 0:
        linear = linear + smoothing * logits.sum(dim=-1, dtype=dtype) / sum(sizes)
    linear = Leave.apply(linear)
    work.wait()
    total = Leave.apply((logits.to(dtype) - largest[..., None]).exp().sum(dim=-1))
    log = largest + total.log()
    losses = log - linear + z * log**2
    return losses.masked_fill(~counts, 0.0).sum() / max(1, counts.sum().item())
""",
    "loss: the gradient by hand": """
class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, sizes, smoothing, z):
        counts, local = targets != IGNORED, targets - sum(sizes[: dist.get_rank()])
        mine = (local >= 0) & (local < logits.shape[-1])
        values = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        largest = values.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        values -= largest[..., None]
        own = values.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        linear = (1 - smoothing) * own.where(mine, 0.0)
        if smoothing:
            linear += smoothing / sum(sizes) * values.sum(-1)
        both = torch.stack((values.exp_().sum(-1), linear))
        dist.all_reduce(both)
        log = largest + both[0].log()
        losses = both[0].log() - both[1] + z * log.square()
        values /= both[0][..., None]
        weight = counts.to(values.dtype) / counts.sum().clamp(min=1)
        ctx.save_for_backward(values, log, local, mine, weight)
        ctx.smoothing, ctx.z, ctx.words, ctx.dtype = smoothing, z, sum(sizes), logits.dtype
        return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)

    @staticmethod
    def backward(ctx, dloss):
        values, log, local, mine, weight = ctx.saved_tensors
        values = values * (1 + 2 * ctx.z * log)[..., None] - ctx.smoothing / ctx.words
        hit = (ctx.smoothing - 1) * mine[..., None].to(values.dtype)
        values.scatter_add_(-1, local.where(mine, 0)[..., None], hit)
        return (values * (dloss * weight)[..., None]).to(ctx.dtype), None, None, None, None


def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
    return Loss.apply(logits, targets, sizes, smoothing, z)
""",
    "loss: only the tokens that count": """
def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
    counts = targets != IGNORED
    if not counts.any():
        return 0.0 * logits.to(torch.promote_types(logits.dtype, torch.float32)).sum()
    return whole(logits, targets, sizes, smoothing, z)
""",
    "loss: one rank asks torch": """
def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
    if len(sizes) > 1 or z or smoothing or (targets == IGNORED).all():
        return whole(logits, targets, sizes, smoothing, z)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(dtype).flatten(0, 1), targets.flatten())
""",
    "sequence: one tensor for all pieces": """
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_positions(x, length):
    sizes = shares(length, dist.get_world_size())
    piece = filled_up(x, max(sizes))
    pieces = piece.new_empty(len(sizes) * piece.shape[0], *piece.shape[1:])
    gather(pieces, piece, async_op=True).wait()
    pieces = pieces.unflatten(0, (len(sizes), -1))
    return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes)], dim=1)


def own_positions_summed(x):
    sizes = shares(x.shape[1], dist.get_world_size())
    pieces = torch.cat([filled_up(piece, max(sizes)) for piece in x.split(sizes, dim=1)])
    own = pieces.new_empty(len(pieces) // len(sizes), *pieces.shape[1:])
    scatter(own, pieces)
    return own[:, : sizes[dist.get_rank()]].contiguous()
""",
    "sequence: one rank says nothing": """
def all_positions(x, length, whole=all_positions):
    return whole(x, length) if dist.get_world_size() > 1 else x.clone()


def own_positions_summed(x, whole=own_positions_summed):
    return whole(x) if dist.get_world_size() > 1 else x.clone()


def sum_partial_gradients(layer, whole=sum_partial_gradients):
    if dist.get_world_size() > 1:
        whole(layer)
""",
    "sequence: new gradients": """
def sum_partial_gradients(layer):
    partial = (layer.down_proj.bias, layer.norm.weight)
    both = torch.stack([p.grad for p in partial])
    dist.all_reduce(both, async_op=True).wait()
    for parameter, gradient in zip(partial, both):
        parameter.grad = gradient.clone()
""",
    "sequence: rows first, torch's norm, the residual last": """
class SequenceMLP(SequenceMLP):
    def forward(self, x, length):
        n = F.rms_norm(x, self.norm.weight.shape, self.norm.weight, self.norm.eps)
        rows = EnterSequence.apply(n, length).flatten(0, 1)
        hidden = F.silu(self.gate_proj(rows)) * self.up_proj(rows)
        partial = torch.mm(hidden, self.down_proj.weight.t()).view(len(x), length, -1)
        return (LeaveSequence.apply(partial) + self.down_proj.bias) + x
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 80, (12, 6, 4)
    untouched = ("pair",)


def test_the_lesson_of_the_last_cells():
    from labs.support.tensor_parallel.measurements import CONFIG, measured

    runs = {size: measured(size, LAB.solution / "megatron.py") for size in (1, 2, 3)}
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs[1]["losses"], abs=1e-4)
        assert run["others"] == 0 and run["calls"] == 4 * CONFIG.layers
    assert runs[3]["matrices"] * 3 == runs[1]["matrices"]  # 6 heads, 3 key-value heads, 132 columns
