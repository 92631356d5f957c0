"""Given: one rank of a run in which ranks are killed, stopped, slow or cut off.

`FaultInjection` sees when the rank asks its `Crew` for something and when it starts a collective:
there its faults come, a death by SIGKILL, in the middle of what the rank was about to do.
"""

import datetime
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labs.support.fault_tolerance.worker_group import Crew, Settings, weights_of
from utils.course.assertions import Wrong
from utils.measure.traffic import Traffic, tensors_in
from utils.private_api import set_default_timeout

NEVER = datetime.timedelta(hours=1)  # a group without a time limit: longer than any check
NEW_GROUPS = 12  # a rank that makes more than these makes them again and again
WORDS = {
    "start": "before the first step", "rows": "in step {}", "sending": "in a collective of step {}",
    "after": "at the end of step {}", "handing over": "in the new group after step {} was begun",
    "dies": "is killed", "stops": "is stopped", "sleeps": "is slow",
    "loses": "loses its connection",
}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    act: "dies" (`seconds` later), "stops" (until the others have gone on), "sleeps" (`seconds`),
    "loses" (its connection: a collective is complete on the others, and fails here, its tensors
    half done; so it goes when a rank dies that has sent all to one neighbour, and not to the other)
    moment: "start", when it connects to the store; in `step` "rows", when it asks for losses,
    "sending", its last collective, "after", when it tells of the step; "handing over", collective
    number `count` of the next new group. One that has not come by then comes a moment later.
    """

    act: str
    moment: str
    step: int = -1
    seconds: float = 0.0
    count: int = 0

    def __str__(self) -> str:
        """ "is killed at the end of step 3"."""
        return f"{WORDS[self.act]} {WORDS[self.moment].format(self.step)}"


class NoEnd(BaseException):
    """Groups are made again and again. No Exception: an answer catches those."""


class FaultInjection(Traffic):
    """Inside `with`, this rank's faults come. wake: called after each step, with its number.

    notes: [(seconds, "losses", step, rows) or (seconds, "after", step, weights, loss)]; groups:
    how many have been used, of those that torch.distributed knows."""

    def __init__(self, faults: Iterable[Fault], wake: Callable[[int], None]):
        super().__init__()
        self.notes, self.groups = [], 0
        self._faults, self._wake = list(faults), wake
        self._step, self._collectives, self._usual = -1, 0, 1
        self._group, self._new_group = None, False

    def told(self, what: str, step: int = -1, *more: Any) -> None:
        """The crew was asked for its store or for losses, or told of a step."""
        if what == "store":
            self._comes("start")
        elif what == "losses":
            again = step == self._step
            for fault in self._faults_at("handing over"):
                if step > fault.step + 1 or (again and step >= fault.step):
                    self._happens(fault)
            self._step, self._collectives, self._new_group = step, 0, False
            self._note(what, step, *more)
            self._comes("rows", step)
        else:
            model, loss = more
            self._usual = max(1, self._collectives)
            self._note(what, step, weights_of(model), loss)
            self._comes("sending", step)
            self._comes("after", step)
            self._wake(step)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        collective = func.namespace == "c10d"
        fails = collective and self._collective_fails()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if fails:
            for part in result if isinstance(result, tuple) else (result,):
                if isinstance(part, torch.ScriptObject):
                    dist.Work.unbox(part).wait()
            for tensor in tensors_in(args):
                tensor.mul_(2).add_(1)
            raise RuntimeError("Connection closed by peer")
        return result

    def _collective_fails(self) -> bool:
        if dist.is_initialized() and dist.group.WORLD is not self._group:
            self._group, self._new_group, self._collectives = dist.group.WORLD, True, 0
            self.groups += 1
            if self.groups > NEW_GROUPS:
                raise NoEnd(
                    f"{self.groups} groups were made, and each has failed. Is an error of your own "
                    "caught each\ntime, or are the ranks at different steps? Print what you catch."
                )
        number, self._collectives = self._collectives, self._collectives + 1
        if self._new_group:
            for fault in self._faults_at("handing over"):
                if self._step >= fault.step and number >= fault.count:
                    self._happens(fault)
            return False
        return number + 1 >= self._usual and self._comes("sending", self._step)

    def _faults_at(self, moment: str) -> list[Fault]:
        return [fault for fault in self._faults if fault.moment == moment]

    def _comes(self, moment: str, step: int = -1) -> bool:
        """A moment has come. True: the collective that begins has to fail."""
        failing = [self._happens(fault) for fault in self._faults_at(moment) if fault.step == step]
        return any(failing)

    def _happens(self, fault: Fault) -> bool:
        self._faults.remove(fault)
        if fault.act == "sleeps":
            time.sleep(fault.seconds)
        elif fault.act == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.act == "dies" and fault.seconds:
            threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif fault.act == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return fault.act == "loses"

    def _note(self, *what: Any) -> None:
        self.notes.append((time.monotonic(), *what))


def train(
    answer: Any, settings: Settings, faults: dict[int, tuple[Fault, ...]], pids: list[int]
) -> dict:
    """On a rank: what the answer's `train` returns, the weights in the end, and what
    `FaultInjection` has seen. faults, pids: by rank."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    set_default_timeout(NEVER)
    # TCPStore looks up the name of the store's address, in the DNS if /etc/hosts has it not. Where
    # 30 ranks ask at once, answers are lost, and a rank is 5 s late: glibc asks nobody now.
    os.environ["RES_OPTIONS"] = "attempts:0"

    def wake(step: int) -> None:
        for other, theirs in faults.items():
            if other != rank and any(f.act == "stops" and f.step <= step for f in theirs):
                os.kill(pids[other], signal.SIGCONT)

    model, seen = settings.network(), FaultInjection(faults.get(rank, ()), wake)
    with seen:
        try:
            stayed = answer.train(Crew(settings, rank, seen.told), model, settings.steps)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            lines = traceback.extract_tb(error.__traceback__)
            last = [line for line in lines if line.filename == answer.__file__][-1]
            raise Wrong(
                f"line {last.lineno} fails (`{last.line}`), and train ends with it.\n"
                "Whatever fails in a group, in making one or in a store leads to the next meeting; "
                f"here it was a\n{type(error).__name__}: {str(error).splitlines()[0][-90:]}"
            ) from None
        finally:
            wake(settings.steps)
    return {
        "stayed": stayed, "weights": weights_of(model), "notes": seen.notes,
        "recoveries": max(0, seen.groups - 1), "sent": float(seen.sent()),
    }
