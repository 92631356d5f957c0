"""Given: what the four exercises ask for, and how their check cells judge it.

Kernels run in Triton's interpreter on drawn tensors, each address looked at, and are compared with
fp64; then they are launched on tensors without numbers, where a host that waits for one is seen,
and compiled for an H100, without one.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from labs.support.kernels.interpreter import LIBRARY, counted, interpreted, there, watched
from labs.support.kernels.launched import Launch, dry, inside, wide
from labs.support.kernels.traced import Traced
from utils.course.assertions import Wrong, close
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

COMPILES = 120.0  # seconds: a compilation takes 1 to 3, on a busy machine longer
HUGE = 2**31 + 2**20 + 5  # numbers
LARGE = 2**24
SMS = 132  # of an H100
ROWS = 4096  # of what is compiled
LEAST, LONG = 128, 2**14  # numbers of a row that 128 bits are promised for
SMALL = 1024  # bytes
NO_SPILL = 2**13  # numbers of a row up to which nothing may spill


@dataclass(frozen=True)
class KernelContract:
    """What launches have to do.

    cases   trial -> what is drawn; its str names a case
    values  (answer, case): raises Wrong where the interpreter finds something wrong with it
    again   (answer, seed) -> a small call; its results are new tensors
    launch  (answer, *shape) -> the launches for a shape, on the device "meta"
    far     a shape with more than 2³¹ numbers; walk: loads and stores that are looked at there
    shapes  trial -> shapes that are compiled
    says    what `values` of the last case gives -> what was looked at
    """

    cases: Callable[[Trial], Sequence]
    values: Callable
    again: Callable
    launch: Callable[..., list[Launch]]
    far: tuple[int, ...]
    shapes: Callable[[Trial], Sequence[tuple[int, ...]]]
    says: Callable[[float | None], str]
    library: tuple[str, ...] = LIBRARY
    walk: int = 64

    def judge(self, trial: Trial) -> str:
        """For `check`: what was looked at; raises Wrong."""
        there()
        trial.forbid(self.library)
        with trial.ranks(1) as group:
            for case in self.cases(trial):
                found = group.run(str(case), self.values, case, seconds=30.0)[0]
            group.run("two calls", nothing_kept, self.again, trial.new_seed())
            group.run(shown(self.far), reach, self.launch, self.far, self.walk)
            for shape in self.shapes(trial):
                group.run(shown(shape), code, self.launch, shape, seconds=COMPILES)
        return self.says(found)


def shown(shape: tuple[int, ...]) -> str:
    """(4096, 128) -> "4,096 · 128 numbers"."""
    return " · ".join(f"{size:,}" for size in shape) + " numbers"


def rows_to_compile(trial: Trial) -> list[tuple[int, int]]:
    """(rows, numbers of a row): many rows and, since an H100 has more SMs, few."""
    lengths = LEAST, 16 * trial.draw.randrange(LEAST // 16 + 1, LONG // 16 + 1), NO_SPILL
    few = 16 * trial.draw.randrange(1, 9)
    return [(rows, d) for d in lengths for rows in (ROWS, few)]


# ---- on a rank


def reach(answer, launch: Callable, shape: tuple, walk: int) -> None:
    """The first and the last program stay inside of tensors of more than 2³¹ numbers."""
    inside(launch(interpreted(answer), *shape), walk)


def code(answer, launch: Callable, shape: tuple) -> list:
    """The machine code of a shape: 128 bits a thread, and no spills."""
    return wide(launch(interpreted(answer), *shape), spills=shape[-1] > NO_SPILL and len(shape) > 1)


def nothing_kept(answer, again: Callable, seed: int) -> None:
    """Results lie in memory of their own, and of two calls nothing else is kept."""
    answer, before = interpreted(answer), Look()
    with watched(lambda *_: None), before:
        held = [again(answer, seed) for _ in range(2)]
    one, other = ({t.untyped_storage().data_ptr() for t in results} for results in held)
    if one & other:
        raise Wrong(
            "a result of the second call lies where the first call's is, which somebody still "
            "holds: make new memory in each call."
        )
    if (kept := before.kept(*held, allowed=SMALL)) > SMALL:
        raise Wrong(
            f"when two calls have ended, {kept:,} bytes beside their results are held. Who "
            "remembers them, and what for?"
        )


def traced_call(
    case: str,
    call: Callable[[], dict[str, torch.Tensor]],
    given: dict[str, torch.Tensor],
    right: dict[str, torch.Tensor],
    *,
    launches: int = 1,
    loads: dict[str, int] | None = None,
    stores: Sequence[str] = (),
    beside: int = 0,
    moved: int = 0,
    slack: float = 16,
    scale: dict[str, float] | None = None,
    hint: str = "",
) -> tuple[dict[str, torch.Tensor], Traced]:
    """What `call` returns by name, and what its kernels did; raises Wrong.

    given: its inputs; right: results, and inputs that it changes, in fp64; loads: how often each
    number of the inputs is loaded, None: not looked at; stores: of what each number is stored once;
    beside: numbers of other tensors that a program may touch; moved: bytes for torch's operators.
    """
    with Traced(case, **given) as traced:
        results = call()
    tensors = given | results
    if len(traced.kernels) != launches:
        names = f" ({', '.join(traced.kernels)})" * bool(traced.kernels)
        raise Wrong(f"{case}: {counted(len(traced.kernels), 'launch')}{names}, not {launches}.")
    if changed := [name for name in traced.changed() if name not in right]:
        raise Wrong(f"{case}: {changed[0]} is not what it was before the call.")
    for name, wanted in right.items():
        dtype = None if name in given else next(iter(given.values())).dtype
        told = hint or traced.hint(tensors[name], wanted)
        close(case, name, tensors[name], wanted, dtype=dtype, slack=slack, hint=told,
              scale=(scale or {}).get(name, 0.0))
    if traced.moved > moved:
        raise Wrong(
            f"{case}: torch's own operators move {traced.moved:,} bytes beside the kernels. Which "
            "of them\ngoes over all numbers, or copies them?"
        )
    if loads is None:
        return results, traced
    counted_ones = {n: t for n, t in tensors.items() if n in given or n in stores}
    for name, tensor in counted_ones.items():
        wanted = loads.get(name, 0), int(name in stores)
        for done, counts, often in zip(("loaded", "stored"), traced.often(tensor), wanted):
            bad = counts != often
            if bad.any():
                raise Wrong(
                    f"{case}: {name}{[int(i[0]) for i in bad.nonzero()]} is {done} "
                    f"{counted(int(counts[bad][0]), 'time')}, and {often} is right "
                    f"({bad.sum():,} of {bad.size:,} numbers)."
                )
    if (touched := traced.beside(*tensors.values())) > beside * traced.programs:
        raise Wrong(
            f"{case}: {traced.programs} programs touch {touched:,} numbers beside "
            f"{', '.join(tensors)}; {beside} for each have to do.\nWhat is read, or added up, that "
            "need not be, and by how many programs?"
        )
    return results, traced


# ---- a: vectors of any stride


@dataclass(frozen=True)
class Vectors:
    """n numbers of x, y and `out`, so far apart; into: which of them `out` is, if any."""

    n: int
    strides: tuple[int, int, int]
    dtype: torch.dtype
    seed: int
    into: str = ""

    def __str__(self) -> str:
        x, y, out = self.strides
        where = f", out is {self.into}" if self.into else f" and {out}"
        return f"{self.n:,} numbers of {self.dtype}, strides {x}, {y}{where}"

    def vector(self, number: int) -> torch.Tensor:
        """Drawn numbers from a quarter of a type's range; some floats are NaN, or infinite."""
        stride, seed, dtype = self.strides[number], self.seed + number, self.dtype
        if dtype.is_floating_point:
            values = fractions(seed, self.n).to(dtype)
            if self.n > 9:
                values[seed % 7 :: 31], values[seed % 5 :: 37] = torch.inf, -torch.inf
                values[seed % 9 :: 41] = torch.nan
        else:
            top = torch.iinfo(dtype).max // 4
            generator = torch.Generator().manual_seed(seed)
            low = -top if dtype.is_signed else 0
            values = torch.randint(low, top, (self.n,), generator=generator, dtype=dtype)
        if not stride:
            return values[:1].expand(self.n)
        # addresses only: a page that nobody touches takes no memory
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        room = mmap.mmap(-1, (stride * self.n + 7) * dtype.itemsize, flags=private)
        return torch.frombuffer(room, dtype=dtype)[3::stride][: self.n].copy_(values)


