"""The engine: many requests share one tensor-parallel model by continuous batching.

    with Engine("triton_model_repo/gpt_engine/1") as engine:      # waits until its ranks are ready
        stream = engine.submit([17, 4], SamplingParams(max_tokens=32))
        for chunk in stream:
            print(chunk.text, end="")
        engine.complete([17, 4]).tokens                           # submit and wait

One thread, the leader's loop, does the same four things again and again: plan who is served, tell
the ranks, hand out the tokens of the step before while they compute, take the new ones. Requests
come from any thread. Model, cache and random numbers are in the ranks (`worker.py`), processes of
their own; when one dies, all requests end with Unavailable and the ranks are started again.
"""

import queue as queues
import threading
import time
import traceback
from collections import deque
from pathlib import Path

from utils.serving.engine.ranks import RankDied, RankGroup, WakeUp
from utils.serving.engine.request import BadRequest, Completion, SamplingParams, Stream, Unavailable
from utils.serving.engine.scheduler import Request, Scheduler, Step
from utils.serving.engine.text_stream import TextStream, load_tokenizer
from utils.serving.engine.version import LoadError, Version

WINDOW = 5.0  # seconds that "tokens per second" looks back
LONGEST_PAUSE = 30.0  # seconds between two attempts to start ranks that do not start


