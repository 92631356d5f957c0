"""Given: the contracts of lab 15's exercises, and the judges behind their check cells."""

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from labs.support.compression import blocks, drawn
from labs.support.compression.blocks import HIGHEST, READERS
from utils.compression.distill import distillation_loss
from utils.compression.prune import without_heads
from utils.compression.quantize import INT8, quantize, quantize_rows, ranges
from utils.course.assertions import Wrong, a_number, close, number, unchanged
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.measure.divergence import bits_of
from utils.measure.traffic import tensors_in
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, Block, cross_entropy

BY_HAND = (
    "utils.compression", "transformers", "torchao", "torch.ao", "torch.quantization",
    "torch.nn.utils.prune", "quantize_per_channel", "quantize_dynamic",
)
SECONDS = 60.0
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def facts(model: nn.Module) -> dict[str, Any]:
    """Everything that a function could change in a model, by name."""
    found = {name: bits_of(tensor) for name, tensor in model.state_dict().items()}
    for name, p in model.named_parameters():
        found[f"the gradient or requires_grad of {name}"] = p.grad is None, p.requires_grad
    for name, part in model.named_modules():
        hooks = sum(len(getattr(part, kind)) for kind in HOOKS)
        found[f"train(), eval() or the number of hooks in {name}"] = part.training, hooks
    return found


@contextlib.contextmanager
def left_alone(where: str, model: nn.Module) -> Iterator[None]:
    """Run a function of the answer inside this context. Raises Wrong if the model changes."""
    before = facts(model)
    yield
    after = facts(model)
    unchanged(where, [name for name, was in before.items() if after.get(name) != was])


# ---- a: Int8Linear


def scales(answer, seed: int) -> None:
    """Check `calibrate` on drawn batches."""

    def holds(example: tuple) -> None:
        shapes, percentile, dtype, size, seed = example
        given = [  # the largest magnitude is often a negative number
            (size * 3.0 ** (index % 3) * (fractions(seed + index, *shape) - 0.5)).to(dtype)
            for index, shape in enumerate(shapes)
        ]
        where = f"percentile {percentile:g} of batches {shapes} of {dtype}"
        scale = a_number(where, "the scale", answer.calibrate((x for x in given), percentile))
        sizes = torch.cat([x.double().abs().flatten() for x in given]).sort().values
        place, last = percentile / 100 * len(sizes), len(sizes) - 1
        low, high = sizes[[max(int(place) - 2, 0), min(int(place) + 1, last)]].tolist()
        low = high if percentile == 100 else low  # below 100, definitions differ by a neighbour
        found = scale * HIGHEST
        if not (low * (1 - 1e-5) <= found <= high * (1 + 1e-5) if size else 0 < scale < 1e30):
            raise Wrong(
                f"{where}: step {HIGHEST} represents {number(found)}, and {number(high)} is right."
                "\nAre all magnitudes counted, of negative numbers too, in all batches? It is "
                "never 0."
            )

    shape = st.tuples(st.integers(1, 6), st.integers(1, 30))
    for_all(seed, st.tuples(
        st.lists(shape, min_size=1, max_size=6), st.sampled_from([100.0, 50.0, 60.0, 92.5, 99.9]),
        st.sampled_from([FP32, BF16]), st.sampled_from([1.0, 1e-6, 0.0]), st.integers(0, 999),
    ), holds)
    batches = 20
    with Look() as look:
        answer.calibrate(torch.rand(64, 64) for _ in range(batches))
    if look.peak > batches / 2 * 64 * 64 * 4:
        raise Wrong(f"{batches} batches, at 100 percent: {look.peak:,} bytes live at once.")


@dataclass(frozen=True)
class Linear:
    """x (…, K), partly outside the range of `scale`; W (N, K), in which one row is 0."""

    rows: tuple[int, ...]
    N: int
    K: int
    scale: float
    seed: int
    dtype: torch.dtype = FP32
    of_w: torch.dtype = FP32
    bias: bool = True

    def linear(self) -> nn.Linear:
        linear = nn.Linear(self.K, self.N, bias=self.bias, dtype=self.of_w)
        by_row = 0.2 + fractions(self.seed + 1, self.N, 1).abs()
        weight = (fractions(self.seed, self.N, self.K) * by_row).to(self.of_w)
        weight[0] = 0.0
        linear.weight.data.copy_(clear(weight, ranges(weight, INT8)[0]))
        return linear

    def x(self) -> torch.Tensor:
        x = fractions(self.seed + 9, *self.rows, self.K) * 80 * self.scale
        return clear(x.to(self.dtype), self.scale)


