"""AdamW's step as one kernel: each value is read once and written once.

    optimizer = AdamWTriton(model.parameters(), lr=3e-4, weight_decay=0.1)
    loss.backward()
    optimizer.step()                       # one launch for all tensors

    adamw_one[(triton.cdiv(n, 1024),)](p, g, m, v, n, *numbers, BLOCK=1024)      # a single tensor

Per fp32 parameter a step reads p, g, m, v and writes p, m, v: 7 · 4 = 28 bytes, and performs about
15 operations. A GPU has time for hundreds of operations per byte, so the bytes are the whole cost.
With bf16 weights and gradients there are two ways:

    a master copy        p 2 (written), g 2, master, m, v 3 · 4 read and written       28 bytes
    stochastic rounding  p 2 read and written, g 2, m, v 2 · 4 read and written        22 bytes

Rounding to nearest loses every update smaller than half the distance to the next bf16 value; the
master keeps it. Stochastic rounding (Gupta et al. 2015, arXiv:1502.02551) keeps it on average.

Loshchilov & Hutter 2017 (arXiv:1711.05101), Algorithm 2, in the order of torch's operations:

    p = p · (1 - lr · weight_decay)
    m = m + (1 - β1) · (g - m)             v = β2 · v + (1 - β2) · g²
    p = p - lr / (1 - β1^t) · m / (√v / √(1 - β2^t) + eps)
"""

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from utils.kernels.language import check_device, tl, to_bf16, to_bf16_stochastic, triton

BLOCK = 1024  # elements per program
WARPS = 4  # 128 threads with 8 elements each: two 128-bit accesses per block of a tensor
STATE = ("exp_avg", "exp_avg_sq")  # torch's names
MASTER = "master_param"
RATES = ("betas", "eps", "weight_decay")  # in the order of `numbers`

# ---- 1. the rule, and one tensor


@triton.jit
def rule(p, g, m, v, decay, rest1, beta2, rest2, step_size, root, eps):
    """AdamW on fp32 values that are already loaded: (p, m, v) after the step.

    decay 1 - lr · weight_decay, rest1 1 - β1, rest2 1 - β2, step_size lr / (1 - β1^t),
    root √(1 - β2^t): computed once, in fp64, by the caller.
    """
    p = p * decay
    m = m + rest1 * (g - m)
    v = v * beta2 + rest2 * g * g
    p = p - step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    return p, m, v


@triton.jit
def adamw_one(
    p_ptr, g_ptr, m_ptr, v_ptr, n, decay, rest1, beta2, rest2, step_size, root, eps,
    BLOCK: tl.constexpr,
):
    """Update one tensor of n fp32 elements in place. Grid: ⌈n / BLOCK⌉ programs."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    p = tl.load(p_ptr + offsets, mask)
    g = tl.load(g_ptr + offsets, mask)
    m = tl.load(m_ptr + offsets, mask)
    v = tl.load(v_ptr + offsets, mask)
    p, m, v = rule(p, g, m, v, decay, rest1, beta2, rest2, step_size, root, eps)
    tl.store(p_ptr + offsets, p, mask)
    tl.store(m_ptr + offsets, m, mask)
    tl.store(v_ptr + offsets, v, mask)


def numbers(
    step: float, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> list[float]:
    """The kernels' scalar arguments, in order, for step t = 1, 2, …"""
    beta1, beta2 = betas
    return [
        1 - lr * weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**step),
        math.sqrt(1 - beta2**step),
        eps,
    ]


# ---- 2. many tensors in one launch

FIELDS = tl.constexpr(7)  # in a row of `table`: size, first program, and five addresses
NUMBERS = tl.constexpr(8)  # in a row of `hyper`: those of `numbers`, and the step


