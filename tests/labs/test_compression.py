"""Lab 15: the answers that its checks must accept and reject, and its pieces."""

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.data import library
from utils.paths import ROOT
from utils.workshop import labs

LAB = Lab(
    "15_compression",
    {
        "int8_linear": ("check_int8", "int8_linear", "int8_linear.py"),
        "smoothing": ("check_smoothing", "smoothing", "smoothing.py"),
        "prune_heads": ("check_prune", "prune_heads", "prune_heads.py"),
        "distill": ("check_distill", "distillation", "distill.py"),
    },
)

OTHERS = {
    "int8_linear: W transposed and filled up, rows in parts, the scales made one": """
import numpy as np

def calibrate(batches, percentile=100):
    if percentile == 100:
        largest = max(float(np.abs(x.double().numpy()).max()) for x in batches)
    else:
        sizes = np.concatenate([np.abs(x.double().numpy()).ravel() for x in batches])
        largest = np.percentile(sizes, percentile)
    return torch.tensor([largest / 127 or 0.125], dtype=torch.float32)


class Int8Linear(nn.Module):
    def __init__(self, linear, scale):
        super().__init__()
        with torch.no_grad():
            N, K = linear.weight.shape
            wide = torch.zeros(-(-K // 8) * 8, -(-N // 8) * 8, dtype=torch.int8)
            step = linear.weight.double().abs().amax(1).clamp(min=1e-300) / 127
            wide[:K, :N] = (linear.weight.double() / step[:, None]).round().T
            self.register_buffer("kept", wide)
            self.register_buffer("steps", (step * scale).float())
            self.register_buffer("step", scale.float().clone())
            given = torch.zeros(N) if linear.bias is None else linear.bias.float()
            self.register_buffer("plus", given.clone())

    def forward(self, x):
        rows, N = x.flatten(0, -2) if x.ndim > 1 else x[None], len(self.plus)
        found = [self.plus.new_empty(0, N)]
        for part in rows.split(5):
            whole = torch.zeros(len(part), len(self.kept), dtype=torch.int8)
            steps = torch.clamp(part.double() / self.step, -127, 127)
            whole[:, : x.shape[-1]] = torch.round(steps)
            sums = torch.ops.aten._int_mm.default(whole, self.kept)[:, :N]
            found.append((sums.double() * self.steps + self.plus).to(x.dtype))
        return torch.cat(found).to(x.dtype).reshape(*x.shape[:-1], N)
""",
    "int8_linear: torch.quantile, parameters in place of buffers, inference mode": """
def calibrate(batches, percentile=100):
    seen = None
    for x in batches:
        x = x.abs().float().reshape(-1)
        part = x.amax()[None] if percentile == 100 else x
        seen = part if seen is None else torch.cat((seen, part))
        seen = seen.amax()[None] if percentile == 100 else seen
    return (torch.quantile(seen, percentile / 100) / HIGHEST).clamp(min=1e-12)


class Int8Linear(nn.Module):
    @torch.no_grad()
    def __init__(self, linear, scale):
        super().__init__()
        W = linear.weight.to(torch.float32)
        steps = torch.maximum(W.max(1).values, -W.min(1).values) / HIGHEST
        steps[steps == 0] = 7.0
        whole = torch.round(W / steps.unsqueeze(1)).to(torch.int8)

        def fixed(t):
            return nn.Parameter(t.clone(), requires_grad=False)

        self.whole, self.steps, self.step = fixed(whole), fixed(steps), fixed(scale)
        self.bias = None if linear.bias is None else fixed(linear.bias)

    @torch.inference_mode()
    def forward(self, x):
        x8 = torch.round(x.to(torch.float32) / self.step).clamp(-127, 127).to(torch.int8)
        y = torch._int_mm(x8.reshape(-1, x.shape[-1]), self.whole.mT).to(torch.float32)
        y *= self.step
        y *= self.steps
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1]) if x.ndim > 1 else y[0].to(x.dtype)
""",
    "smoothing: without hooks, and s rounded to powers of two": """
@torch.no_grad()
def observe(block, inputs):
    parts = {name: [] for name in READERS}
    for x in inputs:
        kept = {}
        forward = block.mlp.forward

        def spied(h):
            kept["h"] = h
            return forward(h)

        block.mlp.forward = spied
        try:
            run(block, x)
        finally:
            del block.mlp.forward
        both = block.input_layernorm(x), kept["h"]
        for name, y in zip(READERS, both):
            parts[name].append(torch.maximum(y.amax((0, 1)), -y.amin((0, 1))))
    return {name: torch.stack(some).max(dim=0).values.float() for name, some in parts.items()}


def outliers(largest, times=8.0):
    alive = sorted(x for x in largest.tolist() if x > 0)
    limit = times * alive[len(alive) // 2] if alive else 0
    return [channel for channel, x in enumerate(largest.tolist()) if x > limit]


def smooth(block, seen, alpha=0.5):
    for name, readers in READERS.items():
        linears = [block.get_submodule(reader) for reader in readers]
        W = torch.stack([linear.weight.data.abs().amax(0).double() for linear in linears]).amax(0)
        X = seen[name].double()
        s = torch.exp2((alpha * X.log2() - (1 - alpha) * W.log2()).round() + 2)
        s[~((X > 0) & (W > 0))] = 0.5
        block.get_submodule(name).weight.data.div_(s)
        for linear in linears:
            linear.weight.data.mul_(s)
""",
    "smoothing: in fp64, the largest s is 1, and readers as a trace finds them": """
class Done(Exception):
    pass

def observe(block, inputs):
    names = list(READERS)
    seen = dict.fromkeys(names, torch.zeros(()))
    with torch.inference_mode():
        for x in inputs:
            for name in names:
                kept = []
                reader = block.get_submodule(READERS[name][0])
                hook = reader.register_forward_pre_hook(lambda _, given: kept.append(given[0]))
                run(block, x)
                hook.remove()
                rows = kept[0].reshape(-1, x.shape[-1]).to(torch.float32)
                seen[name] = torch.maximum(seen[name], torch.linalg.vector_norm(rows, torch.inf, 0))
    return {name: largest.clone() for name, largest in seen.items()}


@torch.no_grad()
def smooth(block, seen, alpha=0.5):
    for name, readers in READERS.items():
        weights = [block.get_submodule(reader).weight for reader in readers]
        columns = [weight.double().abs().max(dim=0).values for weight in weights]
        W, X = torch.stack(columns).max(dim=0).values, seen[name].double()
        dead = (W == 0) | (X == 0)
        s = X.masked_fill(dead, 1.0).pow(alpha) * W.masked_fill(dead, 1.0).pow(alpha - 1)
        s /= s.max()
        for weight in weights:
            weight.set_((weight.double() * s).to(weight.dtype))
        norm = block.get_submodule(name).weight
        norm.copy_((norm.double() / s).to(norm.dtype))
""",
    "prune_heads: the loss without each head, and new layers in a copy": """
import copy

def shrink(model, keep):
    small = copy.deepcopy(model).requires_grad_(True)
    config, D = model.config, model.config.head_size
    group, kept = config.heads // config.key_value_heads, len(keep[0])
    small.config = replace(config, heads=kept * group, kv_heads=kept, head_dim=D)
    small.model.config = small.config
    for layer, heads in zip(small.model.layers, keep):
        heads = torch.tensor(sorted(heads, reverse=True))
        for part in "qkvo":
            linear = getattr(layer.self_attn, f"{part}_proj")
            wide = group * D if part in "qo" else D
            weight = linear.weight if part != "o" else linear.weight.T
            rows = weight.detach().unflatten(0, (-1, wide))[heads].flatten(0, 1)
            rows = rows.T.contiguous() if part == "o" else rows
            new = torch.nn.Linear(*rows.T.shape, bias=linear.bias is not None, dtype=rows.dtype)
            new.weight = torch.nn.Parameter(rows)
            if linear.bias is not None:
                bias = linear.bias.detach()
                bias = bias if part == "o" else bias.unflatten(0, (-1, wide))[heads].flatten()
                new.bias = torch.nn.Parameter(bias.clone())
            setattr(layer.self_attn, f"{part}_proj", new)
    return small


@torch.no_grad()
def importance(model, batches):
    D, scores = model.config.head_size, []
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        whole = weight.clone()
        for head in range(model.config.heads):
            weight[:, head * D : (head + 1) * D] = 0
            scores.append(sum(cross_entropy(model(x), y).item() for x, y in batches))
            weight.copy_(whole)
    return torch.tensor(scores).view(model.config.layers, -1).numpy()


def prune(model, batches, kept):
    scores = importance(model, batches)
    return shrink(model, [row.argsort()[::-1][:kept].tolist() for row in scores])
""",
    "prune_heads: what each head adds to the residual stream, one layer after the other": """
def prune(model, batches, kept):
    D, layers = model.config.head_size, model.model.layers
    keep, texts = [], torch.cat([tokens for tokens, _ in batches])
    with torch.no_grad():
        for number, layer in enumerate(layers):
            seen = []
            o = layer.self_attn.o_proj
            hook = o.register_forward_hook(lambda _, given, y: seen.append(given[0]))
            model(texts)
            hook.remove()
            parts = seen[0].unflatten(-1, (-1, D))  # (B, T, H, D)
            weights = o.weight.unflatten(1, (-1, D))  # (C, H, D)
            added = torch.einsum("bthd,chd->bthc", parts, weights)
            keep.append(added.square().sum((0, 1, 3)).topk(kept).indices.tolist())
    return shrink(model, keep)
""",
    "distill: F.kl_div, Adam with one learning rate, the teacher in inference mode": """
def distillation_loss(student_logits, teacher_logits, targets, temperature=2.0, share=0.9):
    wide = torch.float64 if student_logits.dtype == torch.float64 else torch.float32
    s, t = student_logits.flatten(0, 1).to(wide), teacher_logits.flatten(0, 1).to(wide)
    s_soft = F.log_softmax(s / temperature, 1)
    t_soft = F.log_softmax(t.clone().detach() / temperature, 1)
    soft = F.kl_div(s_soft, t_soft, reduction="batchmean", log_target=True)
    return F.cross_entropy(s, targets.flatten()) * (1 - share) + soft * share * temperature**2


def distill(teacher, student, batches, lr=7e-3):
    optimizer = torch.optim.Adam(student.parameters(), lr, betas=(0.8, 0.95))
    while_training = student.train()
    for tokens, targets in batches:
        with torch.inference_mode():
            said = teacher(tokens)
        loss = distillation_loss(while_training(tokens), said.clone(), targets, 1.0, 1.0)
        student.zero_grad()
        loss.backward()
        optimizer.step()
    return student
""",
    "distill: momentum by hand, a batch in parts, no gradient is stored": """
class Step:
    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.moved = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def __call__(self, gradients, lr):
        for p, m, g in zip(self.parameters, self.moved, gradients):
            p.sub_(m.mul_(0.9).add_(g), alpha=lr)


def distill(teacher, student, batches, lr=0.3):
    step = Step(student.parameters())
    for number, (tokens, targets) in enumerate(batches):
        with torch.no_grad():
            said = teacher.lm_head(teacher.model(tokens))
        loss = 0
        for rows, row_said, row_targets in zip(tokens.split(4), said.split(4), targets.split(4)):
            part = distillation_loss(student(rows), row_said, row_targets)
            loss = loss + part * len(rows) / len(tokens)
        gradients = torch.autograd.grad(loss, step.parameters)
        step(gradients, lr * (1 - number / len(batches)))
    return student
""",
}


