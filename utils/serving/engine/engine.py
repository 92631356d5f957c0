"""The engine: many requests share one tensor-parallel model by continuous batching.

    with Engine("triton_model_repo/gpt_engine/1") as engine:      # waits until its ranks are ready
        stream = engine.submit([17, 4], SamplingParams(max_tokens=32))
        for chunk in stream:
            print(chunk.text, end="")
        engine.complete([17, 4]).tokens                           # submit and wait

One thread, the leader's loop, repeats four things: plan a step, send it to the ranks, hand out the
tokens of the previous step while they compute, and receive the new ones. A single rank gets its
next step before it has finished the current one. Requests come from any thread. Model, cache and
random numbers are in the ranks (`worker.py`), which are separate processes; when one dies, all
requests end with Unavailable and the ranks are started again.
"""

import copy
import queue as queues
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from utils.serving.engine import trace
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.ranks import RankDied, RankGroup, WakeUp
from utils.serving.engine.request import BadRequest, Completion, SamplingParams, Stream, Unavailable
from utils.serving.engine.scheduler import NOT_FINITE, Request, Scheduler
from utils.serving.engine.stats import Histogram, Stats
from utils.serving.engine.text_stream import Decoder, TextStream
from utils.serving.engine.version import LoadError, Version

LONGEST_PAUSE = 30.0  # most seconds between two attempts to start ranks
NO_NUMBERS = (
    "the weights give logits that are not finite (NaN or infinity): check the checkpoint, or serve "
    "it in a wider dtype"
)