def vectors(trial: Trial) -> list[Vectors]:
    draw, far = trial.draw, 2**30 + trial.draw.randrange(9)
    types = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16,
             torch.int8]
    block = 2 ** draw.randrange(5, 11)
    drawn = [
        (draw.randrange(9000, 20_000), (1, 1, 1)),
        (block + draw.choice((-1, 1)), (3, 1, 1)),
        (draw.randrange(40, 400), (1, 0, draw.randrange(2, 6))),
        (draw.randrange(40, 400), (0, 0, 1)),
        (1, (1, 1, 7)),
        (block, tuple(draw.sample(range(1, 9), 3))),
        (draw.randrange(200, 900), (1, 2, 1)),
        (draw.randrange(1100, 2000), (1, 1, 1), "x"),
        (draw.randrange(1100, 2000), (draw.randrange(1, 5), draw.randrange(2, 5), 1), "y"),
        *((3, strides) for strides in ((far, 1, 2), (2, far, 1), (1, 2, far))),
    ]
    draw.shuffle(types)
    chosen = [*types, *types[:2], *[torch.uint8] * 3]
    return [Vectors(n, strides, dtype, trial.new_seed(), *into)
            for (n, strides, *into), dtype in zip(drawn, chosen)]


def add_values(answer, case: Vectors) -> None:
    answer, (x, y, out) = interpreted(answer), map(case.vector, range(3))
    right = x.double() + y.double() if case.dtype.is_floating_point else x + y
    given, name = {"x": x, "y": y, "out": out}, case.into or "out"
    if case.into:
        out = given[case.into]
        del given["out"]

    def call() -> dict:
        if answer.add(x, y, out) is not None:
            raise Wrong("add returns something; the sums belong into out.")
        return {}

    hint = "The mask says how many numbers there are, a stride how far apart they lie."
    traced_call("a call", call, given, {name: right}, loads={"x": 1, "y": 1}, stores=name, slack=1,
                hint=hint * (case.strides[:2] != (1, 1)))