def clear(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """x with 0 where it is close enough to the middle of two steps for both to be right."""
    return x.masked_fill(((x.double() / scale) % 1 - 0.5).abs() < 1e-3, 0.0)


def computes(answer, seed: int) -> None:
    """Compare y with fp64 with the same rounding, for drawn layers."""
    blocks.whole_products()

    def holds(case: Linear) -> None:
        linear, x = case.linear(), case.x()
        layer = answer.Int8Linear(linear, torch.tensor(case.scale))
        with Look(x=x) as look:
            y = layer(x)
        unchanged(str(case), look.changed())
        values, scale = quantize_rows(x, torch.tensor(case.scale, dtype=FP64))
        weight = quantize(linear.weight.detach(), INT8)
        right = values.double() @ weight.values.double().T * scale * weight.scale[:, 0].double()
        right += 0.0 if linear.bias is None else linear.bias.detach().double()
        hint = "Clamp values to the range before they become int8; no scale is 0."
        slack = {BF16: 2, FP32: 64, FP64: 64 * 2**29}[case.dtype]  # the sums are scaled in fp32
        close(str(case), "y", y, right, hint=hint, dtype=x.dtype, slack=slack)

    rows = st.sampled_from([(3,), (1,), (), (0,), (2, 5), (2, 1, 3, 1)])
    size, types = st.integers(2, 60), st.sampled_from([FP32, BF16, FP64])
    scale, seeds = st.floats(1e-3, 0.2), st.integers(0, 999)
    layers = st.builds(Linear, rows, size, size, scale, seeds, types, types, st.booleans())
    for_all(seed, layers, holds, examples=40)


def economical(answer, case: Linear) -> None:
    """Check what the layer keeps and multiplies, and that its state_dict is complete."""
    layer, x = answer.Int8Linear(case.linear(), torch.tensor(case.scale)), case.x()
    held = [*layer.parameters(), *layer.buffers(), *tensors_in(list(vars(layer).values()))]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    enough = (case.N + 7) * (case.K + 7) + 16 * case.N + 64  # padded to multiples of 8
    if sum(sizes.values()) > enough or any(t.grad_fn for t in held):
        raise Wrong(
            f"{case}: the layer keeps {sum(sizes.values()):,} bytes alive; {enough:,} are enough. "
            "Does it keep the\nlinear layer, or the graph of a gradient?"
        )
    with torch.no_grad(), Look() as look:
        y = layer(x)
    if look.products:  # torch._int_mm is not among them
        raise Wrong(f"{case}: a matrix product is not int8 × int8: use torch._int_mm.")
    if look.largest >= case.N * case.K:
        raise Wrong(f"{case}: a tensor of {look.largest:,} bytes is made in a call, as large as W.")
    other = answer.Int8Linear(replace(case, seed=case.seed + 77).linear(), torch.tensor(3.21))
    other.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()})
    if not torch.equal(other(x), y):
        raise Wrong(f"{case}: another layer that loads this state_dict gives different results.")


def int8_linear(trial: Trial) -> str:
    """Judge `calibrate` and `Int8Linear`."""
    trial.forbid(BY_HAND)
    with trial.ranks(1) as group:  # nothing here depends on the number of ranks
        group.run("calibrate", scales, trial.new_seed(), seconds=SECONDS)
        group.run("Int8Linear", computes, trial.new_seed(), seconds=SECONDS)
        large = Linear((1,), 160, trial.draw.randrange(170, 200), 0.05, trial.new_seed())
        group.run("Int8Linear", economical, large)
    return (
        "the scale covers the right range, over all batches in one pass; outputs equal those\n"
        "computed in fp64 with the same rounding, for any batch shape, in fp32, bf16 and fp64,\n"
        "even outside the calibrated range, with and without bias; products are int8 × int8, no\n"
        "tensor as large as W is made in a call, and the layer keeps W in int8 with a scale per\n"
        "output."
    )


