"""What travels between the stages of a pipeline: hidden states one way, gradients the other.

Three rules keep it from hanging and from filling the memory:

- A send does not wait. Its tensor is kept until the receiver must have it; a later message from
  there, made after the tensor was used, is the proof.
- Receives are posted in the order in which the other rank sends, whatever is needed first. NCCL
  matches messages by their order alone.
- On NCCL the two directions have a group each: it carries out what a group is given strictly in
  order, so two neighbours who both send first would wait for each other. (Not run here: that takes
  several GPUs.)
"""

import torch
import torch.distributed as dist

from utils.parallel.schedules import feeds, needs


class Messages:
    """The messages of one run of a `Pipeline`. What a rank sends to itself stays where it is.

    pipeline   its axis, its number of chunks, `boundary`, `limit`, and the groups `up` and `down`
    orders     the lists of all ranks: they tell who sends what next, so no message has a header
    """

    def __init__(self, pipeline, micro_batches, orders):
        self.axis, self.pipeline, self.micro_batches = pipeline.axis, pipeline, micro_batches
        self.size, self.chunks = self.axis.size, len(pipeline.stages)
        self.places = [{action: n for n, action in enumerate(order)} for order in orders]
        # what each other rank will send here, in its order: (its place there, for which action)
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
        self.sent = {rank: [] for rank in range(self.size)}  # (place where it is used, work, it)
        self.own = {}  # action -> tensor from this rank itself

    def send(self, action, tensor):
        """Hands the result of `action` to the stage that uses it."""
        rank, goal = feeds(action, self.axis.index, self.size, self.chunks)
        if rank == self.axis.index:
            self.own[goal] = tensor
            return
        shape, dtype = self._boundary(action)
        if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            raise ValueError(
                f"rank {self.axis.index} has {tuple(tensor.shape)} {tensor.dtype} to send for "
                f"{action}, and its neighbour expects {shape} {dtype}: give Pipeline a boundary="
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
        """Waits until everything that was sent has arrived."""
        for rank in self.sent:
            self._release(rank, len(self.places[rank]))

    def _post(self, rank):
        """Begins to receive the next message of another rank."""
        place, goal = next(self.expected[rank])
        shape, dtype = self._boundary(goal)
        tensor = torch.empty(shape, dtype=dtype, device=self.micro_batches[0][0].device)
        work = dist.irecv(tensor, self.axis.ranks[rank], group=self._group(rank, self.axis.index))
        self.arriving[goal] = work, tensor, place

    def _release(self, rank, place):
        """Lets go of what that rank has used at `place` in its order or before."""
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
