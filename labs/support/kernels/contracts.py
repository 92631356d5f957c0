"""Given: the contracts of the five exercises, and the judges behind their check cells.

Kernels run in Triton's interpreter on drawn tensors, with each address checked, and are compared
with fp64. They are also launched on meta tensors, which reveals a host that waits for a value, and
compiled for an H100 without needing one. A shape is compared with the fastest one that a search
finds.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from labs.support.kernels.interpreter import LIBRARY, interpreted, there, watched
from labs.support.kernels.launched import inside, wide
from labs.support.kernels.shape import TILE, modelled
from labs.support.kernels.traced import Traced
from utils.course.assertions import Wrong, close, described
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, attempted, fractions
from utils.measure import timing
from utils.models.gpt import GPT, GPTConfig

COMPILES = 120.0  # seconds: a compilation takes 1 to 3, on a busy machine longer
HUGE = 2**31 + 2**20 + 5  # elements
LARGE = 2**14
SMS = 132  # of an H100
ROWS = 4096  # in the shapes that are compiled
LEAST, LONG = 128, 2**14  # elements per row for which 128-bit accesses are required
NO_SPILL = 2**13  # elements per row up to which nothing may spill
HUGE_ROWS = 2**31 // LONG + 1000, LONG
SHAPES = 25  # number of drawn shapes
MORE = 1.02  # most parameters, as a multiple of the given shape's
NEAR = 1.02  # most modelled time, as a multiple of the fastest shape's
DEEPER = 2  # most layers added or removed
EXAMPLE = GPTConfig(vocab_size=50257, hidden_size=1600, layers=8, heads=20)  # on 2 ranks


def judged(
    trial: Trial,
    values: Callable,
    cases: Iterable[dict[str, Any]],
    call: Callable,
    far: Sequence[tuple[int, ...]],
    compiled: Sequence[tuple[int, ...]],
    library: Sequence[str] = (),
) -> Any:
    """Return the result of `values` for the last case; raises Wrong.

    values: (answer, seed, **case) raises Wrong if the interpreter finds an error; call: (answer,
    *shape) calls it for this shape on the device "meta"; far: shapes with elements 2³¹ apart;
    compiled: shapes for an H100
    """
    there()
    trial.forbid((*LIBRARY, *library))
    with trial.ranks(1) as group:
        group.run(f"tensors of shape {compiled[0]}", inside, call, compiled[0])
        for case in cases:
            name = ", ".join(f"{what} {drawn}" for what, drawn in case.items())
            found = group.run(name, in_memory, values, trial.new_seed(), case, seconds=30.0)[0]
        for shape in far:
            group.run(f"tensors of shape {shape}", inside, call, shape)
        for shape in compiled:
            group.run(f"tensors of shape {shape}", wide, call, shape, seconds=COMPILES)
    return found


# ---- on a rank


def in_memory(answer, values: Callable, seed: int, case: dict) -> Any:
    return values(interpreted(answer), seed, **case)


def traced_call(
    call: Callable[[], dict[str, torch.Tensor]],
    given: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    *,
    launches: int = 1,
    loads: dict[str, int] | None = None,
    beside: int = 0,
    moved: int = 0,
    slack: float = 16,
    scale: float = 0.0,
    hint: str = "",
) -> Traced:
    """Run `call` and return what its kernels did; raises Wrong.

    call: returns results by name; given: its inputs; right: results, and inputs that it changes, in
    fp64, each element of which is stored once; loads: how often each element of an input is loaded
    (None: loads and stores are not checked); beside: elements of other tensors that a program may
    touch; moved: bytes that torch's operators may move; scale: of terms that may cancel.
    """
    with Traced(**given) as traced:
        results = call()
    tensors = given | results
    if len(traced.kernels) != launches:
        raise Wrong(f"launches of {traced.kernels}; {launches} would be enough.")
    if changed := [name for name in traced.changed() if name not in right]:
        raise Wrong(f"the call changes {changed[0]}.")
    for name, wanted in right.items():
        dtype = None if name in given else next(iter(given.values())).dtype
        told = hint or traced.hint(tensors[name], wanted)
        close("a call", name, tensors[name], wanted, hint=told, dtype=dtype, slack=slack,
              scale=scale)
    if traced.moved > moved:
        raise Wrong(
            f"torch's own operators move {traced.moved:,} bytes outside the kernels. Which of\n"
            "them reads all elements, or copies them?"
        )
    if loads is None:
        return traced
    for stores, often in enumerate((loads, dict.fromkeys(right, 1))):
        for name, times in often.items():
            found = traced.count(bool(stores), tensors[name])
            if found > times * tensors[name].numel():
                raise Wrong(
                    f"each element of {name} is {('loaded', 'stored')[stores]} "
                    f"{found / tensors[name].numel():.3g} times, and {times} is right."
                )
    if (touched := traced.beside(*tensors.values())) > beside * traced.programs:
        raise Wrong(
            f"{traced.programs} programs touch {touched:,} elements outside {', '.join(tensors)}; "
            f"{beside} per program must do.\nWhat is read, or added up, unnecessarily, and by how "
            "many programs?"
        )
    return traced


# ---- a: vectors of any stride


def add(trial: Trial) -> str:
    """Judge `add`."""
    draw = trial.draw
    types = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8]
    draw.shuffle(types)
    drawn = [
        (draw.randrange(9000, 20_000), (1, 1, 1)),
        (2 ** draw.randrange(5, 11) + draw.choice((-1, 1)), (3, 1, 1)),
        (draw.randrange(40, 400), (1, 0, draw.randrange(2, 6))),
        (draw.randrange(200, 900), (1, 2, 1)),
        *[(draw.randrange(1, 300), tuple(draw.sample(range(1, 9), 3))) for _ in types[4:]],
    ]
    cases = [{"n": n, "strides": far, "dtype": dtype} for (n, far), dtype in zip(drawn, types)]
    far = [(HUGE,), (3, 2**30, 1, 2), (3, 1, 2**30, 2), (3, 1, 2, 2**30)]
    judged(trial, add_values, cases, add_call, far, [(LARGE,)])
    return (
        "sums are right for vectors of any stride and eight types, at sizes that no block\n"
        "divides, with elements 2³¹ apart, with infinities and NaNs; one launch loads and stores\n"
        "each element once and touches nothing else, even for more than 2³¹ contiguous elements;\n"
        "for an H100 all loads and stores have 128 bits, 12 bytes per element."
    )


def add_values(answer, seed: int, n: int, strides: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, out = (vector(seed + i, n, stride, dtype) for i, stride in enumerate(strides))
    hint = "The mask says how many elements there are, a stride how far apart they are."

    def call() -> dict:
        answer.add(x, y, out)
        return {}

    right = x.double() + y.double() if dtype.is_floating_point else x + y
    traced_call(call, {"x": x, "y": y, "out": out}, {"out": right},
                loads={"x": 1, "y": 1}, slack=1, hint=hint * (strides[:2] != (1, 1)))


def vector(seed: int, n: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """Drawn values: floats include NaNs and infinities; integers come from half of the range."""
    if dtype.is_floating_point:
        values = fractions(seed, n).to(dtype)
        values[seed % 7 :: 31], values[seed % 9 :: 41] = torch.inf, torch.nan
    else:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randint(torch.iinfo(dtype).max // 2, (n,), generator=generator, dtype=dtype)
    if not stride:
        return values[:1].expand(n)
    return values.new_zeros(stride * n + 3)[3::stride][:n].copy_(values)


def add_call(answer, n: int, *strides: int) -> None:
    answer.add(*(torch.empty_strided((n,), (s,), device="meta") for s in strides or (1, 1, 1)))


# ---- b: AdamW that clips


def clipped_adamw(trial: Trial) -> str:
    """Judge `clipped_step`."""
    draw = trial.draw
    cases = [
        {
            "n": n, "size": size, "clip": clip, "bad": bad,
            "t": draw.choice((1, 2, draw.randrange(3, 30), 100_000)),
            "lr": draw.choice((0.02, 0.1)),
            "betas": (draw.choice((0.5, 0.9)), draw.choice((0.8, 0.99))),
            "eps": draw.choice((1e-3, 1e-2)) * size,
            "weight_decay": draw.choice((0.1, 0.9)),
        }
        for n, clip, size, bad in (
            (draw.randrange(36_000, 44_000), 0.3, 1.3, None),  # many programs
            (2 ** draw.randrange(8, 12) + 1, 3.0, draw.choice((0.1, 2.0)), None),
            (draw.randrange(10, 40), 0.3, 1e-5, None),
            (draw.randrange(1025, 2000), 0.5, 1.0, math.nan),
            (draw.randrange(20, 1000), 0.5, 1.0, -math.inf),
        )
    ]
    judged(trial, clipped_values, cases, clipped_call, [(HUGE,)], [(LARGE,)],
           library=("torch.optim", "clip_grad_norm_", "AdamW"))
    return (
        "norm, p, m and v equal those computed in fp64, clipped or not, for any step and rates,\n"
        "with gradients of 0 too, at sizes that no block divides; a norm that is not finite\n"
        "changes nothing; 32 bytes per parameter in two launches, without atomic operations, and\n"
        "the host waits for no value; for an H100 loads and stores of both launches have 128 bits."
    )


def clipped_values(
    answer, seed: int, n: int, size: float, clip: float, bad: float | None, **rates: Any
) -> None:
    """Gradients are about `size`, some are 0, and one is `bad` unless that is None. clip: fraction
    of their norm; rates: further arguments."""
    p, g, m, v = (fractions(seed + i, n).float() for i in range(4))
    v = ((v.abs() + 0.3) * size).square()
    p, g, m = -p.abs() * g.sign(), g * size, m.abs() * g.sign() * size  # nothing cancels
    g[3::5] = m[3::10] = v[3::10] = 0.0
    if bad is not None:
        g[seed % n] = bad
    given = {"p": p, "g": g, "m": m, "v": v}
    t, lr, (beta1, beta2), eps, decay = rates.values()
    p, g, m, v = (tensor.double() for tensor in given.values())
    norm, most = g.norm(), clip * size * n**0.5
    if bad is None:
        g = g * min(1.0, most / (norm.item() + 1e-6))
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
        root = (v / (1 - beta2**t)).sqrt() + eps
        p = p * (1 - lr * decay) - lr / (1 - beta1**t) * m / root
    traced_call(
        lambda: {"norm": answer.clipped_step(**given, max_norm=most, **rates)}, given,
        {"norm": norm, "p": p, "m": m, "v": v}, launches=2, beside=8, moved=2 * n + 2048,
        loads={"p": 1, "g": 2, "m": 1, "v": 1} if bad is None else None,
        slack=16 if bad is None else 0,
        hint="" if bad is None else "If the norm is not finite, nothing may change.",
    )


def clipped_call(answer, n: int) -> None:
    answer.clipped_step(*(torch.empty(n, device="meta") for _ in "pgmv"), 3, 1.0, 0.01)


# ---- c, d: rows


def rows_to_compile(trial: Trial) -> list[tuple[int, int]]:
    """(rows, elements per row): the shortest rows, and long ones."""
    return [(ROWS, LEAST), (ROWS, NO_SPILL - 16 * trial.draw.randrange(NO_SPILL // 32))]


def softmax(trial: Trial) -> str:
    """Judge `softmax`, forward and backward."""
    draw = trial.draw
    cases = [
        {"shape": shape, "scale": draw.choice((0.3, 1.5)), **more}
        for shape, more in (
            ((draw.randrange(3, 9), draw.randrange(65, 500)), {}),
            # e^(0.3 · 400) overflows fp32
            ((2, draw.randrange(2, 4), 2 ** draw.randrange(4, 8)), {"around": 400.0}),
            ((3, draw.randrange(1030, 1500)), {"around": 60.0, "dtype": torch.float16}),
            ((4, draw.randrange(20, 60)), {"masked": True}),
            ((draw.randrange(2, 5), draw.randrange(2, 5), draw.randrange(5, 9)), {"turned": True}),
            ((draw.randrange(2**13 + 1, 2**14),), {}),
        )
    ]
    judged(trial, softmax_values, cases, softmax_call, [HUGE_ROWS], rows_to_compile(trial))
    return (
        "y and dx, in fp32 and fp16, equal PyTorch's in fp64, for rows of any length, large\n"
        "values, masked places and non-contiguous gradients; 8 bytes per element forward and 12\n"
        "backward (fp32), one launch each; only y is kept in between; for an H100, rows of 128\n"
        "elements or more are loaded and stored 128 bits at a time, and nothing spills."
    )


def softmax_values(
    answer, seed: int, shape: tuple[int, ...], scale: float, dtype: torch.dtype = torch.float32,
    around: float = 0.0, masked: bool = False, turned: bool = False,
) -> None:
    """Run both halves, and another graph's forward half in between. around: mean of x; masked: some
    elements are -inf; turned: the last dimension of x and dy comes first in memory."""
    x, dy = (3 * fractions(seed + n, *shape).to(dtype) for n in (0, 1))
    x += around
    if masked:
        x[fractions(seed + 2, *shape) > 0.4] = -torch.inf
        x[0] = -torch.inf  # a whole row
    if turned:
        x, dy = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, dy))
    exact = x.double().requires_grad_()
    right = torch.softmax(exact * scale, -1)
    right.backward(dy.double())
    exponent = (exact.detach() * scale).nan_to_num(neginf=0.0).abs().max().item()
    leaf, made = x.clone().requires_grad_(), []

    def forward() -> dict:
        made.append(answer.softmax(leaf, scale))
        return {"y": made[0].detach()}

    def backward() -> dict:
        return {"dx": torch.autograd.grad(made[0], leaf, dy)[0]}

    more = 32 * (x.numel() // shape[-1]) + 2 * x.nbytes * turned  # bytes
    same = {
        "slack": 3 if dtype == torch.float16 else 32 + 4 * exponent,  # its rounding is e's
        "beside": 8, "moved": more,
    }
    loads = None if turned else {"x": 1}
    traced_call(forward, {"x": leaf}, {"y": right.detach()}, loads=loads, **same)
    with watched(lambda *_: None), Look() as look:
        other = answer.softmax(1 - leaf, 2 * scale)
    if (kept := look.kept(other, allowed=more)) > more:
        raise Wrong(f"{kept:,} bytes in addition to y are held until the backward half: why?")
    traced_call(
        backward, {"y": made[0].detach(), "dy": dy}, {"dx": exact.grad},
        loads=None if turned else {"y": 1, "dy": 1}, **same,
        scale=(right * dy.double()).nan_to_num().abs().max().item() * scale,
    )


def softmax_call(answer, rows: int, d: int) -> None:
    x, dy = (torch.empty(rows, d, device="meta") for _ in range(2))
    x.requires_grad_()
    torch.autograd.grad(answer.softmax(x, 0.5), x, dy)


# ---- d: residual and RMSNorm, judged by bytes

GOAL = 18.0  # bytes per element
COUNTED = 3 * SMS  # rows


def fused_norm(trial: Trial) -> str:
    """Judge `add_norm`."""
    draw = trial.draw
    cases = [  # the rows that are counted come last
        {"rows": draw.randrange(2, 9), "d": draw.randrange(65, 500), "eps": 0.3},
        {"rows": 1, "d": draw.randrange(2**13 + 1, 2**14), "eps": 1e-5},
        {"rows": draw.randrange(SMS + 1, SMS + 20), "d": draw.randrange(5, 40), "eps": 1e-2},
        {"rows": COUNTED, "d": draw.randrange(65, 99), "eps": 1e-5},
    ]
    found = judged(trial, norm_values, cases, norm_call, [HUGE_ROWS], rows_to_compile(trial),
                   library=("rms_norm",))
    return (
        f"y and h are right for rows of any length, and {COUNTED} rows take {found:.2f} bytes per "
        f"element\n(the goal was {GOAL:g}), with a program for each of {SMS} SMs; for an H100, "
        "rows of 128 elements or\nmore are loaded and stored 128 bits at a time; nothing spills."
    )


def norm_values(answer, seed: int, rows: int, d: int, eps: float) -> float:
    """Return bytes per element."""
    x, residual = (fractions(seed + i, rows, d).float() for i in (0, 1))
    weight = fractions(seed + 2, d).float()
    h = x.double() + residual.double()
    y = h / (h.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    traced = traced_call(
        lambda: dict(zip("yh", answer.add_norm(x, residual, weight, eps), strict=True)),
        {"x": x, "residual": residual, "weight": weight}, {"h": h, "y": y}, slack=64,
        moved=20 * x.numel(),
    )
    if traced.programs < min(rows, SMS):
        raise Wrong(
            f"{traced.programs} programs process {rows:,} rows, but an H100 has {SMS} SMs: some of "
            "them would be idle."
        )
    found = (traced.traffic + traced.moved) / x.numel()
    if rows == COUNTED and found > GOAL:
        raise Wrong(
            f"values are right, but {rows} rows take {found:.2f} bytes per element; the goal is "
            f"{GOAL:g}.\nOne row per program takes 20. Which of its loads is the same in all "
            "programs?"
        )
    return found


def norm_call(answer, rows: int, d: int) -> None:
    x, residual, weight = (torch.empty(n, d, device="meta") for n in (rows, rows, 1))
    answer.add_norm(x, residual, weight[0], 1e-5)


def count(path: str | Path, d: int = 96) -> float:
    """Bytes per element of the answer in the file, for 396 rows of d elements."""
    case = {"rows": COUNTED, "d": d, "eps": 1e-5}
    return Trial(path).alone(f"{COUNTED} rows", in_memory, norm_values, 0, case, seconds=COMPILES)


def machine_code(path: str | Path) -> dict:
    """Statistics of the code that an H100 would execute for 4,096 rows of 4,096 elements."""
    return Trial(path).alone("an H100", _on_an_h100, seconds=COMPILES)


def _on_an_h100(answer) -> dict:
    from utils.kernels import occupancy

    (found,) = wide(answer, norm_call, (ROWS, 4096))
    held = occupancy(found)
    return {
        "registers": found.registers, "warps": found.threads // 32, "programs an SM": held.programs,
        "occupancy": held.share, "loads": found.loads, "stores": found.stores,
    }


# ---- e: the shape of a model


def reshape(trial: Trial) -> str:
    """Judge `reshape`."""
    found = trial.alone("reshape", is_faster, trial.new_seed())
    return (
        f"for {SHAPES} drawn shapes the answer is at most {NEAR - 1:.0%} slower than the fastest\n"
        f"that obeys the rules, with 0 to {MORE - 1:.0%} more parameters; if none is faster, it\n"
        f"returns the given shape. The one above becomes {found}."
    )


def is_faster(answer: Any, seed: int) -> str:
    """On a rank: judge drawn shapes, and return what EXAMPLE becomes."""
    for_all(seed, given_shapes(), lambda case: judged_shape(answer.reshape(*case), *case), SHAPES)
    judged_shape(found := answer.reshape(EXAMPLE, 2), EXAMPLE, 2)
    ratio = modelled(found, 2) / modelled(EXAMPLE, 2)
    return f"{sizes(found)},\nand takes {ratio:.3f} of its modelled time"


def given_shapes() -> st.SearchStrategy:
    """(GPTConfig, tp): heads of several sizes, vocabularies of real tokenizers, tiny models too."""
    return st.builds(
        lambda heads, head, layers, vocab, tied, theta, tp: (
            GPTConfig(vocab, heads * head, layers, heads, tie_embeddings=tied, rope_theta=theta), tp
        ),
        st.integers(1, 20), st.sampled_from([16, 40, 64, 72, 80, 96, 100, 128]), st.integers(1, 8),
        st.sampled_from([257, 5003, 32000, 50257]), st.booleans(), st.sampled_from([1e4, 5e5]),
        st.sampled_from([1, 2, 4]),
    )


@lru_cache
def fastest(given: GPTConfig, tp: int) -> GPTConfig:
    """The fastest of the shapes that obey the rules, and `given`."""
    unit, least, best = TILE * tp, given.parameter_count(), given
    for layers in range(max(1, given.layers - DEEPER), given.layers + DEEPER + 1):
        for width in range(TILE, 4 * given.hidden_size + TILE, TILE):
            for inner in range(unit * math.ceil(2 * width / unit), 4 * width + 1, unit):
                one = replace(
                    given, vocab_size=padded(given.vocab_size, unit), hidden_size=width,
                    heads=width // 64, layers=layers, intermediate_size=inner,
                )  # heads of 128 take the same time
                if one.heads % tp == 0 and least <= one.parameter_count() <= MORE * least:
                    best = min(best, one, key=lambda shape: modelled(shape, tp))
    return best


def padded(n: int, unit: int) -> int:
    return unit * math.ceil(n / unit)


def judged_shape(found: Any, given: GPTConfig, tp: int) -> None:
    """Raises Wrong with the first rule that `found` breaks."""
    case = f"reshape({sizes(given)}, tp={tp})"
    if not isinstance(found, GPTConfig):
        raise Wrong(f"{case}: it should be a GPTConfig, and this is {described(found)}.")
    top = fastest(given, tp)
    case += f" is {sizes(found)}"
    if found != given and (broken := next(broken_rules(found, given, tp), "")):
        raise Wrong(f"{case}:\n{broken}.")
    if found != given and modelled(found, tp) >= modelled(given, tp):
        raise Wrong(f"{case}:\nit is not faster than the given shape: return that one instead.")
    if (slower := modelled(found, tp) / modelled(top, tp)) > NEAR:
        raise Wrong(
            f"{case}:\nits modelled time is {slower:.2f} times that of {sizes(top)}.\n"
            "Are all allowed widths, depths and MLPs compared, and by their time?"
        )


def broken_rules(found: GPTConfig, given: GPTConfig, tp: int) -> Iterator[str]:
    unit, (low, high) = TILE * tp, (2 * found.hidden_size, 4 * found.hidden_size)
    open_to_choice = ("vocab_size", "hidden_size", "heads", "layers", "intermediate_size")
    ratio = found.parameter_count() / given.parameter_count()
    if replace(found, **{name: getattr(given, name) for name in open_to_choice}) != given:
        yield "more than its sizes changed: what does `replace` keep?"
    if found.vocab_size != padded(given.vocab_size, unit):
        yield f"its vocabulary is not the given one, padded up to the next multiple of {unit}"
    if found.hidden_size % TILE:
        yield f"its width is not a multiple of {TILE}"
    if found.head_size not in (64, 128):
        yield f"its heads have {found.head_size} values instead of 64 or 128"
    if found.heads % tp:
        yield f"{found.heads} heads cannot be divided equally among {tp} ranks"
    if found.mlp_size % unit or not low <= found.mlp_size <= high:
        yield f"its MLP should have a multiple of {unit} columns, from {low} to {high}"
    if abs(found.layers - given.layers) > DEEPER:
        yield f"its number of layers differs by more than {DEEPER} from {given.layers}"
    if not 1 <= ratio <= MORE:
        yield (
            f"it has {ratio:.4f} times the parameters, and 1 to {MORE} are allowed: making a\n"
            "model faster by shrinking it takes no skill"
        )


def sizes(config: GPTConfig) -> str:
    """A model's sizes in a few words."""
    c = config
    return (
        f"{c.layers} × {c.hidden_size}, {c.heads} heads, MLP {c.mlp_size}, "
        f"vocabulary {c.vocab_size}"
    )


def time_shapes(file: str, given: GPTConfig) -> dict[str, float] | None:
    """{shape: ms per forward and backward pass here}; None if `reshape` does not run."""
    found = attempted(file, 1, lambda answer: vars(answer.reshape(given, 1)))
    if found is None:
        return None
    shapes = {"given": given, "yours": GPTConfig(**found[0])}
    steps = {f"{name}: {sizes(one)}": step(one) for name, one in shapes.items()}
    return {name: 1e3 * seconds for name, seconds in timing.in_turn(steps, 5).items()}


def step(config: GPTConfig) -> Callable[[], None]:
    model, tokens = GPT(config), torch.arange(128)[None] % config.vocab_size

    def run() -> None:
        model.zero_grad()
        model(tokens).logsumexp(-1).mean().backward()

    return run
