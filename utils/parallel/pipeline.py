"""Pipeline parallelism: each rank holds some layers, and micro-batches pass from rank to rank.

    mesh = make_mesh(pp=4)
    stages = make_stages(model, mesh.pp)                              # this rank's layers
    pipeline = Pipeline(stages, mesh.pp, "1f1b", loss=summed_loss)
    total = pipeline.run([(x, y), …])       # forward and backward passes of all micro-batches
    reduce_tied_gradients(stages, mesh.pp)  # if embed_tokens and lm_head are one matrix

The order of work is a list per rank (`utils/parallel/schedules.py`); this file carries it out.
Every rank knows the lists of all ranks, so messages need no headers: the next one is known.

Why it cannot hang: a schedule that would hang is refused before it begins (`check`); sends do not
wait, and messages are received in the order in which the other rank sends them; every receive has
the process group's time limit.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from utils.parallel.mesh import Axis
from utils.parallel.schedules import Action, Actions, check, counts, feeds, needs
from utils.parallel.schedules import schedule as make_schedule
from utils.parallel.stages import Stage
from utils.parallel.zero_bubble import WeightGradientsLater

# ---- 1. the pipeline


class Event(NamedTuple):
    """What a rank did, in seconds of `time.perf_counter`, which ranks of a machine share."""

    kind: str  # "F", "B", "W", or "wait" for the message that the next action needs
    micro_batch: int
    chunk: int
    begin: float
    end: float


class Pipeline:
    """Runs this rank's part of a pipeline. Every rank of the axis makes one, with equal calls.

    stages           this rank's stages, chunk 0 first: modules that take one tensor
    schedule         a name of `schedules.NAMES`, or lists of actions like those of `schedule()`
    loss             called on the last stage with (its output, y) of each micro-batch; its result
                     starts the backward pass, so it should be summed or weighted
    takes_targets    also call the last stage with y; its output, a loss, is then given to `loss`
    forward_context  returns a context manager for every stage's forward pass (autocast)
    boundary         called with a micro-batch's x, returns the (shape, dtype) that one stage passes
                     to the next; None: (B, T, C) in the type of the parameters
    before_backward  called with (stage, last) before each backward pass of a stage; last: for its
                     last micro-batch
    timeout          seconds that a receive may take; None: the process group's limit
    synchronize      on CUDA, wait for the device at each action, so that `events` are accurate
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        axis: Axis,
        schedule: str | Actions = "1f1b",
        loss: Callable | None = None,
        *,
        takes_targets: bool = False,
        forward_context: Callable[[], AbstractContextManager] = nullcontext,
        boundary: Callable | None = None,
        before_backward: Callable | None = None,
        timeout: float | None = None,
        synchronize: bool = False,
    ):
        self.stages, self.axis, self.schedule, self.loss = list(stages), axis, schedule, loss
        self.takes_targets = takes_targets
        self.forward_context, self.before_backward = forward_context, before_backward
        self.boundary = boundary or self._hidden_states
        self.limit = None if timeout is None else timedelta(seconds=timeout)
        self.synchronize = synchronize
        self.events: list[Event] = []  # of the last run
        self._known = {}  # number of micro-batches -> checked schedule
        self.up = self.down = axis.group
        if axis.group is not None and dist.get_backend(axis.group) == "nccl":
            self.down = dist.new_group(list(axis.ranks), use_local_synchronization=True)

    def actions(self, micro_batches: int) -> Actions:
        """The checked lists of all ranks for this number of micro-batches. Raises ValueError."""
        if micro_batches not in self._known:
            orders = self.schedule
            if isinstance(orders, str):
                orders = make_schedule(orders, self.axis.size, micro_batches, len(self.stages))
            check(orders)
            wanted = (self.axis.size, len(self.stages), micro_batches)
            if counts(orders) != wanted:
                raise ValueError(
                    "the schedule is for {} ranks, {} chunks and {} micro-batches".format(
                        *counts(orders)
                    )
                    + ", but there are {}, {} and {}".format(*wanted)
                )
            self._known[micro_batches] = [[Action(*a) for a in order] for order in orders]
        return self._known[micro_batches]

    def run(self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Run forward and backward passes of all micro-batches (x, y); gradients add up in `.grad`.

        Every rank passes the same list; micro-batches may differ in size. Returns the sum of the
        losses, a float64 tensor that is equal on all ranks of the axis.
        """
        run = _Run(self, micro_batches, self.actions(len(micro_batches)))
        run.go()
        self.events = run.events
        if self.axis.group is not None:
            dist.broadcast(run.total, self.axis.ranks[-1], group=self.axis.group)
        return run.total

    @torch.no_grad()
    def output(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor | None:
        """Run a forward pass; return the last stage's output on the last rank, None elsewhere.

        Every rank of the axis calls it with the same x, and y if the last stage takes targets.
        """
        order = [Action("F", 0, chunk) for chunk in range(len(self.stages))]
        run = _Run(self, [(x, y)], [order] * self.axis.size, forward_only=True)
        run.go()
        return run.output

    def _hidden_states(self, x):
        """(B, T, C) in the type of this rank's parameters."""
        parameter = next(self.stages[0].parameters())
        return (*x.shape, self.stages[0].config.hidden_size), parameter.dtype


# ---- 2. one run of it


class _Run:
    """The state of one run: what is kept between a forward pass and its backward pass."""

    def __init__(self, pipeline, micro_batches, orders, forward_only=False):
        self.pipeline, self.micro_batches = pipeline, micro_batches
        self.rank, self.size = pipeline.axis.index, pipeline.axis.size
        self.chunks, self.last = len(pipeline.stages), len(pipeline.stages) * self.size - 1
        self.order, self.forward_only = orders[self.rank], forward_only
        self.splits = any(action.kind == "W" for action in self.order)
        self.messages = _Messages(pipeline, micro_batches, orders)
        self.kept = {}  # (micro-batch, chunk) -> (input, start of the backward pass)
        self.later = {}  # (micro-batch, chunk) -> WeightGradientsLater
        self.passed = [0] * self.chunks  # backward passes of each chunk
        self.events, self.output = [], None
        device = micro_batches[0][0].device
        self.total = torch.zeros((), dtype=torch.float64, device=device)

    def go(self):
        do = {"F": self.forward, "B": self.backward, "W": self.weights}
        for action in self.order:
            begin = self.now()
            received = self.messages.receive(action)
            ready = self.now()
            if received is not None:
                self.events.append(Event("wait", action.micro_batch, action.chunk, begin, ready))
            do[action.kind](action, received)
            self.events.append(Event(*action, ready, self.now()))
        self.messages.finish()

    def forward(self, action, hidden):
        pipeline, (x, y), place = self.pipeline, self.micro_batches[action.micro_batch], action[1:]
        stage, module = action.chunk * self.size + self.rank, pipeline.stages[action.chunk]
        if isinstance(module, Stage):
            module.length = x.shape[1]
        if stage > 0:
            x = hidden.requires_grad_(not self.forward_only)
        later = nullcontext()
        if self.splits:
            later = self.later[place] = WeightGradientsLater()
        targets = [y] if pipeline.takes_targets and stage == self.last else []
        with pipeline.forward_context(), later:
            out = module(x, *targets)
        if stage < self.last:
            self.messages.send(action, out.detach())
        elif self.forward_only:
            self.output = out
        else:
            out = pipeline.loss(out, y)
            self.total += out.detach()
        if not self.forward_only:
            self.kept[place] = x, out

    def backward(self, action, gradient):
        stage, place = self.pipeline.stages[action.chunk], action[1:]
        self.passed[action.chunk] += 1
        if self.pipeline.before_backward:
            self.pipeline.before_backward(
                stage, self.passed[action.chunk] == len(self.micro_batches)
            )
        x, out = self.kept.pop(place)
        with self.later.get(place, nullcontext()):
            torch.autograd.backward(out, gradient)
        if feeds(action, self.rank, self.size, self.chunks):
            self.messages.send(action, x.grad)

    def weights(self, action, _):
        self.later.pop(action[1:]).add()

    def now(self):
        if self.pipeline.synchronize and self.total.is_cuda:
            torch.cuda.synchronize(self.total.device)
        return perf_counter()


# ---- 3. the messages: hidden states one way, gradients the other


class _Messages:
    """The messages of one run. A rank's messages to itself stay local.

    pipeline   its axis, its number of chunks, `boundary`, `limit`, and the groups `up` and `down`
    orders     the lists of all ranks: they determine the next message, so none needs a header

    Three rules prevent hangs and keep memory bounded:

    - A send does not wait. Its tensor is kept until the receiver must have it; the proof is a later
      message from there that was computed after the tensor was used.
    - Receives are posted in the order in which the other rank sends, whichever is needed first.
      NCCL matches messages by order alone.
    - On NCCL each direction has its own group: NCCL executes a group's operations strictly in
      order, so two neighbours that both send first would wait for each other. (Not run here: that
      takes several GPUs.)
    """

    def __init__(self, pipeline, micro_batches, orders):
        self.axis, self.pipeline, self.micro_batches = pipeline.axis, pipeline, micro_batches
        self.size, self.chunks = self.axis.size, len(pipeline.stages)
        self.places = [{action: n for n, action in enumerate(order)} for order in orders]
        # what each rank will send here, in its order: (its place there, for which action)
        self.expected = {
            rank: iter(
                [
                    (place, goal[1])
                    for place, action in enumerate(order)
                    if (goal := feeds(action, rank, self.size, self.chunks))
                    and goal[0] == self.axis.index
                    and goal[1] in self.places[goal[0]]
                ]
            )
            for rank, order in enumerate(orders)
        }
        self.arriving = {}  # action -> (work, tensor, place of its sender in the sender's order)
        self.sent = {rank: [] for rank in range(self.size)}  # (place of its use, work, tensor)
        self.own = {}  # action -> tensor from this rank itself

    def send(self, action, tensor):
        """Send the result of `action` to the stage that uses it."""
        rank, goal = feeds(action, self.axis.index, self.size, self.chunks)
        if rank == self.axis.index:
            self.own[goal] = tensor
            return
        shape, dtype = self._boundary(action)
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ValueError(
                f"rank {self.axis.index} has {tuple(tensor.shape)} {tensor.dtype} to send for "
                f"{action}, but its neighbour expects {shape} {dtype}: give Pipeline a boundary="
            )
        tensor = tensor.contiguous()
        work = dist.isend(tensor, self.axis.ranks[rank], group=self._group(self.axis.index, rank))
        self.sent[rank].append((self.places[rank][goal], work, tensor))

    def receive(self, action):
        """The tensor that `action` needs from another stage, or None if it needs none."""
        for rank, needed in needs(action, self.axis.index, self.size, self.chunks):
            if needed.kind != action.kind:  # a B needs its own F, a W its B: no messages
                continue
            if rank == self.axis.index:
                return self.own.pop(action)
            while action not in self.arriving:
                self._post(rank)
            work, tensor, place = self.arriving.pop(action)
            self._wait(work, f"{needed} of rank {self.axis.ranks[rank]}")
            self._release(rank, place)
            return tensor
        return None

    def finish(self):
        """Wait until everything that was sent has arrived."""
        for rank in self.sent:
            self._release(rank, len(self.places[rank]))

    def _post(self, rank):
        """Start receiving the next message of another rank."""
        place, goal = next(self.expected[rank])
        shape, dtype = self._boundary(goal)
        tensor = torch.empty(shape, dtype=dtype, device=self.micro_batches[0][0].device)
        work = dist.irecv(tensor, self.axis.ranks[rank], group=self._group(rank, self.axis.index))
        self.arriving[goal] = work, tensor, place

    def _release(self, rank, place):
        """Release the tensors that the rank has used at `place` in its order or before."""
        left = []
        for used, work, tensor in self.sent[rank]:
            if used > place:
                left.append((used, work, tensor))
            else:
                self._wait(work, f"rank {self.axis.ranks[rank]} to take a message")
        self.sent[rank] = left

    def _wait(self, work, what):
        limit = self.pipeline.limit
        try:
            work.wait(limit) if limit else work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"pipeline: waited for {what}: {error}") from error

    def _boundary(self, action):
        shape, dtype = self.pipeline.boundary(self.micro_batches[action.micro_batch][0])
        return tuple(shape), dtype

    def _group(self, sender, receiver):
        return self.pipeline.up if sender < receiver else self.pipeline.down
