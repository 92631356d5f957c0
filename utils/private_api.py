"""Every private name of torch and of multiprocessing that the workshop uses: the first place to
look when a new version of torch or Python breaks something.

Each has its reason. A name that becomes public moves out. Written for torch 2.11 to 2.13 and
Python 3.11.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
from multiprocessing import forkserver

import torch
import torch.distributed as dist

# Tensors with a shape but no data: one rank of a large world (utils.planner.fake_run).
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Modes that see every operator (to count traffic and memory), and the test for wrapper tensors such
# as DTensor: mentioned in torch's documentation, imported from a private module.
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
        """True, to spare each fresh rank the compiler's import, 0.9 s, at its first operator."""
        return False


def unwatched() -> contextlib.AbstractContextManager:
    """A context in which no mode sees what this thread computes."""
    return torch._C._DisableTorchDispatch()


def current_modes() -> list[TorchDispatchMode]:
    """The active modes of this thread: torch offers no other way to ask."""
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
    """The number of the backward pass that this thread runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, as compared by autograd itself."""
    return tensor._version


def process_group(name: str) -> dist.ProcessGroup:
    """The process group of this name: functional collectives pass names."""
    return dist.distributed_c10d._resolve_process_group(name)


def fake_store() -> dist.Store:
    """A store for a process group with fake peers; importing it registers the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # a slow import

    return FakeStore()


def set_default_timeout(limit: datetime.timedelta) -> None:
    """Set the time limit of later groups made without one: torch has it as two constants."""
    dist.distributed_c10d.default_pg_timeout = limit
    dist.distributed_c10d.default_pg_nccl_timeout = limit


def may_have_children() -> None:
    """Let a multiprocessing daemon, such as a rank, start processes (DataLoader's workers)."""
    multiprocessing.current_process()._config["daemon"] = False


def share_the_parents_forkserver() -> None:
    """Let a process made by a forkserver start its own from the same one. multiprocessing intends
    this, but only checks whether a forkserver is this process's child."""
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