def add_again(answer, seed: int) -> list:
    answer.add(*(fractions(seed, 2000) for _ in "xyo"))
    return []


def add_launch(answer, n: int) -> list[Launch]:
    return dry(lambda: answer.add(*(torch.empty(n, device="meta") for _ in "xyo")))


ADD = KernelContract(
    vectors, add_values, add_again, add_launch, far=(HUGE,), shapes=lambda trial: [(LARGE,)],
    says=lambda _: "sums are right for vectors of any stride and eight types, at sizes that no "
    "block\ndivides, in place, and 2³¹ numbers apart, with infinities and NaN; each number is "
    "loaded\nonce and stored once, by one launch, and nothing beside them is touched, also where "
    "more\nthan 2³¹ are neighbours; for an H100 all loads and stores have 128 bits, which is "
    "12\nbytes a number.",
)

# ---- b: AdamW that clips


@dataclass(frozen=True)
class Step:
    """A step for n parameters, whose gradients are about `size`, and one, if any, is `bad`; rates:
    further arguments."""

    n: int
    size: float
    bad: float | None
    rates: dict
    seed: int

    def __str__(self) -> str:
        bad = f", one gradient is {self.bad}" if self.bad is not None else ""
        bad += ", all gradients are 0" * (self.size == 0)
        named = ", ".join(f"{name}={value}" for name, value in self.rates.items())
        return f"{self.n:,} parameters, {named}{bad}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """p, g, m and v. Some gradients are 0, and some parameters have never had another."""
        p, g, m, v = (fractions(self.seed + i, self.n).float() for i in range(4))
        g, m, v = g * self.size, m * self.size, ((v.abs() + 0.3) * (self.size or 1.0)).square()
        g[3::5] = m[3::10] = v[3::10] = 0.0
        if self.bad is not None:
            g[self.seed % self.n] = self.bad
        return {"p": p, "g": g, "m": m, "v": v}

    def right(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """The contract, in fp64; and how large the terms of p and m are, which may cancel."""
        t, max_norm, lr, (beta1, beta2), eps, decay = self.rates.values()
        p, g, m, v = (tensor.double() for tensor in self.tensors().values())
        norm = g.norm()
        if not norm.isfinite():
            return {"norm": norm, "p": p, "m": m, "v": v}, {}
        g = g * min(1.0, max_norm / (norm.item() + 1e-6))
        terms = beta1 * m.abs() + (1 - beta1) * g.abs()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
        root, size = (v / (1 - beta2**t)).sqrt() + eps, lr / (1 - beta1**t)
        scale = {"p": (p.abs() + size * terms / root).max().item(), "m": terms.max().item()}
        return {"norm": norm, "m": m, "v": v, "p": p * (1 - lr * decay) - size * m / root}, scale


def adamw_steps(trial: Trial) -> list[Step]:
    draw, late = trial.draw, trial.draw.randrange(30_000, 100_000)

    def step(n: int, clip: float, size: float, bad: float | None = None, **rates) -> Step:
        usual = {
            "t": draw.choice((1, 2, draw.randrange(3, 30), 1000)),
            "max_norm": clip * (size or 1.0) * n**0.5,  # 1: about the norm
            "lr": draw.uniform(0.01, 0.1),
            "betas": (draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.999)),
            "eps": draw.choice((1e-8, 1e-3, 1e-2)),
            "weight_decay": draw.uniform(0.05, 0.9),
        }
        return Step(n, size, bad, usual | rates, trial.new_seed())

    return [
        step(draw.randrange(36_000, 44_000), draw.uniform(0.1, 0.5), 1.3, eps=1e-2),
        step(2 ** draw.randrange(8, 12) + 1, draw.uniform(1.5, 5), draw.uniform(0.1, 2), t=late,
             betas=(0.9, 1 - 1 / late)),  # each t has another β2^t
        step(draw.randrange(2, 40), 0.3, 1e-5),
        step(1, draw.uniform(0.2, 0.7), draw.uniform(0.1, 2)),
        step(4096, draw.uniform(0.3, 0.8), 1e3, t=draw.randrange(2, 9)),
        step(draw.randrange(1025, 2000), 0.5, 1.0, math.nan),
        step(draw.randrange(20, 1000), 0.5, 1.0, -math.inf),
        step(draw.randrange(20, 1000), 0.5, 0.0),
    ]


def clipped_values(answer, case: Step) -> None:
    answer, given, (right, scale) = interpreted(answer), case.tensors(), case.right()
    bad = not right["norm"].isfinite()
    traced_call(
        "a call", lambda: {"norm": answer.clipped_step(**given, **case.rates)}, given, right,
        launches=2, loads=None if bad else {"p": 1, "g": 2, "m": 1, "v": 1}, stores="pmv", beside=8,
        moved=2 * case.n + 2048, slack=0 if bad else 16, scale=scale,
        hint="Where the norm is not finite, nothing is to be changed." * bad,
    )


def clipped_again(answer, seed: int) -> list:
    tensors = [fractions(seed, 300).float().abs() for _ in "pgmv"]
    return [answer.clipped_step(*tensors, 3, 1.0, 0.01)]


def clipped_launch(answer, n: int) -> list[Launch]:
    tensors = [torch.empty(n, device="meta") for _ in "pgmv"]
    return dry(lambda: answer.clipped_step(*tensors, 3, 1.0, 0.01), right=2, moved=2 * n)


CLIPPED = KernelContract(
    adamw_steps, clipped_values, clipped_again, clipped_launch, far=(HUGE,),
    shapes=lambda trial: [(LARGE,)], library=(*LIBRARY, "torch.optim", "clip_grad_norm_", "AdamW"),
    says=lambda _: "norm, p, m and v equal a reckoning in fp64, clipped and not, for any step and "
    "rates,\ngradients that are 0 too, at sizes that no block divides; a norm that is not finite\n"
    "changes nothing; 32 bytes a parameter in two launches, without an atomic operation, and\n"
    "the host waits for no number; for an H100 loads and stores of both launches have 128 bits.",
)

# ---- c: softmax, forward and backward


@dataclass(frozen=True)
class Scores:
    """Rows of numbers about `shift` (scaled), the last of each larger by `last`; masked: some are
    -inf; turned, expanded: how x and dy, or dy, lie in memory; dy: how large it is."""

    shape: tuple[int, ...]
    scale: float
    seed: int
    dtype: torch.dtype = torch.float32
    size: float = 3.0
    shift: float = 0.0
    last: float = 0.0
    masked: bool = False
    turned: bool = False
    expanded: bool = False
    dy: float = 1.0

    def __str__(self) -> str:
        said = [f"x of shape {self.shape} in {self.dtype}", *["with -inf"] * self.masked]
        said += [f"around {self.shift:.0f}"] * bool(self.shift)
        said += [f"its last number larger by {self.last:.0f}"] * bool(self.last)
        said += ["strides of dy not its own"] * (self.turned or self.expanded)
        return ", ".join(said)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x and dy."""
        x = fractions(self.seed, *self.shape) * self.size + self.shift / self.scale
        x[..., -1] += self.last / self.scale
        if self.masked:
            x[fractions(self.seed + 1, *self.shape) > 0.4] = -torch.inf
            x[0] = -torch.inf  # a whole row
        dy = (1 + fractions(self.seed + 2, *self.shape) / (8 if self.dy < 1 else 1)) * self.dy
        if self.expanded:
            dy = dy[..., :1].expand(self.shape)
            x[..., 0] += 1  # a constant dy has dx = 0: so dy differs from row to row only
        x, dy = x.to(self.dtype), dy.to(self.dtype)
        if self.turned:
            x, dy = (t.transpose(0, -1).contiguous().transpose(0, -1) for t in (x, dy))
        return x, dy


