"""Offloading: tensors leave the device's memory while they are not needed, and come back.

    with offloaded_activations() as moved:          # around the forward pass only
        loss = cross_entropy(model(x), y)
    loss.backward()                                 # they come back one by one
    moved.bytes, moved.tensors                      # what moved out

    optimizer = OffloadedOptimizer(torch.optim.AdamW, model.parameters())
    loss.backward()
    optimizer.step()                                # fp32 weights and state are never on the device

On CUDA "out" means pinned host memory, and copies run on a separate stream: activations overlap
with the computation, gradients with the host's step for earlier ones. On a CPU "out" means a file,
in the system's folder for temporary files or in `folder`.
Sources: Rhu et al. 2016 (vDNN, arXiv:1602.08124) for activations, Ren et al. 2021 (ZeRO-Offload,
arXiv:2101.06840) for the optimizer.
"""

import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from utils.memory.precision import master_of
from utils.private_api import is_traceable_wrapper_subclass, version

PREFETCHED = 2  # CUDA: number of tensors fetched ahead of their use


# ---- 1. activations


class Moved:
    """The amount that one forward pass has moved out."""

    def __init__(self):
        self.bytes = 0
        self.tensors = 0


@contextmanager
def offloaded_activations(min_bytes: int = 4096, folder: str | None = None) -> Iterator[Moved]:
    """Move the tensors that autograd saves inside `with` out; they return when the backward pass
    reads them.

    min_bytes  smaller storages stay, because a copy would cost more than it saves
    folder     CPU: folder of the file; None: the system's folder for temporary files

    Yields a `Moved`. Parameters stay. A storage that is saved several times moves out once. Works
    together with recomputation, in which case the layers' inputs move out. Raises RuntimeError in
    the backward pass for a tensor that stayed and was changed in place after it was saved.
    """
    moved, stores, sent = Moved(), {}, {}

    def pack(tensor):
        if is_traceable_wrapper_subclass(tensor):  # a DTensor: its shards are not ours to move
            return tensor, version(tensor)
        base = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        if isinstance(master_of(base), torch.nn.Parameter) or storage.nbytes() < min_bytes:
            return tensor, version(tensor)
        # ids are reused after a storage's death; the weak reference detects that
        known, when, away = sent.get(id(storage), (lambda: None, None, lambda: None))
        parcel = away()
        if known() is not storage or when != version(tensor) or parcel is None:
            store = stores.get(tensor.device)
            if store is None:
                kind = _Pinned if tensor.device.type == "cuda" else _File
                store = stores[tensor.device] = kind(tensor.device, folder)
            parcel = _Parcel(store, storage)
            sent[id(storage)] = (weakref.ref(storage), version(tensor), weakref.ref(parcel))
            moved.bytes += storage.nbytes()
            moved.tensors += 1
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        return parcel, layout

    def unpack(packed):
        kept, note = packed
        if isinstance(kept, _Parcel):
            # grad mode tells dispatch modes that this is an activation again, not a gradient
            with torch.enable_grad():
                dtype, shape, stride, offset = note
                return kept.open().view(dtype).as_strided(shape, stride, offset)
        if version(kept) != note:
            raise RuntimeError(
                f"a saved tensor of shape {tuple(kept.shape)} was changed in place before the "
                "backward pass read it: use an out-of-place operation"
            )
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield moved


class _Parcel:
    """One storage that moved out. If opened again while still in use, it is not fetched again."""

    def __init__(self, store, storage):
        self.store = store
        self.place = store.send(self, storage)
        self.opened = lambda: None

    def open(self):
        storage = self.opened()
        if storage is not None:
            return _bytes_of(storage)
        flat = self.store.fetch(self, self.place)
        self.opened = weakref.ref(flat.untyped_storage())
        return flat


