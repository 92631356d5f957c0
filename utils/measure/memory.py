"""What memory holds at every moment of a training step, by kind, to the byte.

    with Memory(model=model, optimizer=optimizer) as memory:
        with memory.phase("forward"):
            loss = cross_entropy(model(x), y)
        with memory.phase("backward"):
            loss.backward()
        with memory.phase("optimizer"):
            optimizer.step()
    memory.now()            # {"parameters": 3473408, "gradients": …} at this moment
    memory.peak             # the same at the moment of the largest total; memory.peak_bytes its sum
    memory.phases           # {"forward": {…}, …}: the same at each phase's own peak
    memory.timeline         # [("forward", {…}), …]: one entry per change
    print(memory)           # a table of the phases
    Memory(model, limit=40_000_000)             # ends with MemoryError past 40 MB

The kinds, the first that fits:

    parameters      what the model calls its parameters and buffers, gathered ones included
    gradients       what a parameter's `.grad` points to, from the moment it is computed
    optimizer       what the optimizer keeps, and parameters that only it knows (master weights)
    communication   what is handed to a collective and is no activation: buckets, gathered shards
    activations     made outside of the backward pass (or recomputed in it) and read by it, or not
                    yet read because the backward pass has not run
    temporary       the rest: what dies before the backward pass, gradients on their way

Method. A `TorchDispatchMode` sees every operator, also those of the backward pass, and follows the
storages (not the tensors: views share one) of what goes in and comes out. A weak reference tells
the moment at which a storage dies, and its size is read again where a library resizes it (FSDP).
What something was for is often known only later, so the kinds are worked out when you ask, and
`now()` in the middle of a step can only guess: buckets that DDP has just made anew count as
activations until they are sent.

Error. The sums are those of the tensors, exactly. Not seen is what an operator allocates and frees
inside (workspaces of matrix products or of attention: on CUDA `unseen()` tells how many bytes the
allocator has handed out besides), and what existed before and no operator has touched. CUDA's
allocator rounds each tensor up to 512 B. Tensors on other devices and in memory-mapped files do not
count. Of compiled code only what goes in and comes out is seen. The mode costs some microseconds an
operator: measure time in another run.

Limit. On a CPU it is the sharp one: the operator whose result takes the sum past it raises, at the
same byte on every machine. Limits of the system (RLIMIT_DATA, cgroups) count stacks and arenas too,
and know no kinds. On a GPU `torch.cuda.set_per_process_memory_fraction` is the allocator's own.
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
OWNED = KINDS[:3]  # known by who points to them; the first wins


@dataclass(slots=True, eq=False)
class _Held:
    """One storage: its size, and what is known about its use."""

    storage: weakref.ref
    size: int  # bytes now; 0 when it has died
    from_forward: bool  # made outside of the backward pass and of the optimizer's step, or again
    owner: str = ""  # one of OWNED
    read: bool = False  # by the backward pass
    differentiable: bool = False  # an operator's input whose gradient is asked for
    sent: bool = False  # handed to a collective
    birth: int = 0  # backward passes that had begun before

    def kind(self, backwards: int) -> str:
        if self.owner:
            return self.owner
        if self.sent and not self.differentiable:
            return "communication"
        waits = self.size > 0 and self.birth == backwards  # no backward pass has come since
        return "activations" if self.from_forward and (self.read or waits) else "temporary"


@dataclass
class Memory:
    """Follows what `device` holds inside `with`. `model` and `optimizer` may be left out.

    model      any module, also wrapped by DDP or FSDP
    optimizer  anything with `param_groups` and `state`, or several of them as its `parts`
    device     "cpu", "cuda" …; None: where the model's parameters are, else torch's default
    limit      bytes; an operator that takes what is held past it raises MemoryError, by kind
    """

    model: torch.nn.Module | None = None
    optimizer: object = None
    device: str | torch.device | None = None
    limit: float = math.inf
    _live: dict = field(default_factory=dict, repr=False)  # id of a storage -> _Held
    _log: list = field(default_factory=list, repr=False)  # (phase, _Held, bytes more or less)
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
            raise RuntimeError("this Memory has recorded already: make a new one for each `with`")
        with contextlib.ExitStack() as stack:
            self._recording = True
            stack.callback(setattr, self, "_recording", False)
            self._modules = set(self.model.modules()) if self.model is not None else set()
            if self._modules:  # FSDP puts gathered parameters in place only for the forward pass
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
        """Everything inside belongs to the phase `name`; equal names are one phase."""
        self._look()
        before, self._phase = self._phase, name
        try:
            yield self
        finally:
            self._look()
            self._phase = before

    # ---- what you ask

    def now(self) -> dict[str, int]:
        """{kind: bytes} at this moment; after the `with`, at its end."""
        self._look()
        held = dict.fromkeys(KINDS, 0)
        for record in self._live.values():
            held[record.kind(self._backwards)] += record.size
        return held

    @property
    def timeline(self) -> list[tuple[str, dict[str, int]]]:
        """[(phase, {kind: bytes})]: what is held after each change, from the beginning."""
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
        """{phase: {kind: bytes}} at the moment of the phase's own largest total."""
        peaks = {}
        for phase, held in self.timeline:
            if phase and _total(held) >= _total(peaks.get(phase, {})):
                peaks[phase] = held
        return peaks

    def unseen(self) -> int:
        """CUDA: bytes asked of the device's allocator beyond what is followed here; else 0."""
        if self.device.type != "cuda":
            return 0
        asked = torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
        return asked - _total(self.now())

    def __str__(self):
        lines = [f"{'bytes at the peak of':<22}" + "".join(f"{kind:>15}" for kind in KINDS)]
        for phase, held in {**self.phases, "everything": self.peak}.items():
            lines.append(f"{phase:<22}" + "".join(f"{held[kind]:>15,}" for kind in KINDS))
        return "\n".join(lines)

    # ---- who points to what

    def _optimizers(self):
        return getattr(self.optimizer, "parts", [self.optimizer] if self.optimizer else [])

    def _parameters(self):
        if self.model is not None:
            yield from self.model.parameters()
            yield from self.model.buffers()

    def _look(self):
        """Notes which storages belong to the model, its gradients and the optimizer now."""
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
        """A hook of all modules comes before a module's own: a unit is still whole here."""
        if module in self._modules:
            for parameter in module.parameters(recurse=False):
                self._own_parameter(parameter, "parameters")

    def _before_step(self, *_):
        self._stepping = True

    def _after_step(self, *_):
        self._stepping = False
        self._look()

    # ---- what operators do

    def _saw(self, func, tensors, outputs):
        """Notes an operator's input or output tensors."""
        task = running_backward()
        if task not in (-1, self._task):
            self._task, self._backwards = task, self._backwards + 1
        grad = torch.is_grad_enabled()
        forward = (task == -1 or grad) and not self._stepping  # the second: recomputed
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
        # between two operators a library may resize anything, an operator only what comes out
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
        """The record of a tensor's storage, a new one where it is seen first; None: not counted."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse or opaque: there is no storage to follow
            return None
        if storage.device != self.device:  # of a tensor that is only simulated it is "meta"
            return None
        key = id(storage)  # one object as long as the storage lives
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
