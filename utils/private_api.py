"""Every private name of torch and of multiprocessing that the workshop uses: where to look first
when a new version of torch or Python breaks something.

Each has its reason. What has become public moves out. Written for torch 2.11 to 2.13, Python 3.11.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
from multiprocessing import forkserver

import torch
import torch.distributed as dist

# Tensors with a shape and without numbers: one rank of a large world (utils.planner.fake_run).
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Modes that see every operator (how traffic and memory are counted), and the test whether a tensor
# is a wrapper such as DTensor: named in torch's documents, imported from a private module.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass_type as is_traceable_wrapper_subclass_type,
)


class OperatorMode(TorchDispatchMode):
    """A mode whose subclasses define `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares each fresh rank the import of the compiler, 0.9 s, at its first operator."""
        return False


def unwatched() -> contextlib.AbstractContextManager:
    """A context in which no mode sees what this thread computes."""
    return torch._C._DisableTorchDispatch()


def current_modes() -> list[TorchDispatchMode]:
    """The modes that are entered on this thread: torch offers no other way to ask."""
    return _get_current_dispatch_mode_stack()


def arguments(func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dict:
    """{name: value} of an operator call, defaults included: its schema has no public name."""
    named = func._schema.arguments
    given = {a.name: a.default_value for a in named if a.has_default_value()}
    return given | {a.name: value for a, value in zip(named, args, strict=False)} | kwargs


def future_class() -> type:
    """The class whose `then` DDP's hooks call; `torch.futures.Future` is a subclass of it."""
    return torch._C.Future


def running_backward() -> int:
    """A number of the backward pass that this thread runs, -1 outside of any."""
    return torch._C._current_graph_task_id()


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place: what autograd itself compares."""
    return tensor._version


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of this name: functional collectives hand over names."""
    return dist.distributed_c10d._resolve_process_group(name)


def fake_store() -> dist.Store:
    """For a process group whose other ranks do not exist; makes the backend "fake" known."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # it takes seconds to import

    return FakeStore()


def set_default_timeout(limit: datetime.timedelta) -> None:
    """The time limit of groups that are made later without one: torch has it as two constants."""
    dist.distributed_c10d.default_pg_timeout = limit
    dist.distributed_c10d.default_pg_nccl_timeout = limit


def may_have_children() -> None:
    """Lets a daemon of multiprocessing, such as a rank, start processes (DataLoader's workers)."""
    multiprocessing.current_process()._config["daemon"] = False


def share_the_parents_forkserver() -> None:
    """Lets a process that a forkserver has made start its own from the same one. multiprocessing
    means it to be so, but only asks whether a forkserver is this process's child."""
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
