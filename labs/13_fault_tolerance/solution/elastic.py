"""Lab 13b: ranks that go on when some of them are killed, and learn what one rank learns.

    train(crew, model, steps)   # on every rank; crew: labs/support/fault_tolerance/worker_group.py

Only `train` is judged, by its contract; the other three functions are one way to cut it in pieces.
A rank that is killed says nothing. The others see a collective that fails, or takes longer than
`crew.limit`: both raise a RuntimeError. They have then stopped at different places: some with sums
in their gradients that are not complete, some one step ahead of the others.

A *generation* is the time from one meeting to the next failure. Its number is part of every key in
the store, so that nobody mistakes an old word for a new one.
"""

import datetime
import json
import time

import torch
import torch.distributed as dist
from torch import nn

from labs.support.fault_tolerance.worker_group import Crew


def train(crew: Crew, model: nn.Module, steps: int) -> bool:
    """Trains `model` for `steps` steps. True: this rank is one of those who did; False: the others
    went on without it (it was stopped, or slow, for longer than `crew.patience`).

    A step is that of one rank with the whole batch: g is the gradient of the mean loss over all
    `crew.batch` rows, v = momentum·v + g (v is 0 at first), weights -= lr·v; `crew.after` is told.

    - Ranks may be killed at any time: before the first step, in a step, in the recovery itself, two
      at once, rank 0 too. No process is started anew. Who is left shares the rows of a step by
      their numbers, each row on one rank, no rank more than one row above another, and goes on
      alone if need be.
    - Every rank that returns True has the weights of one rank, up to rounding, after each step that
      it tells `crew.after` of and at the end; and all of them have the same bits.
    - A step that any of those who are left has made is not computed again.
    - A rank that lives and comes to the meeting in `crew.patience` stays. One that comes when the
      others have closed the list without it returns False, and makes no further step.
    - A rank sends its gradients once a step, with some numbers beside them; a new group sends
      weights and velocity once at most.
    - Each wait ends: a collective after `crew.limit` seconds, a meeting after `crew.patience`.
    """
    ### BEGIN SOLUTION: meet, form a group, take the furthest state, do steps; after a failure again
    store, members = crew.store(), crew.members
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    done = generation = 0
    while True:
        members = meet(crew, store, generation, members)
        if crew.rank not in members:
            return False
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"group {generation}", store),
                rank=members.index(crew.rank),
                world_size=len(members),
                timeout=datetime.timedelta(seconds=crew.limit),
            )
            done = take_furthest(model, velocity, done)
            while done < steps:
                loss = one_step(crew, model, velocity, done)
                done += 1
                crew.after(done - 1, model, loss)
            dist.barrier()  # who left now would take the last step with it
            return True
        except RuntimeError:
            generation += 1
        finally:  # those who wait for this rank see at once that it has left
            if not dist.is_initialized():
                # a counter in torch's keys goes back to 0 only where a group is destroyed: else it
                # differs from that of ranks on which this group was made before it failed
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            dist.destroy_process_group()
    ### END SOLUTION


def meet(crew: Crew, store: dist.Store, generation: int, before: list[int]) -> list[int]:
    """The members of a generation, sorted, the same list on every rank that asks.

    before: those of the last generation. Ends when all of them are here, or after `crew.patience`.
    """
    ### BEGIN SOLUTION: say that you are here, wait for the others; let one list be the list of all
    here = dist.PrefixStore(f"meeting {generation}", store)
    here.set(str(crew.rank), "")
    until = time.monotonic() + crew.patience
    while (came := [rank for rank in before if here.check([str(rank)])]) != before:
        if here.check(["members"]) or time.monotonic() > until:
            break
        time.sleep(0.05)
    return json.loads(here.compare_set("members", "", json.dumps(came)))
    ### END SOLUTION


def take_furthest(model: nn.Module, velocity: list[torch.Tensor], done: int) -> int:
    """Gives every rank of the group the state of the one that has done most steps, and returns
    their number. A rank whose group fails meanwhile keeps the state that it had.

    velocity: one tensor for each parameter.
    """
    ### BEGIN SOLUTION: who is furthest? if others are not, let it send its state; then take it over
    counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([done]))
    furthest = max(counts)
    if min(counts) == furthest:
        return done
    own = [*model.parameters(), *velocity]
    state = torch.cat([tensor.detach().flatten() for tensor in own])
    dist.broadcast(state, counts.index(furthest))
    with torch.no_grad():
        for tensor, part in zip(own, state.split([tensor.numel() for tensor in own])):
            tensor.copy_(part.view_as(tensor))
    return int(furthest)
    ### END SOLUTION


def one_step(crew: Crew, model: nn.Module, velocity: list[torch.Tensor], step: int) -> float:
    """One step of all ranks in the group; returns the mean loss over the batch.

    If it fails, the model and the velocity are what they were.
    """
    ### BEGIN SOLUTION: the gradient of this rank's rows, the sum over the ranks, then the change
    rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
    loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
    gradients = torch.autograd.grad(loss, parameters)
    flat = torch.cat([loss.detach().view(1), *[gradient.flatten() for gradient in gradients]])
    dist.all_reduce(flat)
    with torch.no_grad():
        for p, v, part in zip(
            parameters, velocity, flat[1:].split([p.numel() for p in parameters])
        ):
            p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
    return flat[0].item()
    ### END SOLUTION