def scores(trial: Trial) -> list[Scores]:
    draw = trial.draw
    usual = [
        {"shape": (draw.randrange(3, 9), draw.randrange(65, 500))},
        {"shape": (2, draw.randrange(2, 4), 2 ** draw.randrange(4, 8)), "size": 200.0},
        {"shape": (5, draw.randrange(1030, 1500)), "dtype": torch.float16, "size": 30.0},
        {"shape": (draw.randrange(2, 7), 1)},
        {"shape": (4, draw.randrange(20, 60)), "masked": True, "shift": -50.0},
        {"shape": (3, draw.randrange(5, 40)), "expanded": True},
        {"shape": (draw.randrange(2, 5), draw.randrange(2, 5), draw.randrange(5, 9)),
         "turned": True},
        {"shape": (draw.randrange(3000, 5000),), "shift": 120.0, "last": 150.0},
        {"shape": (2, draw.randrange(5000, 7000)), "dtype": torch.float16, "dy": 1e-4,
         "scale": draw.uniform(8000, 9000), "size": 2**-13},  # y · dy is nothing in fp16
        {"shape": (2, draw.randrange(2**13 + 1, 2**14))},
    ]
    return [Scores(**{"scale": draw.uniform(0.3, 1.5), "seed": trial.new_seed(), **drawn})
            for drawn in usual]


