"""Replicas of one model under torchft: the run survives a death, and a new replica is healed.

    with lighthouse() as address, Ranks(4, may_die=True) as ranks:
        ranks.run(train, Run(address, folder))

Every rank of the pool is a *replica*: it holds the whole model and shares only its gradients with
the others. The *lighthouse* receives their heartbeats and tells them before each step which
replicas take part, the *quorum*. No replica commits a step in which an all-reduce failed. torchft
0.2.0 (github.com/pytorch/torchft) has wheels only for Linux on x86-64: see `AVAILABLE`.
"""

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from utils.data import corpus
from utils.models.config import GPTConfig
from utils.models.fingerprint import fingerprint
from utils.models.gpt import GPT, cross_entropy
from utils.ranks.supervise import Child, end, supervised

AVAILABLE = importlib.util.find_spec("torchft") is not None
HOST = "127.0.0.1"
PROGRAM = Path(sys.executable).with_name("torchft_lighthouse")


@dataclass(frozen=True)
class Run:
    """`size` replicas train; the last of them is killed in step `dies`. An additional rank waits
    until step `joins` and takes its place.

    address   of the lighthouse
    folder    an empty folder in which the replicas meet
    follow    whether a replica's rows follow the quorum; otherwise they are fixed, as with
              torchft's DistributedSampler, and the rows of a lost replica are not computed
    patience  seconds after which an all-reduce fails: a replica that sends to the dead one but
              receives from another does not notice the death
    limit     seconds for every other wait, much longer than `patience`

    Raises ValueError if the steps are not in this order, or the batch cannot be split evenly.
    """

    address: str
    folder: str
    follow: bool = False
    dies: int = 7
    joins: int = 14
    steps: int = 20
    size: int = 3
    batch: int = 12
    seq: int = 32
    patience: float = 3.0
    limit: float = 60.0

    def __post_init__(self):
        if not 0 <= self.dies < self.joins < self.steps:
            raise ValueError(
                f"dies {self.dies}, joins {self.joins}, steps {self.steps} are not in order: "
                "give increasing steps"
            )
        if self.size < 2 or self.batch % self.size or self.batch % (self.size - 1):
            raise ValueError(
                f"a batch of {self.batch} rows cannot be split evenly among {self.size} replicas "
                "and among one fewer: give a multiple of both, and at least 2 replicas"
            )


@dataclass(frozen=True)
class Attempt:
    """A step that a replica attempted. loss: of the whole batch, before the step."""

    step: int
    loss: float
    replicas: int  # in the quorum
    committed: bool
    end: float  # time.monotonic


@contextlib.contextmanager
def lighthouse(silence: float = 2.0, limit: float = 60.0) -> Iterator[str]:
    """Yield the address of a lighthouse that declares a replica dead after `silence` seconds.

    Raises TimeoutError after `limit` seconds, RuntimeError if it ends before it listens.
    """
    if not PROGRAM.exists():
        raise RuntimeError(f"{PROGRAM} is missing: torchft is for Linux on x86-64; run make setup.")
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(PROGRAM), f"--bind={HOST}:{port}"]
    command += ["--min_replicas=1", f"--heartbeat_timeout_ms={1000 * silence:.0f}"]
    child = Child(supervised(command), env={**os.environ, "RUST_LOG": "error"})
    try:
        until = time.monotonic() + limit
        while not _listens(port):
            if child.wait(0.05):
                raise RuntimeError(f"The lighthouse has ended: {child.last_words()}")
            if time.monotonic() > until:
                raise TimeoutError(f"The lighthouse does not listen after {limit:g} s.")
        yield f"http://{HOST}:{port}"
    finally:
        end([child], limit)


def _listens(port):
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
        return True
    return False


def new_model(seed: int = 0) -> tuple[GPT, torch.optim.Optimizer]:
    """The model and its optimizer, the same on every replica."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(hidden_size=32, layers=2, heads=2))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def alone(run: Run) -> list[float]:
    """The loss of every step without a death, with one process computing all rows."""
    tokens, _ = corpus.split(corpus.load())
    model, adamw = new_model()
    losses = []
    for step in range(run.steps):
        x, y = corpus.batch(tokens, step, run.batch, run.seq)
        adamw.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        adamw.step()
        losses.append(loss.item())
    return losses


def train(run: Run) -> tuple[list[Attempt], str]:
    """Train; return this replica's attempts and its model's fingerprint. For `Ranks(run.size + 1)`.

    torchft's messages are in the run's folder: replica0.log … Raises ValueError for a different
    number of ranks.
    """
    if dist.get_world_size() != run.size + 1:
        raise ValueError(
            f"{run.size} replicas and a new one are not {dist.get_world_size()} ranks: "
            f"use Ranks({run.size + 1}, may_die=True)"
        )
    path = Path(run.folder) / f"replica{dist.get_rank()}.log"
    with path.open("w", buffering=1) as log, contextlib.redirect_stderr(log):
        return _train(run)


def _train(run):
    import torchft

    rank = dist.get_rank()
    patience, wait = timedelta(seconds=run.patience), timedelta(seconds=run.limit)
    tokens, _ = corpus.split(corpus.load())
    model, adamw = new_model()
    meeting = dist.FileStore(f"{run.folder}/meeting", run.size + 1)
    if rank == run.size:
        meeting.wait(["a place is free"], wait)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=wait)

    def state():
        return {"model": model.state_dict(), "optimizer": adamw.state_dict()}

    def load(state):
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience), load_state_dict=load, state_dict=state,
        min_replica_size=1, use_async_quorum=False, init_sync=False, rank=0, world_size=1,
        timeout=wait, quorum_timeout=wait, connect_timeout=wait, hostname=HOST,
        store_addr=HOST, store_port=store.port, lighthouse_addr=run.address,
        replica_id=f"replica{rank}",
    )
    optimizer = torchft.Optimizer(manager, adamw)
    attempts = []
    while manager.current_step() < run.steps:
        optimizer.zero_grad()  # asks for the quorum; a new replica gets the others' state here
        step, replicas = manager.current_step(), manager.num_participants()
        if replicas < run.size - (run.dies <= step < run.joins):
            if step >= run.joins:
                meeting.set("a place is free", "")
            continue  # until all have joined, so that the curve is the same on every machine
        place = manager.participating_rank() if run.follow else min(rank, run.size - 1)
        first, last = corpus.share_of_batch(run.batch, place, replicas if run.follow else run.size)
        x, y = corpus.batch(tokens, step, run.batch, run.seq)
        with torch.no_grad():
            loss = cross_entropy(model(x), y).item()
        partial = cross_entropy(model(x[first:last]), y[first:last])
        if (rank, step) == (run.size - 1, run.dies):
            os.kill(os.getpid(), signal.SIGKILL)
        partial.backward()
        for work in [manager.allreduce(p.grad) for p in model.parameters()]:
            work.wait()  # never raises: an error is kept for `should_commit`
        optimizer.step()  # asks whether to commit
        committed = manager.current_step() > step
        attempts.append(Attempt(step, loss, replicas, committed, time.monotonic()))
    manager.shutdown(wait=False)
    return attempts, fingerprint(model)