@triton.jit
def pointer(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer for an address from the table. With 16-byte alignment the compiler can move four
    fp32 values with one instruction."""
    found = tl.load(address).to(tl.pointer_type(dtype))
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def adamw_many(
    table, hyper, tensor_of, seed,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):
    """Update many tensors in place: program i works on a block of the tensor `tensor_of[i]`.

    table       (tensors, FIELDS) int64: number of elements, first program, addresses of weights,
                gradients, exp_avg, exp_avg_sq, master
    hyper       (tensors, NUMBERS) fp32: those of `numbers`, and the step
    tensor_of   (programs,) int32
    KIND        "fp32"; for bf16 weights "master" or "stochastic"
    ALIGNED     whether every address and every size is a multiple of 16
    """
    tensor = tl.load(tensor_of + tl.program_id(0)).to(tl.int64)
    row = table + tensor * FIELDS
    n = tl.load(row)
    if ALIGNED:  # then four neighbours share one mask
        n = tl.multiple_of(n, 16)
    offsets = (tl.program_id(0) - tl.load(row + 1)) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n

    weight: tl.constexpr = tl.float32 if KIND == "fp32" else tl.bfloat16
    p_ptr = pointer(row + 2, weight, ALIGNED) + offsets
    g_ptr = pointer(row + 3, weight, ALIGNED) + offsets
    m_ptr = pointer(row + 4, tl.float32, ALIGNED) + offsets
    v_ptr = pointer(row + 5, tl.float32, ALIGNED) + offsets
    if KIND == "master":
        master_ptr = pointer(row + 6, tl.float32, ALIGNED) + offsets
        p = tl.load(master_ptr, mask)
    else:
        p = tl.load(p_ptr, mask).to(tl.float32)
    g = tl.load(g_ptr, mask).to(tl.float32)
    m = tl.load(m_ptr, mask)
    v = tl.load(v_ptr, mask)

    h = hyper + tensor * NUMBERS
    p, m, v = rule(
        p, g, m, v, tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3), tl.load(h + 4),
        tl.load(h + 5), tl.load(h + 6),
    )

    tl.store(m_ptr, m, mask)
    tl.store(v_ptr, v, mask)
    if KIND == "fp32":
        tl.store(p_ptr, p, mask)
    elif KIND == "master":
        tl.store(master_ptr, p, mask)
        tl.store(p_ptr, to_bf16(p), mask)
    else:
        # An element's position, its tensor and the step determine its random bits, by Philox: 7
        # rounds are enough (Salmon et al. 2011, "Parallel random numbers", Table 2).
        low = offsets.to(tl.uint32)
        high = (offsets >> 32).to(tl.uint32)
        step = tl.load(h + 7).to(tl.uint32)
        random, _, _, _ = tl.philox(seed, low, high, step, tensor.to(tl.uint32), 7)
        tl.store(p_ptr, to_bf16_stochastic(p, random), mask)


# ---- 3. the optimizer

LEFT_OUT = ("amsgrad", "maximize", "foreach", "capturable", "differentiable")


class AdamWTriton(torch.optim.Optimizer):
    """AdamW whose step is one launch for all tensors of a type, in place.

    Its state has torch's names (step, exp_avg, exp_avg_sq), in fp32, so that a state_dict of
    torch.optim.AdamW can be continued here and vice versa. For bf16 weights, with bf16 gradients,
    there is also the fp32 `master_param`, unless `stochastic_rounding` is set: then weights are
    randomly rounded up or down, depending on `seed`, the step and the element's position. Tensors
    whose address or size is not a multiple of 16 get a separate launch.

    params   tensors or groups: fp32 or bf16, contiguous, all on one device; for a DTensor the local
             shard is updated. Parameters without a gradient are skipped
    lr, betas, eps, weight_decay   as in torch.optim.AdamW; the decay is decoupled

    Raises ValueError with one sentence for everything unsupported: `LEFT_OUT`, other types and
    layouts, several devices, or the CPU without TRITON_INTERPRET=1.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **left_out: Any,
    ):
        _refuse_left_out(left_out)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "stochastic_rounding": stochastic_rounding})
        self.seed = seed

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        try:
            self._check()
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self):
        """Check all groups, of which the last is new."""
        _check_group(self.param_groups[-1])
        devices = {p.device for group in self.param_groups for p in group["params"]}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ValueError(
                f"the parameters are on {names}, but a launch uses one device: make one optimizer "
                "per device"
            )
        for device in devices:
            check_device(device, "torch.optim.AdamW")

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        launches, stepped = {}, []
        for group in self.param_groups:
            known = {}  # most tensors of a group are at the same step
            for parameter in group["params"]:
                if parameter.grad is not None:
                    kind, row = self._row(parameter, group, known)
                    stepped.append(parameter)
                    if row[0][0]:  # an empty tensor needs no step
                        launches.setdefault(kind, []).append(row)
        torch.autograd.graph.increment_version(stepped)  # autograd does not see the kernel
        for (kind, aligned), rows in launches.items():
            self._launch(kind, aligned, rows)
        return loss

    def _row(self, parameter, group, known):
        """((kind, aligned), (table row, scalars, device)) of a tensor; counts its step."""
        weight, gradient = _local(parameter), _local(parameter.grad)
        _check_gradient(weight, gradient)
        state = self._state_of(parameter, group)
        step = state["step"].item() + 1
        state["step"].fill_(step)
        names = [*STATE, MASTER] if MASTER in state else STATE
        tensors = [weight, gradient, *(_local(state[name]) for name in names)]
        for name, tensor in zip(names, tensors[2:]):
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous fp32: load it with load_state_dict")
        n, addresses = weight.numel(), [tensor.data_ptr() for tensor in tensors]
        aligned = math.gcd(16, n, *addresses) == 16
        kind = "fp32"
        if weight.dtype == torch.bfloat16:
            kind = "master" if MASTER in state else "stochastic"
        if step not in known:
            lr, rest = float(group["lr"]), [group[name] for name in RATES]
            known[step] = [*numbers(step, lr, *rest), step]
        return (kind, aligned), ((n, *addresses), known[step], weight.device)

    def _state_of(self, parameter, group):
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        if state["step"].device.type != "cpu":  # a checkpoint may have put it on the GPU
            state["step"] = state["step"].cpu()
        for name in STATE:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        wants_master = parameter.dtype == torch.bfloat16 and not group["stochastic_rounding"]
        if wants_master and MASTER not in state:
            state[MASTER] = parameter.detach().float()
        elif not wants_master:
            state.pop(MASTER, None)
        return state

    def _launch(self, kind, aligned, rows):
        tensors, hyper, (device, *_) = zip(*rows)
        programs = tuple([-(-n // BLOCK) for n, *_ in tensors])
        on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with on:
            adamw_many[(sum(programs),)](
                _table(tensors, programs, device),
                _put(hyper, torch.float32, device),
                _tensor_of(programs, device),
                self.seed,
                KIND=kind,
                ALIGNED=aligned,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state_dict of this class or of torch.optim.AdamW."""
        for group in state_dict["param_groups"]:
            _refuse_left_out({name: group.get(name) for name in ("amsgrad", "maximize")})
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            group.setdefault("stochastic_rounding", self.defaults["stochastic_rounding"])
        # torch has rounded the state to the type of the weights; ours is fp32
        saved = itertools.chain.from_iterable(g["params"] for g in state_dict["param_groups"])
        mine = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(saved, mine):
            for name, value in state_dict["state"].get(number, {}).items():
                if name in (*STATE, MASTER):
                    value = value.to(parameter.device, torch.float32, copy=True)
                    self.state[parameter][name] = value


def _refuse_left_out(options):
    for name, value in options.items():
        if name not in LEFT_OUT:
            raise TypeError(f"AdamWTriton has no option {name}")
        if value:
            raise ValueError(f"AdamWTriton leaves {name} out: take torch.optim.AdamW({name}=True)")


def _check_group(group):
    """Raise ValueError for numbers that make no sense and tensors that the kernel cannot step."""
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"{name} {group[name]} must be 0 or more")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas {tuple(group['betas'])} must be from 0 to below 1")
    _refuse_left_out({name: group.get(name) for name in LEFT_OUT})
    for parameter in group["params"]:
        shape = f"a parameter of shape {tuple(parameter.shape)}"
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{shape} is {parameter.dtype}: the kernel supports fp32 and bf16")
        if parameter.layout != torch.strided:
            raise ValueError(f"{shape} is {parameter.layout}: the kernel supports dense tensors")
        if not _local(parameter).is_contiguous():
            raise ValueError(
                f"{shape} is not contiguous, and the kernel would write outside it: make it from "
                ".contiguous()"
            )


def _check_gradient(weight, gradient):
    shape = f"the gradient of a parameter of shape {tuple(weight.shape)}"
    if gradient.layout != torch.strided:
        raise ValueError(f"{shape} is {gradient.layout}: the kernel supports dense tensors")
    if gradient.dtype != weight.dtype:
        raise ValueError(f"{shape} is {gradient.dtype}, but the kernel needs {weight.dtype}")
    if gradient.device != weight.device:
        raise ValueError(f"{shape} is on {gradient.device}, the parameter on {weight.device}")
    if not gradient.is_contiguous() or not weight.is_contiguous():
        raise ValueError(f"{shape}, or the parameter, is not contiguous: call .contiguous() on it")


def _local(tensor):
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _put(rows, dtype, device):
    """Rows as a tensor on the device, without waiting for the copy."""
    pinned = device.type == "cuda"
    return torch.tensor(rows, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)


@lru_cache(maxsize=16)
def _table(tensors, programs, device):
    """The table of a launch. Usually the addresses are those of the previous step, and the table is
    already on the device.

    tensors   (size, address of the weights, of the gradients, …) of each;   programs   of each
    """
    first = itertools.accumulate([0, *programs])
    rows = [[n, start, *addresses] for (n, *addresses), start in zip(tensors, first)]
    return _put([row + [0] * (FIELDS.value - len(row)) for row in rows], torch.int64, device)


@lru_cache(maxsize=16)
def _tensor_of(programs, device):
    """The index of each program's tensor: (sum of programs,) int32."""
    counts = torch.tensor(programs, device=device)
    return torch.repeat_interleave(torch.arange(len(programs), device=device), counts).int()