def _bytes_of(storage):
    """A storage as a flat tensor of bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _File:
    """An unnamed file, which disappears when it is no longer needed."""

    def __init__(self, device, folder):
        self.folder = folder
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (lives as long as its parcels)
        self.end = 0

    def send(self, parcel, storage):
        start, self.end = self.end, self.end + storage.nbytes()
        view = memoryview(_bytes_of(storage).numpy())
        with _room(self.folder, storage.nbytes()):
            while len(view):  # a write may be partial
                view = view[os.pwrite(self.file.fileno(), view, self.end - len(view)) :]
        return start, self.end - start

    def fetch(self, parcel, place):
        start, size = place
        flat = torch.empty(size, dtype=torch.uint8)
        view = memoryview(flat.numpy())
        while len(view):
            read = os.preadv(self.file.fileno(), [view], start + size - len(view))
            if read == 0:
                raise OSError("the file of offloaded activations is too short")
            view = view[read:]
        return flat


class _Pinned:
    """Pinned host memory. Copies run on a separate stream; the next ones are prefetched."""

    def __init__(self, device, folder):
        self.stream = torch.cuda.Stream(device)
        self.device = device
        self.out = OrderedDict()  # id of a parcel -> weak reference, in the order of sending
        self.ahead = {}  # id of a parcel -> (its bytes on the device, event)

    def send(self, parcel, storage):
        flat = _bytes_of(storage)
        host = torch.empty(flat.shape, dtype=torch.uint8, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(flat, non_blocking=True)
        flat.record_stream(self.stream)  # the allocator must not reuse it before it is copied
        key = id(parcel)
        self.out[key] = weakref.ref(parcel, lambda _: self._forget(key))
        return host

    def fetch(self, parcel, host):
        self._start(id(parcel), host)
        flat, event = self.ahead.pop(id(parcel))
        before = list(self.out)[: list(self.out).index(id(parcel))]
        for key in before[: -PREFETCHED - 1 : -1]:  # the backward pass reads them in reverse
            other = self.out[key]()
            if other is not None and other.opened() is None:
                self._start(key, other.place)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        flat.record_stream(current)
        return flat

    def _start(self, key, host):
        if key in self.ahead:
            return
        with torch.cuda.stream(self.stream):  # after the copies out, because it is the same stream
            flat = host.to(self.device, non_blocking=True)
            self.ahead[key] = (flat, self.stream.record_event())

    def _forget(self, key):
        self.out.pop(key, None)
        self.ahead.pop(key, None)


# ---- 2. the optimizer


class OffloadedOptimizer:
    """An optimizer whose full-precision weights and state are in host memory or in files.

    make        called with the list of master tensors (fp32; fp64 for fp64 parameters), in the
                order of `parameters`; returns an optimizer, or several as its `parts`
    parameters  of the model, on any device, of any floating type; of a DTensor, the local shard
    folder      CPU: folder of the files; None: the system's folder for temporary files
    together    bytes of master weights that are stepped at once (at least one parameter)

    Clip and unscale gradients on the model's own parameters, before `step`. `param_groups` and
    `state` are the inner optimizer's: their keys are the masters. Parameters without a gradient are
    left alone. After loading the parameters from elsewhere, call `refresh`.
    """

    def __init__(
        self,
        make: Callable[[list[torch.Tensor]], Any],
        parameters: Iterable[torch.nn.Parameter],
        folder: str | None = None,
        together: int = 2**25,
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self.device = _local(self.parameters[0]).device
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._folder, self._together = folder, together
        self.masters = []
        for parameter in self.parameters:
            value = _local(parameter.detach())
            master = self._outside(value, torch.promote_types(value.dtype, torch.float32))
            self.masters.append(master.requires_grad_())
        self.inner = make(self.masters)

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        return getattr(self.inner, "parts", [self.inner])

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[torch.Tensor, dict]:
        return {master: kept for part in self.parts for master, kept in part.state.items()}

    @torch.no_grad()
    def step(self) -> None:
        """Move gradients out, step the inner optimizer there, bring the new values back.

        On CUDA all three overlap, each for a different bunch, and use all cores of the host.
        Gradients cannot move earlier, because clipping needs the norm of all of them.
        """
        with self._host_threads():
            for bunch, gradients in self._arrived():
                for (_, master), gradient in zip(bunch, gradients, strict=True):
                    master.grad = gradient
                for part in self.parts:  # it skips masters without a gradient
                    part.step()
                with self._beside():
                    for parameter, master in bunch:
                        master.grad = None
                        _local(parameter).copy_(master, non_blocking=True)
                for _, master in bunch:
                    self._put_out(master)
        if self.stream:
            self.stream.synchronize()  # the next step writes the masters

    def _arrived(self):
        """Yield (bunch, its gradients next to the masters). On CUDA the next bunch's gradients
        are under way by then, into pinned memory, which its allocator reuses."""
        if not self.stream:
            for bunch in self._bunches():
                yield bunch, [_local(p.grad).to(m.device, m.dtype) for p, m in bunch]
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        before = None
        for bunch in self._bunches():
            with self._beside():
                gradients = [
                    torch.empty_like(m, pin_memory=True).copy_(_local(p.grad), non_blocking=True)
                    for p, m in bunch
                ]
                arrival = self.stream.record_event()
            if before:
                before[2].synchronize()
                yield before[:2]
            before = bunch, gradients, arrival
        if before:
            before[2].synchronize()
            yield before[:2]

    def _beside(self):
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    @contextmanager
    def _host_threads(self):
        """Use this rank's share of the host's cores on CUDA: launchers give a rank one thread."""
        before = torch.get_num_threads()
        if self.stream:
            here = dist.get_world_size() if dist.is_initialized() else 1  # if torchrun does not say
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", here))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters' values into the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.copy_(_local(parameter))

    def _bunches(self):
        """Pairs of parameter and master, in bunches of at most `together` bytes."""
        bunch, size = [], 0
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is None:
                continue
            if bunch and size + master.nbytes > self._together:
                yield bunch
                bunch, size = [], 0
            bunch.append((parameter, master))
            size += master.nbytes
        if bunch:
            yield bunch

    def _put_out(self, master):
        """Move the state that the inner optimizer made for a master out, once."""
        for part in self.parts:
            kept = part.state.get(master, {})
            for key, value in kept.items():
                if torch.is_tensor(value) and value.ndim and not self._is_outside(value):
                    kept[key] = self._outside(value, value.dtype)

    def _outside(self, value, dtype):
        """A copy of a tensor outside the device's memory: in host memory for CUDA, else a file."""
        if self.device.type != "cpu":
            return value.detach().to("cpu", dtype, copy=True).pin_memory()
        if value.numel() == 0:
            return value.detach().to(dtype, copy=True)
        size, nbytes = value.numel(), value.numel() * dtype.itemsize
        with (
            _room(self._folder, nbytes),
            tempfile.NamedTemporaryFile(dir=self._folder) as file,  # mapped: lives on unnamed
        ):
            if hasattr(os, "posix_fallocate"):  # not on macOS
                # here a full disk is an error; later, writing mapped memory would be a SIGBUS
                os.posix_fallocate(file.fileno(), 0, nbytes)
            flat = torch.from_file(file.name, shared=True, size=size, dtype=dtype)
        return flat.view(value.shape).copy_(value.detach())

    def _is_outside(self, value):
        if self.device.type != "cpu":
            return value.device.type == "cpu"
        return value.numel() == 0 or value.untyped_storage().filename is not None


@contextmanager
def _room(folder, size):
    """Wrap a write of `size` bytes: a full disk becomes a MemoryError."""
    try:
        yield
    except OSError as error:
        raise MemoryError(
            f"no room in {folder or tempfile.gettempdir()} for {size:,} bytes that move out of "
            f"memory ({error.strerror}; set TMPDIR to use another folder)"
        ) from None


def _local(tensor):
    """This rank's shard of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