class Engine:
    """Serves one version folder of the model repository.

    folder     written by the export; its manifest gives the number of ranks
    restarts   whether ranks that died are started again
    options    of EngineConfig

    Raises ValueError for invalid options, LoadError naming the file, Unavailable if the ranks do
    not start.
    """

    def __init__(self, folder: str | Path, *, restarts: bool = True, **options: Any):
        config = EngineConfig(**options)
        self.version = Version.read(folder)
        self.model, self.tp = self.version.model, self.version.tp
        self.max_model_len = config.length(self.model)
        self.decoder = Decoder.read(folder)
        self.restarts = restarts
        config.blocks(self.model)  # checks that they suffice; the ranks report their number
        self._scheduler = Scheduler(
            config.max_num_seqs, 0, config.queue, config.prefill_chunk, self.model.end_tokens,
            config.enable_prefix_caching,
        )
        self._streams = {}  # Request -> (Stream, TextStream)
        self._traced = {}  # Request -> Phases, for requests that are traced
        self._stats = Stats()
        self._lock = threading.Lock()  # over scheduler, streams and statistics
        self._wake_up = WakeUp()  # when there is work
        self._group, self._ready, self._idle = None, False, False
        self._why_not = "the engine is starting"  # the reason for not being ready
        self._closed = threading.Event()
        self._make_group = lambda: RankGroup(self.version, config)
        started = queues.SimpleQueue()
        self._loop = threading.Thread(target=self._run, args=(started,), daemon=True, name="engine")
        self._loop.start()
        try:
            error = started.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if error is not None:
            self.close()
            raise error if isinstance(error, LoadError) else Unavailable(str(error))

    # --- for callers, from any thread -----------------------------------------------------------

    def submit(
        self,
        tokens: list[int],
        sampling: SamplingParams | None = None,
        prompt: str | None = None,
        id: str | None = None,
        context: trace.Context | None = None,
    ) -> Stream:
        """Put a request into the queue and return its Stream.

        tokens   token ids;   prompt   name of virtual tokens to put before them
        id       a name to cancel it by, unique among requests being served; None: a random one
        context  the span of the caller: queue, prefill and decode become its children
        Raises BadRequest, or Unavailable when the queue is full or the ranks are down.
        """
        request = Request.of(self.version, self.max_model_len, tokens, sampling, prompt, id)
        stream = Stream(request.id, self.cancel, request.length)
        text = TextStream(self.decoder, request.tokens, request.sampling.stop)
        with self._lock:
            if not self._ready:
                self._stats.rejected += 1
                raise Unavailable(self._why_not)
            if request.id in self._scheduler.requests:
                raise BadRequest(f"the id {request.id!r} belongs to a request still being served")
            try:
                self._scheduler.add(request)
            except Unavailable:
                self._stats.rejected += 1
                raise
            self._streams[request] = stream, text
            if context is not None:
                number = self.version.number
                phases = trace.Phases(context, prompt_tokens=request.length, weights_version=number)
                phases.begin("queue")
                self._traced[request] = phases
            self._stats.submitted(request)
            if self._idle:
                self._wake_up.wake()
        return stream

    def complete(
        self, tokens: list[int], sampling: SamplingParams | None = None, prompt: str | None = None
    ) -> Completion:
        """Submit a request and wait for its Completion. Raises as `submit` does."""
        stream = self.submit(tokens, sampling, prompt)
        try:
            return stream.result()
        except KeyboardInterrupt:
            stream.cancel()
            raise

    def cancel(self, id: str) -> bool:
        """End a request now and free its slot; return whether one with this id existed."""
        with self._lock:
            request = self._scheduler.requests.get(id)
            if request is None:
                return False
            self._scheduler.end(request, "cancelled")
            stream, text = self._streams.pop(request)
            stream.put([], text.end(), "cancelled")
            self._end_trace(request)
            self._stats.cancelled += 1
        return True

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        return self._ready

    @property
    def threads(self) -> int:
        """CPU threads of each rank."""
        return self._group.threads if self._group else 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; empty while there are none."""
        group = self._group
        return group.pids if group else []

    def stats(self) -> dict:
        """The engine's current state and counters, as a dictionary of numbers."""
        with self._lock:
            now = self._stats.read(self._scheduler, len(self._streams))
            return {"ready": self._ready} | now

    def histograms(self) -> dict[str, Histogram]:
        """Histograms of durations since the start, by name; `Stats` explains each."""
        with self._lock:
            return copy.deepcopy(self._stats.histograms)

    def close(self) -> None:
        """End all requests with Unavailable, and the ranks. Closing twice does nothing."""
        self._closed.set()
        with self._lock:
            self._ready, self._why_not = False, "the engine was closed"
            self._fail_all(self._why_not)
        self._wake_up.wake()
        self._loop.join(1.0)
        while self._loop.is_alive():  # in a step or a slow start: no need to wait for it
            if self._group:
                self._group.kill()
            self._loop.join(0.1)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    # --- the loop, in its own thread ------------------------------------------------------------

    def _run(self, started):
        try:
            self._start_ranks()
        except Exception as error:
            self._closed.set()
            started.put(error)
        else:
            started.put(None)
        while not self._closed.is_set():
            try:
                self._serve()
            except Exception as error:  # whatever it is, no request may wait forever
                if not isinstance(error, RankDied):
                    traceback.print_exc()
                self._lose_ranks(error)
                self._restart()
        if self._group:
            self._group.close()

    def _serve(self):
        """Run continuous batching until the engine closes or a rank dies.

        If the ranks allow it, a step is sent while they compute the previous one."""
        under_way = deque()  # (step, when it was sent)
        served, told = [], {}  # (request, token) of the last step; log-probabilities to report
        begin = 0.0  # of the step that the ranks compute
        while not self._closed.is_set():
            with self._lock:
                step = self._scheduler.plan()
                self._idle = step is None and not under_way
            if step is not None:
                under_way.append((step, time.monotonic()))
                try:
                    self._group.send(step.command())
                finally:
                    self._begin_prefill(step)  # while the ranks compute
            self._hand_out(served, told)
            served = []
            if self._idle:
                self._group.wait(self._wake_up)
            elif step is None or len(under_way) == self._group.ahead:
                answer = self._group.receive()
                step, sent = under_way.popleft()
                asked = step.expected()
                told = {asked[int(place)]: x for place, x in answer.get("logprobs", {}).items()}
                with self._lock:
                    served = self._scheduler.advance(step, answer["tokens"])
                    if NOT_FINITE in answer["tokens"]:
                        failed = [one for one in asked if one.finish == "failed"]
                        failed = [one for one in failed if one in self._streams]
                        self._fail(failed, FloatingPointError(NO_NUMBERS))
                    begin, now = max(begin, sent), time.monotonic()
                    self._stats.stepped(step, served, now - begin)
                    begin = now

    def _hand_out(self, served, told):
        """Give each request its token as text, with the log-probabilities in `told`; a request
        whose stop string has appeared ends here."""
        with self._lock:
            for request, token in served:
                if request not in self._streams:  # cancelled meanwhile
                    continue
                stream, text = self._streams[request]
                if request in self._traced and self._traced[request].name == "prefill":
                    self._traced[request].begin("decode")
                new, stopped = "", False
                if token not in self.model.end_tokens:
                    new, stopped = text.add(token)
                if stopped:
                    self._scheduler.end(request, "stop")
                    request.finish = "stop"  # even if this was its last token anyway
                if request.finish:
                    new += text.end()
                    del self._streams[request]
                    self._stats.finished(request)
                    self._end_trace(request)
                known = [self.decoder.told(told[request])] if request in told else []
                stream.put([token], new, request.finish, known)

    def _begin_prefill(self, step):
        """Start the prefill span of traced requests that have just got a slot."""
        with self._lock:
            for chunk in step.chunks:
                if chunk.first and chunk.request in self._traced:
                    self._traced[chunk.request].begin("prefill")

    def _end_trace(self, request, **why):
        if phases := self._traced.pop(request, None):
            made = len(request.new)
            phases.begin(None, completion_tokens=made, finish=request.finish, **why)

    def _start_ranks(self):
        self._group = self._make_group()
        self._group.ready()
        with self._lock:
            self._scheduler.clear(self._group.blocks)
            self._ready = not self._closed.is_set()

    def _lose_ranks(self, error):
        """End every request, running or waiting: their computed state is lost."""
        with self._lock:
            self._ready = False
            if not self._closed.is_set():
                then = "; its ranks are being restarted, try again later" if self.restarts else ""
                self._why_not = f"the engine is down: {error}{then}"
                self._fail_all(f"{error}: the request was cut off, send it again")
        self._group.close()

    def _restart(self):
        """Try to start the ranks until that succeeds; without `restarts`, wait to be closed."""
        pause = 0.5
        while not self._closed.is_set():
            if self.restarts:
                try:
                    self._start_ranks()
                except Exception as error:  # anything from a damaged file to a lack of memory
                    self._group.close()
                    with self._lock:
                        self._why_not = f"the ranks failed to start: {error}"
                else:
                    self._stats.restarts += 1
                    return
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _fail_all(self, reason):
        self._scheduler.clear()
        self._fail(list(self._streams), Unavailable(reason))

    def _fail(self, requests, error):
        self._stats.failed += len(requests)
        for request in requests:
            stream, _ = self._streams.pop(request)
            stream.fail(error)
            self._end_trace(request, error=str(error))