# ---- b: smoothing

ROUNDED = 2.25  # a power of two is at most √2 away; a factor common to all s of a norm is free
ROUNDINGS = {FP64: 1024, FP32: 256, BF16: 16}  # allowed in a block's output
MAGNITUDES = (0.9, 1.0, 1.1, 3.0, 5.0, 9.5, 30.0, 200.0)  # no two differ by exactly `times`


@dataclass(frozen=True)
class Smoothing:
    """A block with weights of very different columns, outlier channels and dead channels."""

    dtype: torch.dtype
    kv_heads: int
    biases: bool
    alpha: float
    seed: int

    @torch.no_grad()
    def block(self, C: int = 40) -> Block:
        draw = random.Random(self.seed)
        block = Block(GPTConfig(
            vocab_size=8, hidden_size=C, layers=1, heads=4, kv_heads=self.kv_heads,
            intermediate_size=33, attention_bias=self.biases, mlp_bias=self.biases,
        ))
        for index, parameter in enumerate(block.parameters()):
            parameter.copy_(fractions(self.seed + index, *parameter.shape))
        for norm, readers in READERS.items():
            channels = draw.sample(range(C), 6)
            for weight in (block.get_submodule(name).weight for name in readers):
                weight[draw.randrange(len(weight)), ::3] *= 30  # far above its column's
                weight /= weight.norm() / len(weight) ** 0.5  # scores of attention stay small
                weight[:, channels[4:]] = 0.0
            blocks.plant(block, channels[:3], [draw.uniform(50, 2000) for _ in "abc"], norm)
            gains = block.get_submodule(norm).weight
            gains += 0.3 * gains.sign()
            gains[channels[3:5]] = 0.0
        return block.to(self.dtype)

    def inputs(self, C: int = 40) -> list[torch.Tensor]:
        """Batches (B, T, C); the largest values are not in the last one."""
        some = (1.0, (2, 5)), (-3.0, (1, 8)), (1.0, (3, 2))
        return [(size * fractions(self.seed, *shape, C)).to(self.dtype) for size, shape in some]


def observed(answer, case: Smoothing) -> None:
    where, block, inputs = str(case), case.block(), case.inputs()
    with left_alone(where, block):
        seen = answer.observe(block, iter(inputs))
    for norm, largest in blocks.observed(block, inputs).items():
        hint = "Does it cover all batches, rows and positions, by magnitude, after the norm?"
        slack = 8 * max(1.0, torch.finfo(case.dtype).eps / torch.finfo(FP32).eps)
        what = f"the largest output of {norm}"
        close(where, what, seen[norm], largest, hint=hint, dtype=FP32, slack=slack)
        if seen[norm].requires_grad:
            raise Wrong(f"{where}: {norm}'s result has a history: it keeps each batch's graph.")