class Engine:
    """Serves one version folder of the model repository.

    folder         what the export wrote; its manifest says how many ranks
    max_num_seqs   requests that run together: slots, which are rows of the KV cache
    queue          requests that may wait besides; more are refused with Unavailable
    device         "cpu", "cuda" (one GPU a rank), or "auto": CUDA where every rank has a GPU
    threads        of each rank on the CPU; None: the cores but one, divided by the ranks (that one
                   is for the leader and the clients: a thread that waits for a core stops the rank)
    max_model_len  positions of a request at most, virtual and new tokens with it; None: what the
                   model has
    prefill_chunk  positions of prompts that are read in one step: how long others wait for them
    step_seconds   after which a rank that does not answer counts as dead
    restarts       whether ranks that died are started again

    Raises LoadError (by file name), Unavailable where ranks do not start.
    """

    def __init__(
        self,
        folder: str | Path,
        max_num_seqs: int = 16,
        queue: int = 64,
        device: str = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        prefill_chunk: int = 256,
        step_seconds: float = 20.0,
        start_seconds: float = 120.0,
        restarts: bool = True,
    ):
        _check(
            device,
            {"step_seconds": step_seconds, "start_seconds": start_seconds},
            max_num_seqs=max_num_seqs,
            queue=queue,
            prefill_chunk=prefill_chunk,
            threads=1 if threads is None else threads,
            max_model_len=1 if max_model_len is None else max_model_len,
        )
        self.version = Version.read(folder)
        self.model, self.tp = self.version.model, self.version.tp
        most = self.model.max_positions
        self.max_model_len = min(max_model_len or most, most)
        self.tokenizer = load_tokenizer(folder)
        self.restarts = restarts
        self.on_ready = None  # called with False when the ranks have died, True when they are back
        self._scheduler = Scheduler(
            max_num_seqs, queue, min(prefill_chunk, 4096), self.model.end_tokens
        )
        self._streams = {}  # Request -> (Stream, TextStream)
        self._stats = Stats()
        self._lock = threading.Lock()  # over scheduler, streams and statistics
        self._wake_up = WakeUp()  # when there is work
        self._group, self._ready, self._idle = None, False, False
        self._why_not = "the engine is starting"  # the reason for not being ready
        self._closed = threading.Event()
        self._make_group = lambda: RankGroup(
            self.version,
            max_num_seqs,
            self.max_model_len,
            device,
            threads,
            start_seconds,
            step_seconds,
        )
        started = queues.SimpleQueue()
        self._announcements = queues.SimpleQueue()
        self._loop = threading.Thread(target=self._run, args=(started,), daemon=True, name="engine")
        self._loop.start()
        threading.Thread(target=self._announce, daemon=True, name="engine news").start()
        try:
            error = started.get()
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if error is not None:
            self.close()
            raise error if isinstance(error, LoadError) else Unavailable(str(error))

    # --- what callers use, from any thread ------------------------------------------------------

    def submit(
        self,
        tokens: list[int],
        sampling: SamplingParams | None = None,
        prompt: str | None = None,
        id: str | None = None,
    ) -> Stream:
        """Puts a request into the queue and returns its Stream.

        tokens   token ids;   prompt   name of virtual tokens to put before them
        id       a name to cancel it by, unlike all others now served; None: one is made
        Raises BadRequest, and Unavailable when the queue is full or the ranks are down.
        """
        request = Request.of(self.version, self.max_model_len, tokens, sampling, prompt, id)
        stream = Stream(request.id, self.cancel)
        text = TextStream(self.tokenizer, request.sampling.stop)
        with self._lock:
            if not self._ready:
                self._stats.rejected += 1
                raise Unavailable(self._why_not)
            if request.id in self._scheduler.requests:
                raise BadRequest(f"the id {request.id!r} belongs to a request that is still served")
            try:
                self._scheduler.add(request)
            except Unavailable:
                self._stats.rejected += 1
                raise
            self._streams[request] = stream, text
            self._stats.submitted(request)
            if self._idle:
                self._wake_up.wake()
        return stream

    def complete(
        self, tokens: list[int], sampling: SamplingParams | None = None, prompt: str | None = None
    ) -> Completion:
        """Submits a request and waits for all of it: a Completion. Raises as `submit` does."""
        stream = self.submit(tokens, sampling, prompt)
        try:
            return stream.result()
        except KeyboardInterrupt:
            stream.cancel()
            raise

    def cancel(self, id: str) -> bool:
        """Ends a request now and frees its slot; whether there was one of this id."""
        with self._lock:
            request = self._scheduler.requests.get(id)
            if request is None:
                return False
            self._scheduler.end(request, "cancelled")
            stream, text = self._streams.pop(request)
            stream.put([], text.end(), "cancelled")
            self._stats.cancelled += 1
        return True

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self._ready

    @property
    def threads(self) -> int:
        """Threads of each rank on the CPU."""
        return self._group.threads if self._group else 0

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks; empty while there are none."""
        group = self._group
        return group.pids if group else []

    def stats(self) -> dict:
        """What the engine does now and has done: a dictionary of numbers."""
        with self._lock:
            return {"ready": self._ready} | self._stats.read(self._scheduler, self.max_model_len)

    def close(self) -> None:
        """Ends all requests with Unavailable, and the ranks. Closing twice does nothing."""
        self._closed.set()
        with self._lock:
            self._ready, self._why_not = False, "the engine was closed"
            self._fail_all(self._why_not)
        self._wake_up.wake()
        self._loop.join(1.0)
        while self._loop.is_alive():  # in a step, or in a start that takes long: no need to wait
            if self._group:
                self._group.kill()
            self._loop.join(0.1)
        self._announcements.put(None)

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
            except Exception as error:  # whatever it is: nobody may wait for ever
                if not isinstance(error, RankDied):
                    traceback.print_exc()
                self._lose_ranks(error)
                self._restart()
        if self._group:
            self._group.close()

    def _serve(self):
        """Continuous batching: until the engine closes, or a rank dies."""
        served = []  # (request, token) of the last step
        while not self._closed.is_set():
            with self._lock:
                step = self._scheduler.plan()
                self._idle = step is None
            if step is None:
                self._hand_out(served)
                served = []
                self._group.wait(self._wake_up)
                continue
            begin = time.monotonic()
            try:
                self._group.send(step.command())
            finally:
                self._hand_out(served)  # while the ranks compute
            tokens = self._group.receive()["tokens"]
            with self._lock:
                served = self._scheduler.advance(step, tokens)
                self._stats.stepped(step, served, time.monotonic() - begin)

    def _hand_out(self, served):
        """Gives each request its token as text; one whose stop string has come ends here."""
        with self._lock:
            for request, token in served:
                if request not in self._streams:  # cancelled meanwhile
                    continue
                stream, text = self._streams[request]
                new, stopped = "", False
                if token not in self.model.end_tokens:
                    new, stopped = text.add(token)
                if stopped:
                    self._scheduler.end(request, "stop")
                    request.finish = "stop"  # also where it was at its last token
                if request.finish:
                    new += text.end()
                    del self._streams[request]
                stream.put([token], new, request.finish)

    def _start_ranks(self):
        self._group = self._make_group()
        self._group.ready()
        with self._lock:
            self._ready = not self._closed.is_set()

    def _lose_ranks(self, error):
        """Ends all that is served or waits: what was computed for it is gone."""
        with self._lock:
            self._ready = False
            if not self._closed.is_set():
                then = "; its ranks are started again, try again later" if self.restarts else ""
                self._why_not = f"the engine is down: {error}{then}"
                self._fail_all(f"{error}: the request was cut off, send it again")
                self._announcements.put(False)
        self._group.close()

    def _restart(self):
        """Starts ranks again, for as long as it takes; without `restarts`, waits to be closed."""
        pause = 0.5
        while not self._closed.is_set():
            if self.restarts:
                try:
                    self._start_ranks()
                except Exception as error:  # from a damaged file to a machine without memory
                    self._group.close()
                    with self._lock:
                        self._why_not = f"the ranks do not start: {error}"
                else:
                    self._stats.restarts += 1
                    self._announcements.put(True)
                    return
            self._closed.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _fail_all(self, reason):
        self._stats.failed += len(self._streams)
        for stream, _ in self._streams.values():
            stream.fail(Unavailable(reason))
        self._streams.clear()
        self._scheduler.clear()

    def _announce(self):
        """Calls `on_ready` in a thread of its own: it may take its time."""
        while (news := self._announcements.get()) is not None:
            try:
                if self.on_ready is not None:
                    self.on_ready(news)
            except Exception:
                traceback.print_exc()


def _check(device, limits, **numbers):
    """Raises ValueError for options that make no sense."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device {device!r} is not known: give "auto", "cpu" or "cuda"')
    for name, value in numbers.items():
        least = 0 if name == "queue" else 1
        if type(value) is not int or value < least:
            raise ValueError(f"{name} {value!r} is not a whole number of at least {least}")
    for name, value in limits.items():
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ValueError(f"{name} {value!r} is not a time limit: give seconds above 0")


