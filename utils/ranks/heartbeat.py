"""Says, when a rank has waited too long, which ranks gave no sign of life and where the others are.

Every rank of a torchrun leaves signs of life in torchrun's store, with the line it is executing. A
rank whose collective reaches its time limit looks twice: a rank without a new sign in between is
stopped, unreachable or gone; the others are waiting, and the message says where.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

OURS = Path(__file__).resolve().parents[1]  # utils
LATE = re.compile("timed out|timeout", re.IGNORECASE)  # the wording of gloo, NCCL and the store
GONE = re.compile(r"closed by peer|reset by peer|broken pipe|remote process exited", re.IGNORECASE)

SILENT = "the store of the ranks does not answer: check rank 0 and its machine"


class RanksLost(RuntimeError):
    """This rank has waited for others in vain; the message says for which."""


@contextmanager
def started_together(limit: float) -> Iterator[None]:
    """Wrap `init_process_group` and say in one sentence that the ranks have not met."""
    place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))

    def sentence(reason: str) -> str:
        return (
            f"the {os.environ.get('WORLD_SIZE', '?')} ranks have not met at {place} within "
            f"{limit:g} s ({reason}): start all of them, check that the port is not in use, "
            "or give a larger --time-limit"
        )

    def give_up():
        rank = os.environ.get("RANK", "?")
        print(f"rank {rank}: {sentence('the listener there is silent')}", file=sys.stderr)
        os._exit(2)

    # torch's own limit does not cover a listener that accepts the connection and stays silent
    timer = threading.Timer(limit + 5, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (dist.DistError, OSError) as error:
        raise RanksLost(sentence(str(error).splitlines()[0].rstrip("."))) from None
    finally:
        timer.cancel()


class Heartbeat:
    """Signs of life of the ranks described by torchrun's environment.

    limit   time limit of a collective, in seconds; ten signs are left within it
    """

    def __init__(self, rank: int, size: int, limit: float):
        self.rank, self.size, self.limit, self.every = rank, size, limit, limit / 10
        self.patience = min(limit, 10.0)  # seconds to wait for the store
        # without the number of restarts: each node counts its own
        self.prefix = f"heartbeat/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
        self.over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise RanksLost for a wait inside that is in vain."""
        self.main = threading.get_ident()
        thread = threading.Thread(target=self._beat, daemon=True)
        thread.start()
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if LATE.search(text):
                raise RanksLost(f"waited {self.limit:g} s in vain: {self._who()}") from None
            if GONE.search(text):
                raise RanksLost(
                    "lost its connection to another rank, which has ended: its output says why"
                ) from None
            raise
        finally:
            self.over.set()

    def _store(self):
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=self.patience)
        return dist.TCPStore(address, port, is_master=False, timeout=patience)

    def _beat(self):
        """Leave signs, over a connection of its own: the main thread's may be waiting."""
        try:
            store, count = self._store(), 0
            while True:
                sign = json.dumps([count, self._where()])
                store.set(f"{self.prefix}/{self.rank}", sign)
                count += 1
                if self.over.wait(self.every):
                    return
        except RuntimeError:
            return  # the store is gone; waiting ranks will notice

    def _where(self):
        """The innermost line of the main thread in our own code."""
        frame = sys._current_frames().get(self.main)
        while frame and OURS not in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        if frame is None:
            return "code outside utils"
        file = Path(frame.f_code.co_filename).relative_to(OURS.parent)
        return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"

    def _who(self):
        """Look in a thread: torch waits forever if rank 0, which holds the store, is stopped."""
        found = []
        look = threading.Thread(target=lambda: found.append(self._look()), daemon=True)
        look.start()
        look.join(2 * self.every + 3 * self.patience)
        return found[0] if found else SILENT

    def _look(self):
        try:
            store = self._store()
            before = self._signs(store)
            time.sleep(2 * self.every)
            now = self._signs(store)
        except RuntimeError:
            return SILENT
        silent, waiting = [], []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if now[rank] is None:
                silent.append(f"rank {rank} has never given a sign of life")
            elif now[rank] == before[rank]:
                silent.append(f"rank {rank} gives no sign of life, last in {now[rank][1]}")
            else:
                waiting.append(f"rank {rank} is alive in {now[rank][1]}")
        return "; ".join(silent or waiting)

    def _signs(self, store):
        keys = [f"{self.prefix}/{rank}" for rank in range(self.size)]
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
