"""Given: what the check cell of exercise b looks at: what is seen, what is found, what is moved.

Drawn blocks with outlier channels are smoothed: they must compute what they did, in fp64, with the
s that the formula gives. Then models/tiny gets outlier channels drawn from the seed, which cost its
quantized form most of what it knows, and your functions bring it back.
"""

import copy
import random
from collections.abc import Iterator

import torch

from labs.support.compression import blocks, drawn
from labs.support.compression.blocks import READERS
from labs.support.compression.seen import during, left_alone
from utils.course.assertions import Wrong, bitwise_equal, close, described, not_called, number
from utils.course.observe import Look
from utils.course.runner import Trial
from utils.models.config import GPTConfig
from utils.models.gpt import Block

LIBRARY = ("utils.compression", "torchao", "transformers")
PLACES = ("utils/compression/",)
ROUNDED = 1.5  # a power of two is at most √2 away; what all s of a norm share is free
ROUNDINGS = {
    torch.float64: 1024,
    torch.float32: 256,
    torch.bfloat16: 16,
}  # of what a block computes
ENOUGH = 0.05  # nats that the smoothed int8 model may be worse than the model in floats
BATCHES = (4, 2)  # of calibration text, and held out
TIMES = 8.0


def smoothing(trial: Trial) -> str:
    """Judges `observe`, `outliers` and `smooth`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        cases = _cases(trial)
        group.run("observe", _all_observed, cases)
        group.run("outliers", _all_found, _channels(trial))
        group.run("smooth", _all_smoothed, cases)
        group.run("a model", _whole, trial.new_seed())
    return (
        "all channels are seen, over all batches; the planted ones are found; each block computes\n"
        "what it did, in fp64, fp32 and bf16, with grouped queries, biases and dead channels; all\n"
        "else is as it was. A model with outlier channels, which int8 spoils, is smoothed and\n"
        f"in int8 less than {ENOUGH} nats worse than in floats, on held-out text."
    )


# ---- cases


def _cases(trial: Trial) -> list[dict]:
    draw = trial.draw
    types = (torch.float64, torch.float32, torch.bfloat16, torch.float32)
    alphas = (0.5, draw.choice((0.25, 0.75)), 0.5, draw.choice((0.0, 1.0)))
    cases = []
    for number_, (dtype, alpha) in enumerate(zip(types, alphas)):
        config = GPTConfig(
            vocab_size=8, hidden_size=draw.choice((24, 40, 48)), layers=1, heads=4,
            kv_heads=(4, 2, 4, 1)[number_], intermediate_size=draw.randrange(20, 60),
            attention_bias=number_ in (0, 1), mlp_bias=number_ in (0, 3),
        )
        cases.append({
            "what": f"a block of {config.hidden_size} channels, {dtype}, alpha {alpha}",
            "config": config, "dtype": dtype, "alpha": alpha, "seed": trial.new_seed(),
            "shapes": [(draw.randrange(1, 4), draw.randrange(2, 9)) for _ in range(4)],
            "large": draw.randrange(3), "dead": draw.sample(range(20), 6),
        })
    return cases


def _channels(trial: Trial) -> list[dict]:
    """Largest magnitudes with a gap between what is an outlier and what is not."""
    draw, cases = trial.draw, []
    for times, dead in ((8.0, 0.0), (8.0, 0.6), (draw.uniform(3, 5), 0.2), (30.0, 0.0), (8.0, 1.0)):
        count = 2 * draw.randrange(12, 60) + 1
        largest = [draw.uniform(0.7, 1.3) for _ in range(count)]
        for place in draw.sample(range(count), int(dead * count)):
            largest[place] = 0.0
        places = draw.sample(range(count), 5) if dead < 1 else []
        for place in places[:3]:
            largest[place] = times * draw.uniform(1.6, 8)
        for place in places[3:]:  # large, and not large enough
            largest[place] = times * draw.uniform(0.3, 0.55)
        size = draw.choice((1e-3, 1.0, 50.0))
        cases.append({"largest": torch.tensor(largest) * size, "times": times,
                      "right": sorted(places[:3])})
    return cases


def _block(case: dict) -> Block:
    """Weights of very different columns, outlier channels, dead channels of three kinds."""
    config, block = case["config"], Block(case["config"])
    generator = torch.Generator().manual_seed(case["seed"])
    draw = random.Random(case["seed"])
    C = config.hidden_size
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                values = values + values.sign() * 0.3
            elif any(name == f"{reader}.weight" for some in READERS.values() for reader in some):
                values *= (1.5 * torch.randn(C, generator=generator)).exp() / C**0.5
                some = torch.rand(C, generator=generator) < 0.3  # a number far above its column's
                row = int(torch.randint(len(values), (), generator=generator))
                values[row, some] = 10 * values.abs().amax(dim=0)[some]
                values /= values.norm() / len(values) ** 0.5  # scores of attention stay small
            parameter.copy_(values)
        for norm in READERS:
            outlier = draw.sample([c for c in range(C) if c not in case["dead"]], 3)
            blocks.plant(block, outlier, [draw.uniform(50, 2000) for _ in outlier], norm)
            first, second, third = case["dead"][:3] if norm == "input_layernorm" else (
                case["dead"][3:])
            weight = block.get_submodule(norm).weight
            weight[first] = weight[third] = 0.0
            for reader in READERS[norm]:
                block.get_submodule(reader).weight[:, [second, third]] = 0.0
    return block.to(case["dtype"])


def _inputs(case: dict) -> list[torch.Tensor]:
    """One of the batches has the largest numbers, and not the last one."""
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    C = case["config"].hidden_size
    made = [torch.randn((*shape, C), generator=generator) for shape in case["shapes"]]
    place = case["large"]
    made[place] *= (0.7 * torch.randn(C, generator=generator)).exp()
    made[place][0, 0] *= -3.0
    return [x.to(case["dtype"]) for x in made]


# ---- observe


def _observed(block: Block, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: [] for name in READERS}
    hooks = [
        block.get_submodule(name).register_forward_hook(
            lambda _, given, y, name=name: found[name].append(y.detach().abs().flatten(0, 1))
        )
        for name in READERS
    ]
    with torch.no_grad():
        for x in inputs:
            blocks.run(block, x)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).amax(dim=0).float() for name, parts in found.items()}


def _all_observed(answer, cases: list[dict]) -> None:
    for case in cases:
        for source in ("a list", "a generator"):
            _right_seen(answer, case, source)


def _right_seen(answer, case: dict, source: str) -> None:
    what = f"observe, {case['what']}, from {source}"
    block, inputs = _block(case), _inputs(case)
    right = _observed(block, inputs)
    given = inputs if source == "a list" else _once(inputs)
    alone = left_alone(what, block, "the block", **{"an input": inputs})
    with alone, not_called(*PLACES), during(what), Look() as look:
        seen = answer.observe(block, given)
    if not isinstance(seen, dict) or set(seen) != set(right):
        names = list(seen) if isinstance(seen, dict) else described(seen)
        raise Wrong(f"{what}: the result has {names}, and {list(right)} are to be seen.")
    for name, largest in right.items():
        found = seen[name]
        if not isinstance(found, torch.Tensor) or found.shape != largest.shape:
            raise Wrong(f"{what}: {name} is {described(found)}, not a tensor {(len(largest),)}.")
        if found.dtype != torch.float32 or found.requires_grad:
            raise Wrong(f"{what}: {name} is {found.dtype}, or has a past; fp32 is asked for.")
        near = 32 * torch.finfo(case["dtype"]).eps * (largest + largest.median())
        bad = (found - largest).abs() > near
        if bad.any():
            channel = int(bad.nonzero()[0])
            raise Wrong(
                f"{what}: channel {channel} of what {name} hands on is at most "
                f"{number(largest[channel])}, and {number(found[channel])} was found ("
                f"{int(bad.sum())} of {len(bad)} differ).\nOf all batches, rows and positions, "
                "magnitudes, and behind the norm?"
            )
    if kept := look.kept(list(seen.values())):
        raise Wrong(f"{what}: after the call {kept:,} bytes that it made are still held.")


def _once(inputs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from inputs


# ---- outliers


def _all_found(answer, cases: list[dict]) -> None:
    for case in cases:
        largest, times = case["largest"], case["times"]
        dead = int((largest == 0).sum())
        what = f"outliers, {len(largest)} channels, {dead} of them dead, times {times:.2f}"
        with during(what):
            before = largest.clone()
            found = answer.outliers(largest, times) if times != TIMES else answer.outliers(largest)
            if not bitwise_equal(largest, before):
                raise Wrong(f"{what}: largest is not what it was before the call.")
            found = [int(channel) for channel in found]
        if found != case["right"]:
            raise Wrong(
                f"{what}: {found} are found, and {case['right']} are right.\n"
                "More than so many times the median of the channels that are not 0."
            )


# ---- smooth


def _all_smoothed(answer, cases: list[dict]) -> None:
    for case in cases:
        _right_smoothed(answer, case)


def _right_smoothed(answer, case: dict) -> None:
    what = f"smooth, {case['what']}"
    block, inputs = _block(case), _inputs(case)
    seen = _observed(block, inputs)
    before, given = copy.deepcopy(block), {name: x.clone() for name, x in seen.items()}
    objects, wanted = dict(block.named_parameters()), block.self_attn.q_proj.weight.requires_grad
    with during(what), not_called(*PLACES), Look() as look:
        if case["alpha"] == 0.5:
            answer.smooth(block, given)
        else:
            answer.smooth(block, given, case["alpha"])
    if any(not bitwise_equal(given[name], seen[name]) for name in seen):
        raise Wrong(f"{what}: `seen` is not what it was before the call.")
    for name, parameter in block.named_parameters():
        if parameter is not objects.get(name):
            raise Wrong(
                f"{what}: {name} is a new parameter: change the old one in place, others know it."
            )
        if parameter.requires_grad != wanted or parameter.grad is not None:
            raise Wrong(f"{what}: requires_grad of {name} has changed, or it has a gradient.")
        if not parameter.isfinite().all():
            raise Wrong(
                f"{what}: {name} is not finite any more. What is s where a channel is always 0, or "
                "nobody reads it?"
            )
    moved = {f"{name}.weight" for norm, some in READERS.items() for name in (norm, *some)}
    for name, parameter in before.named_parameters():
        if name not in moved and not bitwise_equal(parameter, objects[name]):
            raise Wrong(f"{what}: {name} has changed, and what it stands for is not scaled.")
    eps = torch.finfo(case["dtype"]).eps
    for index, x in enumerate(inputs):
        with torch.no_grad():
            right = blocks.run(before.double(), x.double())
            mine = blocks.run(copy.deepcopy(block).double(), x.double())
        hint = "What the norm's weight is divided by, the columns of all readers are multiplied by."
        slack = ROUNDINGS[case["dtype"]] * eps / torch.finfo(torch.float64).eps
        close(f"{what}, input {index}, in fp64", "y", mine, right, hint=hint, slack=slack)
    for norm in READERS:
        _right_factors(what, norm, before, block, seen[norm].double(), case["alpha"])
    if kept := look.kept(list(block.parameters())):
        raise Wrong(f"{what}: after the call {kept:,} bytes that it made are still held.")


@torch.no_grad()
def _right_factors(what, norm: str, before: Block, block: Block, largest, alpha: float) -> None:
    """s by the formula, up to a factor for all and to a rounding."""
    columns = [before.get_submodule(reader).weight.double().abs() for reader in READERS[norm]]
    columns = torch.cat(columns).amax(dim=0)
    alive = (largest > 0) & (columns > 0)
    old, new = (b.get_submodule(norm).weight.detach().double() for b in (before, block))
    if (new == 0)[alive].any() or (old.sign() != new.sign())[alive].any():
        raise Wrong(
            f"{what}: s is to be positive, and a number of {norm} changes its sign or dies."
        )
    s = (old / new)[alive].log()
    right = (largest**alpha / columns ** (1 - alpha))[alive].log()
    away = s - right
    away = away - (away.max() + away.min()) / 2  # √2 at most for powers of two
    if away.abs().max() > torch.tensor(ROUNDED).log():
        channel = int(alive.nonzero().flatten()[away.abs().argmax()])
        raise Wrong(
            f"{what}: s of channel {channel} behind {norm} is {number(away.abs().max().exp())} "
            "times away from the formula, beside the others.\nX_j^alpha / W_j^(1 - alpha), with "
            "W_j over all matrices that read the norm."
        )


# ---- a model


def _whole(answer, seed: int) -> None:
    """Its held-out loss in floats, in int8, in int8 after smoothing."""
    what, draw = "a model with outlier channels", random.Random(seed)
    model = copy.deepcopy(drawn.tiny()[0])
    calibration, held_out = drawn.batches(seed, *BATCHES)
    inputs = blocks.inputs_of(model, calibration)
    planted = []
    for block, x in zip(model.model.layers, inputs):
        natural = _observed(block, x)
        for norm, largest in natural.items():
            channels = sorted(draw.sample(range(len(largest)), 2))
            middle = largest.median()
            factors = [draw.uniform(40, 200) * (middle / largest[c]).item() for c in channels]
            blocks.plant(block, channels, factors, norm)
            planted.append(channels)
    floats = drawn.loss(model, held_out)
    with during(what), not_called(*PLACES):
        seen = [answer.observe(block, x) for block, x in zip(model.model.layers, inputs)]
        found = [answer.outliers(some[norm]) for some in seen for norm in READERS]
        found = [[int(channel) for channel in some] for some in found]
    if found != planted:
        raise Wrong(f"{what}: {found} are found, behind each norm in turn, and {planted} planted.")
    with blocks.rounded(model.model.layers, seen):
        before = drawn.loss(model, held_out)
    with during(what), not_called(*PLACES):
        for block, some in zip(model.model.layers, seen):
            answer.smooth(block, some)
    smoothed = drawn.loss(model, held_out)
    if abs(smoothed - floats) > 1e-3:
        raise Wrong(
            f"{what}: smoothing takes its loss in floats from {floats:.4f} to {smoothed:.4f}."
        )
    seen = [_observed(block, x) for block, x in zip(model.model.layers, inputs)]
    with blocks.rounded(model.model.layers, seen):
        after = drawn.loss(model, held_out)
    if not after <= floats + ENOUGH:
        raise Wrong(
            f"{what}: its held-out loss is {floats:.3f} nats in floats and {before:.3f} in int8; "
            f"smoothed it is {after:.3f},\nand {floats + ENOUGH:.3f} can be reached."
        )