EACH = {  # wrong answers, their kinds, other right ones
    "int8_linear": (28, 8, 2),
    "smoothing": (22, 8, 2),
    "prune_heads": (24, 8, 2),
    "distill": (22, 8, 2),
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 105, EACH


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.compression import measurements

    for exercise, (*_, file) in LAB.exercises.items():
        (tmp_path / file).write_text(labs.generated(LAB.solution / file, ROOT))
        name = {"int8_linear": "layer", "smoothing": "channels", "prune_heads": "heads"}
        measure = getattr(measurements, name.get(exercise, "curves"))
        assert measure(str(tmp_path / file)) is None


def test_the_text_was_held_out_and_is_not_shared():
    from labs.support.compression import drawn

    assert set(drawn.MODULES) <= set(library.held_out_modules())
    calibration, held_out = drawn.batches(3, 4, 2)
    rows = [row for tokens, _ in (*calibration, *held_out) for row in tokens]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 6 * 4


def test_the_drawn_heads_are_those_of_tiny():
    """But for the channel that the norm no longer lets through."""
    from labs.support.compression import drawn

    _, held_out = drawn.batches(0, 0, 1)
    for sizes in drawn.SIZES.values():
        model = drawn.many_heads(torch.Generator().manual_seed(1), sizes)
        assert abs(drawn.loss(model, held_out) - drawn.loss(drawn.tiny()[0], held_out)) < 0.4
