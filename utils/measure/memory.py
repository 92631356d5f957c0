"""What memory holds at every moment of a training step: exact bytes of each kind.

    with Memory(model=model, optimizer=optimizer) as memory:
        with memory.phase("forward"):
            loss = cross_entropy(model(x), y)
        with memory.phase("backward"):
            loss.backward()
        with memory.phase("optimizer"):
            optimizer.step()
    memory.now()            # {"parameters": 3473408, "gradients": …} right now
    memory.peak             # the same when the total is largest; memory.peak_bytes is the total
    memory.phases           # {"forward": {…}, …}: the same at each phase's own peak
    memory.timeline         # [("forward", {…}), …]: one entry per change
    print(memory)           # a table of the phases
    Memory(model, limit=40_000_000)             # raises MemoryError past 40 MB

The kinds; the first that fits counts:

    parameters      the model's parameters and buffers, gathered ones included
    gradients       a parameter's `.grad`, from the moment it is computed
    optimizer       the optimizer's state, and parameters only it has (master weights)
    communication   passed to a collective, and no activation: buckets, gathered shards
    activations     made outside the backward pass (or recomputed in it) and read by it, or not
                    yet read because the backward pass has not run
    temporary       the rest: freed before the backward pass, or gradients in flight

Method. A `TorchDispatchMode` sees every operator, including those of the backward pass, and tracks
the storages (not the tensors: views share one) of its inputs and outputs. A weak reference reports
when a storage dies, and its size is read again where a library resizes it (FSDP). The use of a
storage is often known only later, so the kinds are determined when you ask, and `now()` in the
middle of a step can only guess: buckets that DDP has just rebuilt count as activations until they
are sent.

Error. The sums over tensors are exact. Two things are missed: memory that an operator allocates and
frees internally (workspaces of matrix products or attention; on CUDA `unseen()` returns the bytes
that the allocator has handed out in addition), and storages that existed before and that no
operator has touched. CUDA's allocator rounds each tensor up to 512 B. Tensors on other devices and
in memory-mapped files do not count. Of compiled code only inputs and outputs are seen. The mode
costs a few microseconds per operator: measure time in another run.

Limit. On a CPU this is the exact one: the operator whose result takes the sum past it raises, at
the same byte on every machine. System limits (RLIMIT_DATA, cgroups) also count stacks and arenas,
and cannot tell the kinds apart. On a GPU, the allocator has a limit of its own,
`torch.cuda.set_per_process_memory_fraction`.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.modules.module import register_module_forward_hook

from utils.measure.traffic import FAMILIES, Watching, plain_tensors, tensors_in
from utils.private_api import running_backward

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication")
OWNED = KINDS[:3]  # known by what refers to them; the first wins


@dataclass(slots=True, eq=False)
class _Held:
    """One storage: its size and what is known about its use."""

    storage: weakref.ref
    size: int  # bytes now; 0 when it has died
    from_forward: bool  # made outside the backward pass and the optimizer's step, or recomputed
    owner: str = ""  # one of OWNED
    read: bool = False  # by the backward pass
    differentiable: bool = False  # an operator's input that requires a gradient
    sent: bool = False  # passed to a collective
    birth: int = 0  # number of backward passes begun before it

    def kind(self, backwards: int) -> str:
        if self.owner:
            return self.owner
        if self.sent and not self.differentiable:
            return "communication"
        waits = self.size > 0 and self.birth == backwards  # no backward pass since
        return "activations" if self.from_forward and (self.read or waits) else "temporary"


@dataclass
class Memory:
    """Tracks what `device` holds inside `with`. `model` and `optimizer` may be left out.

    model      any module, wrapped by DDP or FSDP or not
    optimizer  anything with `param_groups` and `state`, or several of them as its `parts`
    device     "cpu", "cuda" …; None: where the model's parameters are, else torch's default
    limit      bytes; an operator that exceeds it raises MemoryError with the bytes by kind
    """

    model: torch.nn.Module | None = None
    optimizer: object = None
    device: str | torch.device | None = None
    limit: float = math.inf
    _live: dict = field(default_factory=dict, repr=False)  # id of a storage -> _Held
    _log: list = field(default_factory=list, repr=False)  # (phase, _Held, change in bytes)
    _phase: str = field(default="", repr=False)

    def __post_init__(self):
        if self.device is None:
            first = next(iter(self._parameters()), None)
            self.device = torch.get_default_device() if first is None else first.device
        self.device = torch.empty(0, device=self.device).device  # "cuda" -> "cuda:0"
        self._recording = self._stepping = False
        self._bytes = 0
        self._task, self._backwards = -1, 0
        self._resizable, self._hooked = {}, {}

    def __enter__(self):
        if self._log:
            raise RuntimeError("this Memory has already recorded: make a new one for each `with`")
        with contextlib.ExitStack() as stack:
            self._recording = True
            stack.callback(setattr, self, "_recording", False)
            self._modules = set(self.model.modules()) if self.model is not None else set()
            if self._modules:  # FSDP's gathered parameters exist only during the forward pass
                stack.callback(register_module_forward_hook(self._after_forward).remove)
            for part in self._optimizers():
                if hasattr(part, "register_step_pre_hook"):
                    stack.callback(part.register_step_pre_hook(self._before_step).remove)
                    stack.callback(part.register_step_post_hook(self._after_step).remove)
            stack.callback(self._unhook)
            self._look()
            stack.callback(self._look)
            stack.enter_context(Watching(self._saw))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception):
        return self._stack.__exit__(*exception)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator["Memory"]:
        """Everything inside belongs to the phase `name`; equal names form one phase."""
        self._look()
        before, self._phase = self._phase, name
        try:
            yield self
        finally:
            self._look()
            self._phase = before

    # ---- the results

    def now(self) -> dict[str, int]:
        """{kind: bytes} at this moment; after the `with`, at its end."""
        self._look()
        held = dict.fromkeys(KINDS, 0)
        for record in self._live.values():
            held[record.kind(self._backwards)] += record.size
        return held

    @property
    def timeline(self) -> list[tuple[str, dict[str, int]]]:
        """[(phase, {kind: bytes})]: the bytes held after each change, from the beginning."""
        self._look()
        held, rows = dict.fromkeys(KINDS, 0), []
        for phase, record, change in self._log:
            held[record.kind(self._backwards)] += change
            rows.append((phase, dict(held)))
        return rows

    @property
    def peak(self) -> dict[str, int]:
        """{kind: bytes} at the moment of the largest total."""
        return max((held for _, held in self.timeline), key=_total, default=dict.fromkeys(KINDS, 0))

    @property
    def peak_bytes(self) -> int:
        """The largest total, in bytes."""
        return _total(self.peak)

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """{phase: {kind: bytes}} at the moment of each phase's own largest total."""
        peaks = {}
        for phase, held in self.timeline:
            if phase and _total(held) >= _total(peaks.get(phase, {})):
                peaks[phase] = held
        return peaks

    def unseen(self) -> int:
        """CUDA: bytes requested from the allocator beyond those tracked here; otherwise 0."""
        if self.device.type != "cuda":
            return 0
        asked = torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
        return asked - _total(self.now())

    def __str__(self):
        lines = [f"{'bytes at the peak of':<22}" + "".join(f"{kind:>15}" for kind in KINDS)]
        for phase, held in {**self.phases, "everything": self.peak}.items():
            lines.append(f"{phase:<22}" + "".join(f"{held[kind]:>15,}" for kind in KINDS))
        return "\n".join(lines)

    # ---- which objects own a storage

    def _optimizers(self):
        return getattr(self.optimizer, "parts", [self.optimizer] if self.optimizer else [])

    def _parameters(self):
        if self.model is not None:
            yield from self.model.parameters()
            yield from self.model.buffers()

    def _look(self):
        """Note which storages now belong to the model, its gradients and the optimizer."""
        if not self._recording:
            return
        for parameter in self._parameters():
            self._own_parameter(parameter, "parameters")
        for part in self._optimizers():
            for group in part.param_groups:
                for parameter in group["params"]:
                    self._own_parameter(parameter, "optimizer")
            for state in list(getattr(part, "state", {}).values()):
                for tensor in tensors_in(state):
                    self._own(tensor, "optimizer")
        self._measure_again()

    def _own_parameter(self, parameter, owner):
        self._own(parameter, owner)
        if parameter.is_leaf and parameter.requires_grad:
            self._own(parameter.grad, "gradients")
            known = self._hooked.get(id(parameter))
            if known is None or known[0]() is not parameter:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_ready)
                self._hooked[id(parameter)] = (weakref.ref(parameter), hook)

    def _own(self, tensor, owner):
        for plain in plain_tensors(tensor):
            record = self._held(plain)
            if record is None:
                continue
            if not record.owner or OWNED.index(owner) < OWNED.index(record.owner):
                record.owner = owner
            if owner != "optimizer":
                self._resizable[id(record)] = record

    def _unhook(self):
        for _, hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()

    def _gradient_ready(self, parameter):
        self._own(parameter.grad, "gradients")

    def _after_forward(self, module, inputs, output):
        """Run before a module's own hooks, as global hooks do: the unit is still gathered here."""
        if module in self._modules:
            for parameter in module.parameters(recurse=False):
                self._own_parameter(parameter, "parameters")

    def _before_step(self, *_):
        self._stepping = True

    def _after_step(self, *_):
        self._stepping = False
        self._look()

    # ---- operators

    def _saw(self, func, tensors, outputs):
        """Note an operator's input or output tensors."""
        task = running_backward()
        if task not in (-1, self._task):
            self._task, self._backwards = task, self._backwards + 1
        grad = torch.is_grad_enabled()
        forward = (task == -1 or grad) and not self._stepping  # the second case: recomputation
        touched = []
        for tensor in tensors_in(tensors):
            record = self._held(tensor, forward)
            if record is None:
                continue
            touched.append(record)
            if func.namespace in FAMILIES:
                record.sent = True
                self._resizable[id(record)] = record
            elif forward:
                record.from_forward |= task != -1
                record.differentiable |= not outputs and grad and tensor.requires_grad
            elif not outputs:
                record.read |= task != -1
        # between two operators a library may resize anything; an operator resizes only its output
        if outputs:
            self._measure_again(record for record in touched if id(record) in self._resizable)
            if self._bytes > self.limit:
                raise MemoryError(self._past_limit())
        else:
            self._measure_again()

    def _past_limit(self):
        kinds = sorted(self.now().items(), key=lambda kind: -kind[1])
        held = ", ".join(f"{kind} {size / 1e6:.2f}" for kind, size in kinds if size)
        return f"holds {self._bytes / 1e6:.2f} MB, and may hold {self.limit / 1e6:.2f}: {held}"

    def _held(self, tensor, forward=False):
        """The record of a tensor's storage, created at first sight; None: not counted."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse or opaque: no storage to track
            return None
        if storage.device != self.device:  # a fake tensor's is "meta"
            return None
        key = id(storage)  # the same object as long as the storage lives
        record = self._live.get(key)
        if record is not None:
            return record
        if storage.filename is not None:  # memory-mapped: the bytes are in a file
            return None
        record = _Held(None, 0, forward, birth=self._backwards)
        record.storage = weakref.ref(storage, lambda _: self._died(key))
        self._live[key] = record
        self._change(record, storage.nbytes())
        return record

    def _measure_again(self, records=None):
        for record in list(self._resizable.values()) if records is None else records:
            storage = record.storage()
            if storage is None:
                del self._resizable[id(record)]
            elif storage.nbytes() != record.size:
                self._change(record, storage.nbytes())

    def _died(self, key):
        if self._recording:
            self._change(self._live.pop(key), 0)

    def _change(self, record, size):
        if size != record.size:
            self._log.append((self._phase, record, size - record.size))
            self._bytes += size - record.size
            record.size = size


def _total(held: dict[str, int]) -> int:
    return sum(held.values())
