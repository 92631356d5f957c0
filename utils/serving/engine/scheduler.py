"""Schedules requests: the queue, the running batch, the blocks of the cache, and each step's work.

    scheduler = Scheduler(max_num_seqs=16, num_blocks=512, queue=64, prefill_chunk=256)
    scheduler.add(request)                  # Unavailable when the queue is full
    step = scheduler.plan()                 # a Step, or None if there is nothing to do
    done = scheduler.advance(step, tokens)  # the ranks' tokens -> [(request, token), ...]

Continuous batching (Yu et al., Orca, OSDI 2022): requests join and leave between two steps, and
none waits for the longest. A long prompt is read in chunks, so that running requests continue in
the meantime (Agrawal et al., arXiv:2308.16369). A request takes blocks of the cache as it grows
(`blocks.py`); if none is left, the request that joined last gives its blocks back and waits, first
in the queue, to be read again. No torch and no clock: this is pure bookkeeping.

A step may be planned before the previous step's tokens have arrived: the ranks know them. They
execute steps in order, so whatever a planned step writes is available to the next.
"""

import secrets
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from utils.serving.engine.blocks import BLOCK, Blocks, NoBlocks, blocks_for, keys_of
from utils.serving.engine.request import BadRequest, SamplingParams, Unavailable, check_tokens
from utils.serving.engine.version import Version

LAST = -1  # instead of a token: the one that the ranks chose last for this slot
NOT_FINITE = -2  # instead of a token that ranks chose: its logits are NaN or infinite


@dataclass(eq=False)
class Request:
    """One request, from the queue to its last token."""

    id: str
    tokens: list[int]
    sampling: SamplingParams
    prompt: str | None = None  # name of the virtual tokens in front
    virtual: int = 0  # how many virtual tokens
    slot: int | None = None  # where the ranks keep its table and its sampler, while it runs
    blocks: list[int] = field(default_factory=list)  # its table: block i has positions 16 i to ...
    keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as known
    kept: int = 0  # blocks that other requests can find
    preempted: bool = False  # whether its blocks were ever given to another request
    shared: int = 0  # positions of its prefix that were in the cache when it joined
    target: int = 0  # positions to be read before its next token
    cached: int = 0  # its positions in the cache once the planned steps are done
    new: list[int] = field(default_factory=list)  # generated so far
    asked: int = 0  # tokens of planned steps that have not arrived
    finish: str | None = None
    came: float = 0.0  # arrival time, on the clock of the statistics
    heard: float = 0.0  # time of its last token, on the same clock

    @classmethod
    def of(
        cls,
        version: Version,
        max_model_len: int,
        tokens: list[int],
        sampling: SamplingParams | None = None,
        prompt: str | None = None,
        id: str | None = None,
    ) -> "Request":
        """A caller's request. Raises BadRequest unless `version` can serve it within
        `max_model_len` positions."""
        tokens = check_tokens(tokens, version.model.vocab_size)
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise BadRequest(f"sampling is a {type(sampling).__name__}: give a SamplingParams")
        if not (id is None or isinstance(id, str)):
            raise BadRequest(f"id {id!r:.80} is not a string")
        virtual = 0
        if prompt is not None:
            if not isinstance(prompt, str) or prompt not in version.prompts:
                known = ", ".join(sorted(version.prompts)) or "no prompts"
                raise BadRequest(f"prompt {prompt!r:.80} is unknown: this version has {known}")
            virtual = version.prompts[prompt]
        if not tokens and not virtual:
            raise BadRequest("there is nothing to continue: give at least one token, or a prompt")
        if sampling.max_tokens == -1:  # as many as positions are left, but at least one
            left = max_model_len - virtual - len(tokens)
            sampling = replace(sampling, max_tokens=max(1, left))
        if virtual + len(tokens) + sampling.max_tokens > max_model_len:
            raise BadRequest(
                f"{virtual} virtual tokens + {len(tokens)} tokens + max_tokens "
                f"{sampling.max_tokens} exceed the {max_model_len} positions of a request"
            )
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbits(63))
        return cls(id or uuid.uuid4().hex, tokens, sampling, prompt, virtual)

    @property
    def length(self) -> int:
        """Positions before the first new token."""
        return self.virtual + len(self.tokens)

    @property
    def decoding(self) -> bool:
        """Whether everything before the next token has been read, and another token is wanted."""
        read = self.cached >= self.target
        return read and len(self.new) + self.asked < self.sampling.max_tokens

    def content(self) -> list:
        """The content of each known position."""
        return [(self.prompt, i) for i in range(self.virtual)] + self.tokens + self.new


