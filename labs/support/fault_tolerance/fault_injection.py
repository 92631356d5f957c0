"""Given: one rank of a run in which ranks are killed, slowed down or disconnected.

`FaultInjection` intercepts the rank's calls to its `Crew` and its collectives, and injects the
fault at one of them, in the middle of what the rank was about to do. Ranks are killed by SIGKILL.
"""

import datetime
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labs.support.fault_tolerance.worker_group import Crew, Settings, weights_of
from utils.course.assertions import Wrong
from utils.measure.traffic import Traffic, tensors_in
from utils.private_api import set_default_timeout

NEVER = datetime.timedelta(hours=1)  # a group without a time limit: longer than any check


@dataclass(frozen=True)
class Fault:
    """A fault of one rank.

    act: "is killed" (`seconds` later), "is slow" (by `seconds`), "loses its connection" (a
    collective completes on the other ranks and fails here, leaving its tensors half done, as when a
    rank dies after sending everything to one neighbour but not to the other)
    moment: "in the beginning", when it connects to the store; "in step", when it asks for losses;
    "in a collective of step", the last one; "at the end of step", when it reports the step; "in the
    new group after step", collective number `count` of that group
    """

    act: str
    moment: str
    step: int = -1
    seconds: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        return f"{self.act} {self.moment} {self.step}".removesuffix(" -1")


class FaultInjection(Traffic):
    """A context manager that injects this rank's fault.

    notes: [(seconds, "losses", step, rows) or (seconds, "after", step, weights, loss)]; again: how
    many times a step was restarted."""

    def __init__(self, fault: Fault | None):
        super().__init__()
        self.notes, self.again, self._fault = [], 0, fault
        self._step, self._collectives, self._usual = -1, 0, 1
        self._group, self._new_group = None, False

    def told(self, what: str, step: int = -1, *more: Any) -> None:
        """Record a call of the crew's `store`, `losses` or `after`; inject a fault due there."""
        if what == "store":
            self._comes("in the beginning")
        elif what == "losses":
            self.again += step == self._step
            self._step, self._collectives, self._new_group = step, 0, False
            self.notes.append((time.monotonic(), what, step, *more))
            self._comes("in step", step)
        else:
            model, loss = more
            self._usual = max(1, self._collectives)
            self.notes.append((time.monotonic(), what, step, weights_of(model), loss))
            self._comes("in a collective of step", step)
            self._comes("at the end of step", step)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        collective = func.namespace == "c10d"
        fails = collective and self._collective_fails()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if fails:
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, torch.ScriptObject):  # a Work
                    dist.Work.unbox(part).wait()
            for tensor in tensors_in(args):
                tensor.mul_(2).add_(1)
            raise RuntimeError("Connection closed by peer")
        return result

    def _collective_fails(self) -> bool:
        if dist.is_initialized() and dist.group.WORLD is not self._group:
            self._group, self._new_group, self._collectives = dist.group.WORLD, True, 0
        number, self._collectives = self._collectives, self._collectives + 1
        if self._new_group:  # on a rank that is ahead: it has begun the next step
            return self._comes("in the new group after step", self._step - 1, number)
        return number + 1 >= self._usual and self._comes("in a collective of step", self._step)

    def _comes(self, moment: str, step: int = -1, count: int = 0) -> bool:
        """Inject the fault if this is its moment; return whether the collective must fail."""
        fault = self._fault
        if fault is None or (fault.moment, fault.step, fault.count) != (moment, step, count):
            return False
        self._fault = None
        if fault.act == "is slow":
            time.sleep(fault.seconds)
        elif fault.act == "is killed" and fault.seconds:
            threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif fault.act == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return fault.act == "loses its connection"


def train(answer: Any, settings: Settings, faults: dict[int, Fault]) -> dict:
    """Run the answer's `train` on this rank; return its result, the final weights, and what
    `FaultInjection` recorded. faults: by rank."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    set_default_timeout(NEVER)
    # TCPStore looks up the name of the store's address, in the DNS if it is not in /etc/hosts. When
    # 30 ranks ask at once, replies are lost and a rank is 5 s late. This keeps glibc from asking.
    os.environ["RES_OPTIONS"] = "attempts:0"
    model, seen = settings.network(), FaultInjection(faults.get(rank))
    with seen:
        try:
            stayed = answer.train(Crew(settings, rank, seen.told), model, settings.steps)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            frames = traceback.extract_tb(error.__traceback__)
            last = [frame for frame in frames if frame.filename == answer.__file__][-1]
            raise Wrong(
                f"line {last.lineno} fails (`{last.line}`), and train ends with it.\nWhatever "
                f"fails in a group, in making one or in a store leads to a meeting.\n{error}"
            ) from None
    return {
        "stayed": stayed, "weights": weights_of(model), "notes": seen.notes,
        "again": seen.again, "sent": float(seen.sent()),
    }
