"""Who is served when: the queue, the slots of the running batch, and the work of each step.

    scheduler = Scheduler(max_num_seqs=16, queue=64, prefill_chunk=256, end_tokens=(0,))
    scheduler.add(request)                  # Unavailable when the queue is full
    step = scheduler.plan()                 # a Step, or None where there is nothing to do
    done = scheduler.advance(step, tokens)  # the ranks' tokens -> [(request, token), ...]

Continuous batching (Yu et al., Orca, OSDI 2022): requests join and leave between two steps; nobody
waits for the longest. A long prompt is read in chunks, so that those who run go on meanwhile
(Agrawal et al., arXiv:2308.16369). What several requests begin with is computed once: a slot keeps
its keys and values until it is taken again, and a request that begins like them copies these (Zheng
et al., SGLang, arXiv:2312.07104). No torch and no clock: this is bookkeeping only.
"""

import secrets
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import compress, count
from operator import ne

from utils.serving.engine.request import BadRequest, SamplingParams, Unavailable, check_tokens
from utils.serving.engine.version import Version


@dataclass(eq=False)
class Request:
    """One request, from the queue to its last token."""

    id: str
    tokens: list[int]
    sampling: SamplingParams
    prompt: str | None = None  # name of the virtual tokens in front
    virtual: int = 0  # how many those are
    slot: int | None = None  # its row of the batch and of the KV cache, while it runs
    shared: int = 0  # positions at its beginning that were in the cache when it came
    cached: int = 0  # positions of it that are in the cache once the planned step is done
    new: list[int] = field(default_factory=list)  # generated so far
    finish: str | None = None
    came: float = 0.0  # when, on the clock of whoever keeps statistics
    heard: float = 0.0  # when its last token came, likewise

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
        """The request of a caller, if `version` can serve it in `max_model_len` positions; else
        BadRequest."""
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
            raise BadRequest("there is nothing to continue: give one token at least, or a prompt")
        if sampling.max_tokens == -1:  # no limit but the positions; one must be left
            left = max_model_len - virtual - len(tokens)
            sampling = replace(sampling, max_tokens=max(1, left))
        if virtual + len(tokens) + sampling.max_tokens > max_model_len:
            raise BadRequest(
                f"{virtual} virtual tokens + {len(tokens)} tokens + max_tokens "
                f"{sampling.max_tokens} are more than the {max_model_len} positions that are served"
            )
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=secrets.randbits(63))
        return cls(id or uuid.uuid4().hex, tokens, sampling, prompt, virtual)

    @property
    def length(self) -> int:
        """Positions before the first new token."""
        return self.virtual + len(self.tokens)


@dataclass(frozen=True)
class PrefillChunk:
    """A part of a request's positions, to be read in one step."""

    request: Request
    start: int
    stop: int
    source: int | None = None  # slot that has the same before `start`, where its own has not

    @property
    def first(self) -> bool:
        """Whether nothing of it was read before."""
        return self.start == self.request.shared

    @property
    def last(self) -> bool:
        """Whether the first new token follows."""
        return self.stop == self.request.length

    def command(self) -> dict:
        """The chunk for the ranks; virtual tokens come whole, with the first one."""
        request = self.request
        first, last = max(0, self.start - request.virtual), self.stop - request.virtual
        command = {"slot": request.slot, "start": self.start, "tokens": request.tokens[first:last]}
        if self.source is not None:
            command["source"] = self.source
        if self.start == 0 and request.prompt is not None:
            command["prompt"] = request.prompt
        if self.last:
            wanted = request.sampling
            command["sampling"] = [wanted.temperature, wanted.top_k, wanted.top_p, wanted.seed]
            if wanted.logprobs is not None:
                command["logprobs"] = wanted.logprobs
        return command


@dataclass(frozen=True)
class Step:
    """The work of one step: chunks of prompts to read, and requests that get their next token."""

    chunks: list[PrefillChunk]
    running: list[Request]

    def expected(self) -> list[Request]:
        """The requests that get a token, in the order of the ranks' answer."""
        return [chunk.request for chunk in self.chunks if chunk.last] + self.running

    def command(self) -> dict:
        """What the ranks are told."""
        return {
            "prefill": [chunk.command() for chunk in self.chunks],
            "slots": [request.slot for request in self.running],
            "tokens": [request.new[-1] for request in self.running],
        }