@dataclass(frozen=True)
class PrefillChunk:
    """A range of a request's positions, to be read in one step."""

    request: Request
    start: int
    stop: int
    first: bool  # whether nothing of the request has been read since it joined the batch
    last: bool  # whether a new token follows
    again: bool  # whether it was read before and lost its blocks to another request

    def command(self) -> dict:
        """The chunk for the ranks."""
        request = self.request
        virtual = request.virtual
        first, last = max(0, self.start - virtual), max(0, self.stop - virtual)
        tokens = (request.tokens + request.new)[first:last]
        command = {"slot": request.slot, "start": self.start, "tokens": tokens}
        if self.first:
            command["blocks"] = request.blocks
        if self.start < virtual:
            command["prompt"] = [request.prompt, self.start, min(self.stop, virtual)]
        if self.last:
            wanted = request.sampling
            command["sampling"] = [wanted.temperature, wanted.top_k, wanted.top_p, wanted.seed]
            if request.new:  # random numbers already used
                command["drawn"] = len(request.new)
            if wanted.logprobs is not None:
                command["logprobs"] = wanted.logprobs
        return command


@dataclass(frozen=True)
class Step:
    """The work of one step: chunks of prompts to read, and requests that get their next token."""

    chunks: list[PrefillChunk]
    running: list[Request]
    grown: list[tuple[int, int]]  # (slot, one more block of it)
    spoilt: Sequence[int] = ()  # blocks to zero first

    def expected(self) -> list[Request]:
        """The requests that get a token, in the order of the ranks' reply."""
        return [chunk.request for chunk in self.chunks if chunk.last] + self.running

    def command(self) -> dict:
        """The command for the ranks."""
        return {
            "prefill": [chunk.command() for chunk in self.chunks],
            "slots": [request.slot for request in self.running],
            "tokens": [
                request.new[-1] if request.asked == 1 else LAST for request in self.running
            ],
            "blocks": self.grown,
        } | ({"spoilt": list(self.spoilt)} if self.spoilt else {})