def outlier_channels(answer, seed: int) -> None:
    def holds(example: tuple[list[float], int, float]) -> None:
        alive, dead, times = example
        values = [*alive[:1], *[0.0] * dead, *alive[1:]]
        limit = times * sorted(alive)[len(alive) // 2] if alive else 0.0
        right = [channel for channel, x in enumerate(values) if x > limit]
        largest = torch.tensor(values)
        found = answer.outliers(*[largest, times][: 1 + (times != 8.0)])
        if list(map(int, found)) != right:
            raise Wrong(f"outliers({values}, {times}) returns {found}, and {right} is right.")

    # an odd number of values has one median
    alive = st.lists(st.sampled_from(MAGNITUDES), max_size=15).filter(lambda x: len(x) % 2 or not x)
    for_all(seed, st.tuples(alive, st.integers(1, 9), st.sampled_from([8.0, 2.3])), holds)


def smoothed(answer, case: Smoothing) -> None:
    where, block, inputs = str(case), case.block(), case.inputs()
    seen, before = blocks.observed(block, inputs), copy.deepcopy(block)
    objects = dict(block.named_parameters())
    answer.smooth(block, seen, *[case.alpha] * (case.alpha != 0.5))
    for name, new in block.named_parameters():
        if new is not objects[name]:
            raise Wrong(f"{where}: {name} is a new parameter: change the old one in place.")
    hint = (
        "The norm's weight is divided by s, and the columns of all its readers are multiplied by "
        "it. What is s\nwhere a channel is always 0, or nothing reads it?"
    )
    slack = ROUNDINGS[case.dtype] * torch.finfo(case.dtype).eps / torch.finfo(FP64).eps
    with torch.no_grad():
        for x in inputs:
            right, mine = (
                blocks.run(copy.deepcopy(one).double(), x.double()) for one in (before, block)
            )
            close(f"{where}, in fp64", "y", mine, right, hint=hint, slack=slack)
        for norm, readers in READERS.items():
            weights = torch.cat([before.get_submodule(reader).weight for reader in readers])
            columns, largest = weights.double().abs().amax(dim=0), seen[norm].double()
            old, new = (one.get_submodule(norm).weight.double() for one in (before, block))
            away = (old / new) / (largest**case.alpha / columns ** (1 - case.alpha))
            away = away[(largest > 0) & (columns > 0)].abs()
            if not away.max() / away.min() <= ROUNDED:
                raise Wrong(
                    f"{where}: two s of {norm} deviate from the formula by factors that differ "
                    f"{number(away.max() / away.min())} times.\nDoes W_j include all readers of "
                    "the norm?"
                )


def smoothing(trial: Trial) -> str:
    """Judge `observe`, `outliers` and `smooth`."""
    trial.forbid(BY_HAND)
    kinds = (FP64, 4, True, 0.5), (FP32, 2, True, 0.25), (BF16, 4, False, 0.5)
    with trial.ranks(1) as group:  # nothing here depends on the number of ranks
        for case in [Smoothing(*kind, trial.new_seed()) for kind in kinds]:
            group.run("observe", observed, case)
            group.run("smooth", smoothed, case)
        group.run("outliers", outlier_channels, trial.new_seed(), seconds=SECONDS)
    return (
        "all channels are observed, over all batches; outliers are found; each block computes the\n"
        "same as before, in fp64, fp32 and bf16, with grouped queries, biases and dead channels,\n"
        "with the s of the formula; nothing else changes."
    )


# ---- c: shrink and prune

MARGIN = 0.1  # of the way from the loss with the useful heads to that of random choices
CUTS = (  # type, hidden size, H, K, D, heads that stay, biases, whether words are tied
    (FP64, 32, 4, 4, None, 2, False, True), (FP32, 48, 8, 4, 4, 2, True, True),
    (BF16, 32, 8, 4, None, 1, False, False),
)


@torch.no_grad()
def masked(model: GPT, keep: list) -> GPT:
    """A copy of the model in which all other heads return 0."""
    model = copy.deepcopy(model)
    heads = model.config.key_value_heads
    for layer, kept in zip(model.model.layers, keep):
        by_head = layer.self_attn.o_proj.weight.unflatten(1, (heads, -1))
        by_head[:, list(set(range(heads)) - set(kept))] = 0.0
    return model


def right_model(where: str, small: GPT, model: GPT, kept: int) -> None:
    """Check sizes, types, config and memory of a model with `kept` key-value heads."""
    config, dtype = model.config, next(model.parameters()).dtype
    heads = config.heads // config.key_value_heads * kept
    smaller = replace(config, heads=heads, kv_heads=kept, head_dim=config.head_size)
    taken = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    right = dict(GPT.without_memory(smaller).named_parameters())
    for name, parameter in small.named_parameters():
        found = tuple(parameter.shape), parameter.dtype
        wanted, storage = (tuple(right[name].shape), dtype), parameter.untyped_storage()
        if found != wanted:
            raise Wrong(f"{where}: {name} is {found}, and {wanted} is right.")
        if storage.data_ptr() in taken or storage.nbytes() > parameter.nbytes:
            raise Wrong(f"{where}: {name} is in the large model's memory: a slice is a view.")
    sizes = [(c.heads, c.key_value_heads, c.head_size) for c in (small.config, small.model.config)]
    if sizes != [(heads, kept, config.head_size)] * 2:
        raise Wrong(f"{where}: model.config or model.model.config is not the smaller model's.")


def shrunk(answer, seed: int, cut: tuple) -> None:
    draw, (dtype, hidden, H, K, D, kept, biases, tied) = random.Random(seed), cut
    config = GPTConfig(
        vocab_size=50, hidden_size=hidden, layers=2, heads=H, kv_heads=K, head_dim=D,
        intermediate_size=21, max_positions=64, attention_bias=biases, tie_embeddings=tied,
    )
    keep = [sorted(draw.sample(range(K), kept), reverse=layer == 0) for layer in range(2)]
    where = f"H {H}, K {K}, D {config.head_size}, {dtype}, keep {keep}"
    model = GPT(config)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        middle = 1.0 if name.endswith("norm.weight") else 0.0
        parameter.data.copy_(middle + 0.3 * fractions(seed + index, *parameter.shape))
    model = model.to(dtype)
    with left_alone(where, model):
        small = answer.shrink(model, [list(heads) for heads in keep])
    right_model(where, small, model, kept)
    tokens = torch.randint(config.vocab_size, (2, 11))
    right, logits = (copy.deepcopy(one).double()(tokens) for one in (masked(model, keep), small))
    hint = "Which rows of q, k and v, and which columns of o, belong to a head and to its group?"
    close(where, "a logit, computed in fp64,", logits, right, hint=hint, slack=2**14)


def pruned(answer, seed: int, kept: int) -> None:
    """Compare the held-out loss of the answer's choice with those of others."""
    sizes, draw = drawn.SIZES[kept], random.Random(seed)
    where = f"a model drawn from the seed, {kept} of {len(sizes)} heads"
    model, orders = drawn.many_heads(torch.Generator().manual_seed(seed), sizes)
    calibration, held_out = drawn.batches(seed, 4, 2)
    with left_alone(where, model):
        small = answer.prune(model, calibration, kept)
    options = range(len(sizes))
    choices = [[draw.sample(options, kept) for _ in orders] for _ in range(12)]
    choices.append([[head for head in options if order[head] < kept] for order in orders])
    *others, best = (drawn.loss(masked(model, choice), held_out) for choice in choices)
    yours, mean = drawn.loss(small, held_out), sum(others) / len(others)
    if not yours <= best + MARGIN * (mean - best):
        raise Wrong(
            f"{where}: with your heads the held-out loss is {yours:.3f} nats; the best choice has "
            f"{best:.3f},\nand a random choice {mean:.3f}. What does each head do on the batches?"
        )


def prune_heads(trial: Trial) -> str:
    """Judge `shrink`, `importance` and `prune`."""
    trial.forbid(BY_HAND)
    with trial.ranks(1) as group:  # nothing here depends on the number of ranks
        for cut in CUTS:
            group.run("shrink", shrunk, trial.new_seed(), cut)
        for kept in drawn.SIZES:
            group.run("prune", pruned, trial.new_seed(), kept, seconds=SECONDS)
    return (
        "the smaller model equals the large one with the other heads masked, in fp64, fp32 and\n"
        "bf16, with and without grouped queries, biases and tied embeddings, with fewer bytes and\n"
        "memory of its own; the model is unchanged. In models drawn from the seed, your choice of\n"
        "heads has the held-out loss of the best choice, or nearly."
    )


# ---- d: distillation

ROWS, T, STEPS, HELD_OUT = 8, 16, 40, 64
FIFTH = 1.2  # allowed loss, as a multiple of the worked answer's
LOSS = (
    "Which model's probabilities weigh the terms of KL? Its mean is over tokens, not over rows. Is "
    "there a\nfactor τ²? The cross entropy uses the logits, not divided by τ; which term gets "
    "share?"
)


def right_loss(
    student: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor,
    temperature: float, share: float,
) -> torch.Tensor:
    soft = distillation_loss(student, teacher, temperature)
    return share * soft + (1 - share) * cross_entropy(student, targets)


def losses(answer, seed: int) -> None:
    """Check `distillation_loss` on drawn logits."""

    def holds(example: tuple) -> None:
        shape, dtype, size, temperature, share, seed = example
        where = f"logits {shape} of {dtype}, about {size:g}, τ {temperature:.3g}, share {share:.2g}"
        student, teacher = (
            (size * fractions(seed + i, *shape)).to(dtype).requires_grad_() for i in (0, 1)
        )
        targets = torch.arange(shape[0] * shape[1]).view(shape[:2]) % shape[2]
        loss = answer.distillation_loss(student, teacher, targets, temperature, share)
        s, t = student.detach().double().requires_grad_(), teacher.detach().double()
        right = right_loss(s, t, targets, temperature, share)
        least = torch.promote_types(dtype, FP32)
        terms = (1 + temperature) * max(s.abs().max().item(), t.abs().max().item())
        close(where, "the loss", loss, right, hint=LOSS, dtype=least, slack=16, scale=terms)
        mine, others = torch.autograd.grad(loss, [student, teacher], allow_unused=True)
        if others is not None and others.any():
            raise Wrong(f"{where}: the teacher's logits get a gradient: use .detach() or no_grad.")
        (wanted,) = torch.autograd.grad(right, [s])
        what = "the gradient of the student's logits"
        close(where, what, mine, wanted, slack=16, scale=terms if dtype != BF16 else 1e-3)

    shape = st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(2, 40))
    for_all(seed, st.tuples(
        shape, st.sampled_from([FP64, FP32, BF16]), st.sampled_from([1.0, 1e4]),
        st.sampled_from([2.0, 1.0, 0.7, 4.3]), st.sampled_from([0.5, 0.0, 1.0, 0.9]),
        st.integers(0, 999),
    ), holds)