def softmax_values(answer, case: Scores) -> None:
    """Both halves, and another graph's forward half between them."""
    answer, (x, dy) = interpreted(answer), case.tensors()
    exact = x.double().requires_grad_()
    right = torch.softmax(exact * case.scale, -1)
    right.backward(dy.double())
    exponent = (exact.detach() * case.scale).nan_to_num(neginf=0.0).abs().max().item()
    slack = 3 if case.dtype == torch.float16 else 32 + 4 * exponent  # its rounding is e's
    rows, copied = x[..., 0].numel(), 2 * x.nbytes
    leaf, made = x.clone().requires_grad_(), {}

    def forward() -> dict:
        made["y"] = answer.softmax(leaf, case.scale)
        if not made["y"].requires_grad:
            raise Wrong("y does not know how it was made: no gradient comes back.")
        return {"y": made["y"].detach()}

    def backward() -> dict:
        return {"dx": torch.autograd.grad(made["y"], leaf, dy, allow_unused=True)[0]}

    traced_call(
        "forward half", forward, {"x": leaf}, {"y": right.detach()}, slack=slack, beside=8,
        loads={"x": 1} if x.is_contiguous() else None, stores="y",
        moved=32 * rows + copied * (not x.is_contiguous()),
    )
    with watched(lambda *_: None):
        answer.softmax(replace(case, seed=case.seed + 3).tensors()[0], 2 * case.scale)
    large = (right * dy.double()).nan_to_num().abs().max().item() * case.scale
    traced_call(
        "backward half", backward, {"y": made["y"].detach(), "dy": dy}, {"dx": exact.grad},
        slack=slack, scale={"dx": large}, beside=8, stores=["dx"],
        loads={"y": 1, "dy": 1} if dy.is_contiguous() else None,
        moved=32 * rows + copied * (not dy.is_contiguous()),
    )