class Scheduler:
    """First come, first served.

    max_num_seqs    requests that run together: the number of slots
    num_blocks      blocks of the cache, at least as many as the longest request needs
    queue           further requests that may wait
    prefill_chunk   most prompt positions that one step reads, over all requests
    end_tokens      ids that end a text
    enable_prefix_caching   whether a prefix that is in the cache is reused
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_blocks: int,
        queue: int,
        prefill_chunk: int,
        end_tokens: Iterable[int] = (),
        enable_prefix_caching: bool = True,
    ):
        self.max_num_seqs, self.queue, self.prefill_chunk = max_num_seqs, queue, prefill_chunk
        self.end_tokens = frozenset(end_tokens)
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = Blocks(num_blocks)
        self.free = list(range(max_num_seqs))  # slots
        self.running = []  # requests that have a slot, in order of joining
        self.waiting = deque()
        self.requests = {}  # by id: waiting and running
        self._spoilt = []  # blocks that may hold NaN: a masked weight of 0 times NaN is NaN
        self.preemptions = 0  # how often a request lost its blocks to another

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises Unavailable when the queue is full."""
        if len(self.waiting) >= self.queue + len(self.free):
            raise Unavailable(
                f"the queue is full: {len(self.running)} requests run and {len(self.waiting)} "
                "wait; try again later"
            )
        self.requests[request.id] = request
        self.waiting.append(request)

    def plan(self) -> Step | None:
        """The next Step; None if no request runs or waits."""
        grown = self._grow()
        running = [request for request in self.running if request.decoding]
        left, chunks = self.prefill_chunk, []
        for request in self.running:  # requests whose prompt was read in part go first
            if request.cached < request.target and left > 0:
                chunks.append(self._chunk(request, left))
                left -= chunks[-1].stop - chunks[-1].start
        while left > 0 and self.waiting and self.free and self._enter(self.waiting[0]):
            chunks.append(self._chunk(self.waiting.popleft(), left))
            left -= chunks[-1].stop - chunks[-1].start
        for request in running:  # last, as on the ranks: no chunk may find what this step writes
            request.cached += 1
            request.asked += 1
            self._keep(request)
        if not chunks and not running:
            return None
        step, self._spoilt = Step(chunks, running, grown, self._spoilt), []
        return step

    def _grow(self):
        """Give a block to each request that needs one, oldest first, at the youngest's expense."""
        grown = []
        for request in list(self.running):
            if request.decoding and request.cached == BLOCK * len(request.blocks):
                while request.slot is not None and not self.blocks.free:
                    self._preempt(self.running[-1])
                if request.slot is not None:
                    (block,) = self.blocks.take(1)
                    request.blocks.append(block)
                    grown.append((request.slot, block))
        return grown

    def _preempt(self, request):
        self._leave(request)
        request.cached = request.target = 0
        request.preempted = True
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _chunk(self, request, left):
        start = request.cached
        request.cached = min(request.target, start + left)
        first, last = start == request.shared, request.cached == request.target
        request.asked += last
        self._keep(request)
        return PrefillChunk(request, start, request.cached, first, last, request.preempted)

    def _enter(self, request):
        """Give a request a slot and blocks for all positions to be read, reusing those that
        already hold its prefix; return whether there are enough."""
        if request.asked:  # it was preempted in this plan, and a token is still to arrive
            return False
        content = request.content()
        if self.enable_prefix_caching:
            request.keys = keys_of(content, request.keys)
        # the last position is always read: the next token is computed from it
        found = self.blocks.find(request.keys[: (len(content) - 1) // BLOCK])
        try:
            more = self.blocks.take(blocks_for(len(content)) - len(found))
        except NoBlocks:
            self.blocks.release(found)
            return False
        request.slot, request.blocks = self.free.pop(0), found + more
        request.target = len(content)
        request.kept, request.shared = len(found), BLOCK * len(found)
        request.cached = request.shared
        self.running.append(request)
        return True

    def _keep(self, request):
        """Let other requests find a request's blocks that are full and known."""
        if not self.enable_prefix_caching:
            return
        known = request.length + len(request.new)
        full = min(request.cached, known) // BLOCK
        if full > len(request.keys):
            request.keys = keys_of(request.content(), request.keys)
        for place in range(request.kept, full):
            self.blocks.keep(request.blocks[place], request.keys[place])
        request.kept = max(request.kept, full)

    def advance(self, step: Step, tokens: list[int]) -> list[tuple[Request, int]]:
        """Take the tokens of a step; return (request, token) for each request that continues or
        ends now.

        Requests that were cancelled in the meantime are left out, and so are those that end because
        their logits are not finite.
        """
        served = []
        for request, token in zip(step.expected(), tokens, strict=True):
            if request.finish is not None:
                continue
            request.asked -= 1
            if token == NOT_FINITE:
                blocks = request.blocks
                self.end(request, "failed")
                self._spoilt += self.blocks.forget(blocks)
                continue
            request.new.append(token)
            if token in self.end_tokens:
                self.end(request, "stop")
            elif len(request.new) == request.sampling.max_tokens:
                self.end(request, "length")
            served.append((request, token))
        return served

    def end(self, request: Request, finish: str) -> None:
        """End a request, waiting or running, and free its slot and blocks for the next plan."""
        if request.finish is not None:
            return
        request.finish = finish
        del self.requests[request.id]
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._leave(request)

    def _leave(self, request):
        self._keep(request)
        self.running.remove(request)
        self.free.append(request.slot)
        self.blocks.release(request.blocks)
        request.slot, request.blocks = None, []

    def clear(self, num_blocks: int | None = None) -> list[Request]:
        """End every request, waiting or running, and return them; the cache counts as empty, with
        `num_blocks` blocks (None: as many as before)."""
        ended = list(self.requests.values())
        for request in ended:
            self.end(request, "cancelled")
        self.blocks = Blocks(self.blocks.size if num_blocks is None else num_blocks)
        self._spoilt = []
        return ended