class Stats:
    """What the engine counts: since the start, and of the last moments.

    stats.submitted(request);  stats.stepped(step, served, seconds)
    stats.read(scheduler, max_model_len)            # a dictionary of numbers
    """

    def __init__(self):
        self.tokens = self.requests = self.steps = self.restarts = 0
        self.failed = self.cancelled = self.rejected = 0
        self._first_total, self._first_count, self._first_last = 0.0, 0, 0.0
        self._recent = deque()  # (when, tokens, seconds) of the steps in the window

    def submitted(self, request: Request) -> None:
        """A request was taken."""
        self.requests += 1
        request.came = time.monotonic()

    def stepped(self, step: Step, served: list[tuple[Request, int]], seconds: float) -> None:
        """A step has given these (request, token)."""
        now = time.monotonic()
        self.steps += 1
        self.tokens += len(served)
        for request, _ in served:
            if len(request.new) == 1:
                self._first_last = now - request.came
                self._first_total += self._first_last
                self._first_count += 1
        self._recent.append((now, len(served), seconds))
        self._forget(now)

    def _forget(self, now):
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    def read(self, scheduler: Scheduler, max_model_len: int) -> dict:
        """Numbers by name; times in seconds, `kv_` in positions."""
        now = time.monotonic()
        self._forget(now)
        running, slots = scheduler.running, len(scheduler.slots)
        since = now - self._recent[0][0] + self._recent[0][2] if self._recent else 1.0
        return {
            "running": len(running),
            "waiting": len(scheduler.waiting),
            "slots": slots,
            "queue": scheduler.queue,
            "occupancy": len(running) / slots,
            "kv_used": sum(request.cached for request in running),
            "kv_size": slots * max_model_len,
            "tokens_total": self.tokens,
            "requests_total": self.requests,
            "requests_failed": self.failed,
            "requests_cancelled": self.cancelled,
            "requests_rejected": self.rejected,
            "restarts": self.restarts,
            "steps_total": self.steps,
            "tokens_per_second": sum(tokens for _, tokens, _ in self._recent) / since,
            "step_seconds": sum(s for _, _, s in self._recent) / max(1, len(self._recent)),
            "time_to_first_token_last": self._first_last,
            "time_to_first_token": self._first_total / max(1, self._first_count),
        }