class Scheduler:
    """First come, first served.

    max_num_seqs    requests that run together: as many slots there are
    queue           requests that may wait besides
    prefill_chunk   positions of prompts that are read in one step at most, over all requests
                    (virtual tokens of one request are never divided)
    end_tokens      ids that end a text
    enable_prefix_caching   whether a beginning that is in the cache is taken from there
    """

    def __init__(
        self,
        max_num_seqs: int,
        queue: int,
        prefill_chunk: int,
        end_tokens: Iterable[int],
        enable_prefix_caching: bool = True,
    ):
        self.queue, self.prefill_chunk = queue, prefill_chunk
        self.end_tokens = frozenset(end_tokens)
        self.enable_prefix_caching = enable_prefix_caching
        self.slots = [None] * max_num_seqs  # the request in each
        self.free = list(range(max_num_seqs))  # slots; the one that was left longest ago is first
        self.kept = [None] * max_num_seqs  # the request that each has positions of; it may be over
        self.waiting = deque()
        self.requests = {}  # by id: waiting and running

    @property
    def running(self) -> list[Request]:
        """The requests that hold a slot, in the order of the slots."""
        return [request for request in self.slots if request is not None]

    def add(self, request: Request) -> None:
        """Puts a request into the queue. Raises Unavailable when that is full."""
        if len(self.waiting) >= self.queue + len(self.free):
            raise Unavailable(
                f"the queue is full: {len(self.running)} requests run and {len(self.waiting)} "
                "wait; try again later"
            )
        self.requests[request.id] = request
        self.waiting.append(request)

    def plan(self) -> Step | None:
        """The next Step; None where nothing runs and nobody waits."""
        running = [request for request in self.running if request.new]
        left, chunks = self.prefill_chunk, []
        for request in self.running:  # those whose prompt was read in part go first
            if not request.new:
                chunks.append(self._chunk(request, left))
                left -= chunks[-1].stop - chunks[-1].start
        while left > 0 and self.waiting and self.free:
            request = self.waiting.popleft()
            chunks.append(self._chunk(request, left, self._enter(request)))
            left -= chunks[-1].stop - chunks[-1].start
        for request in running:  # last, as the ranks do it: a chunk copies what was before
            request.cached += 1
        return Step(chunks, running) if chunks or running else None

    def _chunk(self, request, left, source=None):
        start = request.cached
        request.cached = min(request.length, max(start + left, request.virtual))
        return PrefillChunk(request, start, request.cached, source)

    def _enter(self, request):
        """Gives a request a slot with the longest beginning of it that is in the cache; returns the
        slot to copy that from, or None."""
        found = [_agreement(request, kept) for kept in self.kept]
        taken = [slot for slot, one in enumerate(self.slots) if one is not None]

        def cost(slot):
            """The rows of the batch, then whether something is lost that might be wanted again."""
            kept, rows = self.kept[slot], [slot, *taken[:1], *taken[-1:]]
            return max(rows) - min(rows), kept is not None and kept.cached > found[slot]

        request.slot = min(self.free, key=cost)
        self.free.remove(request.slot)
        request.shared = request.cached = max(found)
        source = None if found[request.slot] == request.shared else found.index(request.shared)
        self.slots[request.slot] = request
        if self.enable_prefix_caching:
            self.kept[request.slot] = request
        return source

    def advance(self, step: Step, tokens: list[int]) -> list[tuple[Request, int]]:
        """Takes the tokens of a step: (request, token) for each request that goes on or ends now.

        Those that were cancelled while the ranks worked are left out.
        """
        served = []
        for request, token in zip(step.expected(), tokens, strict=True):
            if request.finish is not None:
                continue
            request.new.append(token)
            if token in self.end_tokens:
                self.end(request, "stop")
            elif len(request.new) == request.sampling.max_tokens:
                self.end(request, "length")
            served.append((request, token))
        return served

    def end(self, request: Request, finish: str) -> None:
        """Ends a request, wherever it is; its slot is free for the next plan."""
        if request.finish is not None:
            return
        request.finish = finish
        del self.requests[request.id]
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self.slots[request.slot] = None
            self.free.append(request.slot)

    def clear(self) -> list[Request]:
        """Ends every request, waiting or running, and returns them; the cache counts as empty."""
        ended = list(self.requests.values())
        for request in ended:
            self.end(request, "cancelled")
        self.kept = [None] * len(self.slots)
        return ended


def _agreement(request, kept):
    """At how many positions a request begins like one that is kept; but its last one is computed
    anew, because what follows is read from it, and virtual tokens are never divided."""
    if kept is None or kept.prompt != request.prompt:
        return 0
    tokens = (kept.tokens + kept.new)[: kept.cached - kept.virtual]
    least = min(len(tokens), len(request.tokens))
    equal = next(compress(count(), map(ne, tokens, request.tokens)), least)
    positions = min(request.virtual + equal, request.length - 1)
    return positions if positions >= request.virtual else 0