def softmax_again(answer, seed: int) -> list:
    """x is made in the call, so what keeps it is seen."""
    leaf = torch.zeros((), requires_grad=True)
    return [answer.softmax(fractions(seed, 9, 3000).float() + leaf, 0.5)]


def softmax_launch(answer, rows: int, d: int) -> list[Launch]:
    dtype = torch.float16 if rows * d > 2**31 else torch.float32
    x, dy = (torch.empty(rows, d, device="meta", dtype=dtype) for _ in range(2))
    x.requires_grad_()
    return dry(lambda: torch.autograd.grad(answer.softmax(x, 0.5), x, dy), right=2,
               moved=32 * rows)


SOFTMAX = KernelContract(
    scores, softmax_values, softmax_again, softmax_launch, far=(2**31 // LONG + 1000, LONG),
    shapes=rows_to_compile,
    says=lambda _: "y and dx equal PyTorch's in fp64, in fp32 and fp16, for rows of any length, "
    "large\nnumbers, masked places, and gradients whose numbers are not neighbours; forward 8 "
    "and\nbackward 12 bytes a number (fp32), one launch each; y alone is kept in between; for "
    "an\nH100 loads and stores of rows from 128 numbers on have 128 bits, and registers suffice.",
)

# ---- d: residual and RMSNorm, by its bytes

GOAL = 18.0  # bytes a number
COUNTED = 3 * SMS  # rows


@dataclass(frozen=True)
class Residual:
    """rows of d numbers about `size`; spoilt: two rows have a NaN."""

    rows: int
    d: int
    eps: float = 1e-5
    size: float = 1.0
    seed: int = 0
    spoilt: bool = False

    def __str__(self) -> str:
        return f"{self.rows:,} rows of {self.d}"


def residuals(trial: Trial) -> list[Residual]:
    draw = trial.draw
    sizes = [  # the rows that are counted come last
        (draw.randrange(2, 9), draw.randrange(65, 500)), (draw.randrange(SMS + 1, SMS + 20), 1),
        (1, draw.randrange(2**13 + 1, 2**14)), (draw.randrange(2, 9), 2 ** draw.randrange(3, 9)),
        (draw.randrange(COUNTED + 5, 600), draw.randrange(5, 40)),
        (COUNTED, draw.randrange(65, 99)),
    ]
    return [
        Residual(rows, d, draw.choice((1e-2, 0.3)) if number == 0 else draw.choice((1e-5, 1e-2)),
                 draw.choice((0.1, 1.0)), trial.new_seed(), spoilt=number == 4)
        for number, (rows, d) in enumerate(sizes)
    ]


def norm_values(answer, case: Residual) -> float:
    """Bytes a number."""
    answer, rows = interpreted(answer), case.rows
    x, residual = (fractions(case.seed + i, rows, case.d).float() * case.size for i in (0, 1))
    weight = fractions(case.seed + 2, case.d).float()
    if case.spoilt:  # one of the two has a later row in its program
        x[[case.seed % SMS, case.seed % SMS + 2], case.seed % case.d] = torch.nan
    h = x.double() + residual.double()
    y = h / (h.square().mean(-1, keepdim=True) + case.eps).sqrt() * weight

    def call() -> dict:
        results = answer.add_norm(x, residual, weight, case.eps)
        if not isinstance(results, tuple | list) or len(results) != 2:
            raise Wrong(f"add_norm returns {type(results).__name__}, not (y, h).")
        return dict(zip("yh", results))

    given = {"x": x, "residual": residual, "weight": weight}
    _, traced = traced_call("a call", call, given, {"h": h, "y": y}, slack=64, moved=20 * x.numel())
    enough(traced.storing, rows)
    found = (traced.traffic + traced.moved) / x.numel()
    if rows == COUNTED and found > GOAL:
        raise Wrong(
            f"values are right, and {rows} rows take {found:.2f} bytes a number; the goal is "
            f"{GOAL:g}.\nA row for each program takes 20. Which of its loads is the same in all "
            "programs?"
        )
    return found


def enough(programs: int, rows: int) -> None:
    if programs < min(rows, SMS):
        raise Wrong(
            f"{programs} programs have one of {rows:,} rows, and an H100 has {SMS} SMs: some of "
            "them have nothing to do."
        )


def norm_again(answer, seed: int) -> list:
    x, weight = fractions(seed, 5, 300).float(), torch.ones(300)
    return [*answer.add_norm(x, x, weight, 1e-5)]


def norm_launch(answer, rows: int, d: int) -> list[Launch]:
    x, residual = (torch.empty(rows, d, device="meta") for _ in range(2))
    launches = dry(lambda: answer.add_norm(x, residual, torch.empty(d, device="meta"), 1e-5))
    enough(launches[0].programs, rows)
    return launches


NORM = KernelContract(
    residuals, norm_values, norm_again, norm_launch, far=(2**31 // LONG + 1000, LONG), walk=10**4,
    shapes=rows_to_compile, library=(*LIBRARY, "rms_norm"),
    says=lambda found: f"y and h are right for rows of any length, and {COUNTED} rows take "
    f"{found:.2f} bytes a number\n(the goal was {GOAL:g}), with a program for each of {SMS} SMs; "
    "for an H100 loads and stores of\nrows from 128 numbers on have 128 bits, and registers "
    "suffice.",
)


def count(path: str | Path, d: int = 96) -> float:
    """Bytes a number of the answer in the file, for 396 rows of d."""
    return Trial(path).alone(f"{COUNTED} rows", norm_values, Residual(COUNTED, d), seconds=COMPILES)


def machine_code(path: str | Path) -> dict:
    """What an H100 would execute for 4,096 rows of 4,096 numbers."""
    return Trial(path).alone("an H100", _on_an_h100, seconds=COMPILES)


def _on_an_h100(answer) -> dict:
    from utils.kernels import occupancy

    (found,) = code(answer, norm_launch, (ROWS, 4096))
    held = occupancy(found)
    return {
        "registers": found.registers, "warps": found.threads // 32, "programs an SM": held.programs,
        "occupancy": held.share, "loads": found.loads, "stores": found.stores,
    }


add, clipped_adamw, softmax, fused_norm = ADD.judge, CLIPPED.judge, SOFTMAX.judge, NORM.judge