def distilled(answer, seed: int) -> None:
    """Check `distill` on a student with half of its teacher's heads; the teacher speaks its own
    language."""
    where, teacher = "a drawn student", drawn.speaker(torch.Generator().manual_seed(seed))
    first = torch.randint(teacher.config.vocab_size, (ROWS * STEPS + HELD_OUT, 1))
    words = teacher.generate(first, T, seed=seed)
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in words[: ROWS * STEPS].split(ROWS)]
    student, budget = without_heads(teacher, [[0, 1], [0, 1]]), ROWS * STEPS * T
    computed, graphs = [], []

    def lost(student: GPT) -> float:
        """Nats per token, on unseen text."""
        with torch.no_grad():
            unseen = words[ROWS * STEPS :, :-1]
            return distillation_loss(student(unseen), teacher(unseen)).item()

    def taught(student: GPT, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return right_loss(student(tokens), teacher(tokens).detach(), targets, 2.0, 0.9)

    least = FIFTH * lost(drawn.trained(copy.deepcopy(student), batches, 1e-2, taught))
    for model, note in (
        (teacher, lambda block, given, y: graphs.append(y.requires_grad)),
        (student, lambda block, given, y: computed.append(y[..., 0].numel())),
    ):
        model.model.layers[0].register_forward_hook(note)
    with left_alone("the teacher", teacher):
        answer.distill(teacher, student, batches)
    if sum(computed) > budget:
        raise Wrong(
            f"{where}: the student computes {sum(computed):,} tokens; the budget is {budget:,}."
        )
    if any(graphs):
        raise Wrong(f"{where}: the teacher's pass builds a graph: torch.no_grad() avoids it.")
    if not (found := lost(student)) <= least:
        raise Wrong(
            f"{where}: its predictions are {found:.3f} nats per token away from the teacher's; "
            f"{least:.3f}\nis required. Does it learn from the whole distribution? Are the steps "
            "large enough, and small at the end?"
        )


def distillation(trial: Trial) -> str:
    """Judge `distillation_loss` and `distill`."""
    trial.forbid(BY_HAND)
    with trial.ranks(1) as group:  # nothing here depends on the number of ranks
        group.run("distillation_loss", losses, trial.new_seed(), seconds=SECONDS)
        group.run("distill", distilled, trial.new_seed(), seconds=SECONDS)
    return (
        "the loss is right, and its gradient goes only to the student, in fp64, fp32 and bf16,\n"
        "for any temperature and share, for large logits too. A student of a teacher drawn from\n"
        f"the seed comes within {FIFTH - 1:.0%} of the worked answer's loss, within its budget; "
        "the\nteacher is unchanged."
    )
