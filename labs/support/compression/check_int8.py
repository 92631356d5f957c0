"""Given: what the check cell of exercise a looks at: the scale, the layer's numbers, its products.

Drawn batches and layers of many shapes and types; right is a reckoning in fp64 with the same
rounding. Where a number lies so near the middle of two whole ones that both are right, the
tolerance is one step of it.
"""

from collections.abc import Iterator

import torch
from torch import nn

from labs.support.compression.seen import TypedLook, during, held
from utils.course.assertions import Wrong, bitwise_equal, close, described, number, unchanged
from utils.course.runner import Trial, fractions

LIBRARY = (
    "utils.compression", "torchao", "torch.ao", "torch.nn.quantized", "torch.quantization",
    "quantize_per_tensor", "quantize_per_channel", "quantize_dynamic",
)
HIGHEST = 127
MIDDLE = 1e-4  # of a step: so near the middle of two whole numbers, both are right
A_FEW = 64  # bytes


def int8_linear(trial: Trial) -> str:
    """Judges `calibrate` and `Int8Linear`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        group.run("calibrate", _scales, _batches(trial))
        group.run("Int8Linear", _all_layers, _layers(trial))
    return (
        "the scale covers what it should, over all batches and in one pass; outputs equal a\n"
        "reckoning in fp64 with the same rounding, for any batch shape, in fp32, bf16 and fp64,\n"
        "beyond the calibrated range, with and without bias; products are int8 × int8, nothing\n"
        "as large as W is made in a call, and the layer keeps W in int8 and a scale an output."
    )


# ---- cases


def _batches(trial: Trial) -> list[dict]:
    draw = trial.draw
    part = draw.uniform(90, 99.5)
    return [
        {
            "what": what, "percentile": percentile, "dtype": dtype, "seed": trial.new_seed(),
            "shapes": [(draw.randrange(1, 9), draw.randrange(2, 60)) for _ in range(count)],
            "large": draw.randrange(count), "zeros": zeros,
            "size": 10.0**-number,  # smaller from case to case: what was there before is no help
        }
        for number, (what, percentile, dtype, count, zeros) in enumerate((
            ("12 batches", 100.0, torch.float32, 12, 0.0),
            ("2 batches in bf16", 100, torch.bfloat16, 2, 0.0),
            (f"percentile {part:.2f}", part, torch.float32, 5, 0.0),
            ("percentile 50 in fp64", 50.0, torch.float64, 4, 0.0),
            ("percentile 99.9 of one batch in bf16", 99.9, torch.bfloat16, 1, 0.0),
            ("nothing but zeros", 100.0, torch.float32, 2, 1.0),
            ("percentile 60, and three in four are 0", 60, torch.float32, 3, 0.75),
        ))
    ]


def _layers(trial: Trial) -> list[dict]:
    draw = trial.draw

    def size():
        return 2 * draw.randrange(8, 40) + 1

    cases = [
        ("x of 3 dimensions", (draw.randrange(2, 6), draw.randrange(2, 9)), size(), size()),
        ("x of one dimension, no bias", (), size(), size()),
        ("one row, a large W", (1,), draw.randrange(150, 200), draw.randrange(150, 200)),
        ("bf16", (draw.randrange(2, 40),), size(), size()),
        ("W in bf16, x in fp32", (draw.randrange(2, 20), 3), size(), size()),
        ("rows of zeros", (draw.randrange(8, 20),), size(), size()),
        ("many inputs, all positive", (3,), draw.randrange(2500, 3500), draw.randrange(3, 9)),
        ("no row", (0,), size(), size()),
        ("fp64", (2, 1, 3, 1), draw.randrange(2, 5), draw.randrange(1, 4)),
    ]
    types = {"bf16": (torch.bfloat16,) * 2, "W in bf16, x in fp32": (torch.bfloat16, torch.float32),
             "fp64": (torch.float64,) * 2}
    return [
        {
            "what": f"{what}: x {(*rows, K)}, W {(N, K)}", "rows": rows, "K": K, "N": N,
            "bias": "no bias" not in what, "types": types.get(what, (torch.float32,) * 2),
            "zeros": "zeros" in what, "positive": "positive" in what, "seed": trial.new_seed(),
            "size": draw.uniform(0.05, 20.0), "beyond": draw.uniform(1.5, 6.0),
        }
        for what, rows, K, N in cases
    ]


# ---- the scale


def _made(drawn: dict) -> list[torch.Tensor]:
    """The batches: one of them has the largest number, and it is negative."""
    made = []
    for index, shape in enumerate(drawn["shapes"]):
        x = fractions(drawn["seed"] + index, *shape) * (3.0 if index == drawn["large"] else 1.0)
        if index == drawn["large"]:
            x[-1, -1] = -9.0 * x.abs().max()
        gone = torch.arange(x.numel()).view(x.shape) % 100 < 100 * drawn["zeros"]
        made.append((drawn["size"] * x.masked_fill(gone, 0.0)).to(drawn["dtype"]))
    return made


def _scales(answer, cases: list[dict]) -> None:
    for drawn in cases:
        with during(drawn["what"]):
            _scale(answer, drawn)


def _scale(answer, drawn: dict) -> None:
    case, given = drawn["what"], _made(drawn)
    for source in ("a list", "a generator"):
        batches = list(given) if source == "a list" else _once(drawn)
        with TypedLook(batches=given) as look:
            scale = answer.calibrate(batches, drawn["percentile"])
        unchanged(case, look.changed())
        if not isinstance(scale, torch.Tensor) or scale.numel() != 1:
            raise Wrong(f"{case}: the scale is {described(scale)}, not a tensor of one number.")
        if scale.dtype != torch.float32:
            raise Wrong(f"{case}: the scale is {scale.dtype}, and torch.float32 is asked for.")
        if not 0 < scale.item() < float("inf"):
            raise Wrong(f"{case}: the scale is {scale.item()}: one cannot divide by that.")
        _covers(f"{case}, from {source}", scale.item() * HIGHEST, drawn, given)
        del batches
        if (kept := look.kept(scale, allowed=A_FEW)) > A_FEW:
            raise Wrong(f"{case}: after the call {kept:,} bytes are still held.")
        largest = max(x.nbytes for x in given)
        if drawn["percentile"] == 100 and len(given) > 6 and source == "a generator":
            _one_by_one(case, look.peak, largest, sum(x.nbytes for x in given))


def _once(drawn: dict) -> Iterator[torch.Tensor]:
    """The batches, each made when it is asked for."""
    for index in range(len(drawn["shapes"])):
        yield _made(drawn)[index]


def _covers(case: str, found: float, drawn: dict, given: list[torch.Tensor]) -> None:
    sizes = torch.cat([x.double().abs().flatten() for x in given]).sort().values
    count = len(sizes)
    place = drawn["percentile"] / 100 * count
    low = sizes[max(int(place) - 2, 0)].item()  # whichever way one counts: two neighbours
    high = sizes[min(int(place) + 1, count - 1)].item()
    if drawn["percentile"] == 100:
        low = high = sizes[-1].item()
    if (low == 0 and high == 0) or low * (1 - 1e-5) <= found <= high * (1 + 1e-5):
        return
    inside = (sizes <= found * (1 + 1e-6)).double().mean().item()
    hint = "Is it the percentile of all numbers of all batches, and of their magnitudes?"
    signed = torch.cat([x.double().flatten() for x in given])
    if abs(found - signed.max().item()) < 1e-5 * found:
        hint = "That is the largest number; the largest magnitude may be a negative one's."
    raise Wrong(
        f"{case}: step {HIGHEST} stands for {number(found)}, which {inside:.1%} of all magnitudes "
        f"do not exceed, and {number(high)} is right.\n{hint}"
    )


def _one_by_one(case: str, peak: int, largest: int, whole: int) -> None:
    made = 12 * largest  # what makes a batch here takes some memory, too
    if peak > made + whole / 2:
        raise Wrong(
            f"{case}: {peak:,} bytes live at once, and the batches are {whole:,} together: at 100 "
            "percent\nnone of them needs to be kept when the next one comes."
        )


# ---- the layer


def _linear(drawn: dict, seed: int) -> nn.Linear:
    """Rows of very different sizes; some of zeros where the case asks for it."""
    N, K, dtype = drawn["N"], drawn["K"], drawn["types"][0]
    linear = nn.Linear(K, N, bias=drawn["bias"], dtype=dtype)
    weight = fractions(seed, N, K) * (3 * fractions(seed + 1, N, 1)).exp().clamp(1e-3, 1e3)
    weight = weight.abs() if drawn["positive"] else weight
    if drawn["zeros"]:
        weight[::3] = 0.0
    with torch.no_grad():
        linear.weight.copy_(weight)
        if drawn["bias"]:
            linear.bias.copy_(fractions(seed + 2, N))
    return linear


def _inputs(drawn: dict, seed: int, scale: float, within: bool = False) -> torch.Tensor:
    """Some inside of the calibrated range and some beyond, whichever neighbour they have; or all
    of them well inside."""
    x = fractions(seed, *drawn["rows"], drawn["K"]) * 40 * scale
    if within:
        return (x / 20).to(drawn["types"][1])
    x = x.abs() if drawn["positive"] else x
    flat = x.view(-1)
    if drawn["zeros"]:
        flat[: drawn["K"]] = 0.0
    beyond = fractions(seed + 1, len(flat)) > 1.5
    flat[beyond] *= drawn["beyond"] * 3
    if drawn["zeros"]:
        flat[[-1, -2, -3, -4]] = torch.tensor([1e30, -1e30, torch.inf, -torch.inf]).double()
    return x.to(drawn["types"][1])


def _all_layers(answer, cases: list[dict]) -> None:
    for drawn in cases:
        with during(drawn["what"]):
            _layer(answer, drawn)


def _layer(answer, drawn: dict) -> None:
    case, seed = drawn["what"], drawn["seed"]
    scale = torch.tensor(drawn["size"] / HIGHEST)
    with TypedLook(scale=scale) as look:
        linear = _linear(drawn, seed)
        given = linear.weight.detach().clone()
        layer = answer.Int8Linear(linear, scale)
        if not bitwise_equal(linear.weight, given):
            raise Wrong(f"{case}: the linear layer's weight is not what it was.")
        bias = 0 if linear.bias is None else max(4, linear.bias.element_size()) * drawn["N"]
        del linear, given
    unchanged(case, look.changed())
    if not isinstance(layer, nn.Module):
        raise Wrong(f"{case}: Int8Linear makes {described(layer)}, not a module.")
    enough = _whole(drawn["N"]) * _whole(drawn["K"]) + 8 * drawn["N"] + bias + A_FEW
    _state(case, layer, max(look.kept(allowed=enough), held(layer.__dict__)), enough, drawn)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    for call in range(2):
        x = _inputs(drawn, seed + 10 + 5 * call, scale.item(), within=call == 1)
        _call(f"{case}, call {call + 1}", layer, x, _linear(drawn, seed), scale.item(), drawn)
    for name, value in layer.state_dict().items():
        if not bitwise_equal(value, before[name]):
            raise Wrong(f"{case}: {name} in the layer's state is not what it was before the calls.")
    if max(held(layer.__dict__), look.kept(allowed=enough)) > enough:
        raise Wrong(f"{case}: after calls the layer holds more than before. What does it keep?")
    _exchanged(case, answer, layer, drawn)


def _whole(size: int) -> int:
    """Where a device wants multiples of 8, filling up is fine."""
    return -(-size // 8) * 8


def _state(case: str, layer: nn.Module, bytes_held: int, enough: int, drawn: dict) -> None:
    stored = list(layer.state_dict().values())
    if not any(t.dtype == torch.int8 and t.numel() >= drawn["N"] * drawn["K"] for t in stored):
        found = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in stored) or "nothing"
        raise Wrong(
            f"{case}: W is not in the layer's state_dict as int8, which has {found}.\n"
            'self.register_buffer("weight", …) puts a tensor there.'
        )
    if bytes_held > enough:
        raise Wrong(
            f"{case}: the layer keeps {bytes_held:,} bytes alive, and {enough:,} will do: W in "
            "int8, a scale an output, the bias.\nIs the linear layer, its weight, or the graph "
            "of a gradient still held?"
        )


def _call(case: str, layer, x: torch.Tensor, linear: nn.Linear, scale: float, drawn: dict) -> None:
    with torch.no_grad(), TypedLook(x=x) as look:
        y = layer(x)
    unchanged(case, look.changed())
    right, tolerance = _reckoned(x, linear, scale)
    if not isinstance(y, torch.Tensor) or y.shape != right.shape:
        close(case, "y", y, right)
    if y.dtype != x.dtype:
        raise Wrong(f"{case}: y is {y.dtype}, and {x.dtype} is right, as x is.")
    _values(case, y.double(), right, tolerance, drawn)
    _products(case, look, x.numel() * drawn["N"])
    M = x.numel() // drawn["K"]
    most = 8 * max(1, M) * max(drawn["K"], drawn["N"]) + A_FEW
    if most < drawn["N"] * drawn["K"] <= look.largest:
        raise Wrong(
            f"{case}: a tensor of {look.largest:,} bytes is made, as large as W "
            f"({drawn['N'] * drawn['K']:,} in int8): each call would read and write it anew."
        )
    del right, tolerance
    if kept := look.kept(y):
        raise Wrong(f"{case}: after the call {kept:,} bytes of what it made are still held.")


def _reckoned(x: torch.Tensor, linear: nn.Linear, scale: float) -> tuple:
    """y in fp64, and how far a right answer may be away."""
    weight, x = linear.weight.detach().double(), x.double()
    largest = weight.abs().amax(dim=1, keepdim=True)
    scales = torch.where(largest > 0, largest / HIGHEST, torch.ones_like(largest))
    steps_w, steps_x = weight / scales, (x / scale).clamp(-2e9, 2e9)
    qw, qx = (s.round().clamp(-HIGHEST, HIGHEST) for s in (steps_w, steps_x))
    unsure_w, unsure_x = (
        (((s.clamp(-200, 200) % 1) - 0.5).abs() < MIDDLE).double() for s in (steps_w, steps_x)
    )
    size = scale * scales.squeeze(1)
    bias = 0.0 if linear.bias is None else linear.bias.detach().double()
    right = (qx @ qw.T) * size + bias
    either = (unsure_x @ qw.abs().T + qx.abs() @ unsure_w.T) * size
    eps = torch.finfo(torch.float32).eps
    terms = (qx.abs() @ qw.abs().T) * size
    return right, either + 8 * eps * (terms + abs(bias))


def _values(case: str, y, right, tolerance, drawn: dict) -> None:
    eps = torch.finfo(drawn["types"][1]).eps
    tolerance = tolerance + 2 * eps * right.abs() + 1e-30
    bad = ~((y - right).abs() <= tolerance)
    if not bad.any():
        return
    place = tuple(bad.nonzero()[0].tolist())
    hint = "q = round(x / scale) between -127 and 127, W likewise, the sums times both scales."
    if not y.isfinite().all():
        hint = "Is something divided by a scale of 0, or does an infinity come through?"
    elif drawn["zeros"] and 2 * bad.sum() < bad.numel():
        hint = "Numbers beyond the calibrated range go to its end, before they become int8."
    raise Wrong(
        f"{case}: y at {list(place)} is {number(y[place])}, and {number(right[place])} is right "
        f"({int(bad.sum()):,} of {bad.numel():,} numbers differ).\n{hint}"
    )


def _products(case: str, look: TypedLook, needed: int) -> None:
    whole = sum(count for types, count in look.typed if types == {torch.int8})
    other = [types for types, count in look.typed if types != {torch.int8} and count]
    if other:
        names = " × ".join(sorted(str(t) for t in other[0]))
        raise Wrong(
            f"{case}: a matrix product has factors of {names}; it is to be int8 × int8, "
            "with sums in int32."
        )
    if whole < needed:
        raise Wrong(
            f"{case}: {whole:,} multiplications are int8 × int8 in matrix products, and there are "
            f"{needed:,}: torch._int_mm."
        )


def _exchanged(case: str, answer, layer: nn.Module, drawn: dict) -> None:
    """Another layer with this one's state computes what this one does."""
    other = answer.Int8Linear(_linear(drawn, drawn["seed"] + 77), torch.tensor(3.21))
    other.load_state_dict({name: t.clone() for name, t in layer.state_dict().items()})
    x = _inputs(drawn, drawn["seed"] + 50, drawn["size"] / HIGHEST)
    if not torch.equal(other(x), layer(x)):
        raise Wrong(
            f"{case}: another layer that loads this one's state_dict computes something else.\n"
            "Does something that a call needs lie outside of it? A plain attribute is not saved."
        )
