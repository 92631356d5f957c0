"""A request as its caller sees it: sampling parameters, streamed results, and errors.

    SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9, seed=1, stop=("\\n\\n",))
    stream = engine.submit(tokens, sampling)
    for chunk in stream: chunk.tokens, chunk.text, chunk.finish

Invalid sampling parameters raise BadRequest when the object is created.
"""

import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

STOPS, STOP_CHARACTERS = 8, 64  # most stop strings per request, most characters in each
LOGPROBS = 20  # most alternatives reported per token


class BadRequest(ValueError):
    """The request can never be served; the message names the value and the fix."""


class Unavailable(RuntimeError):
    """The request was not served, through no fault of its own; it may be retried later."""


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends. Raises BadRequest.

    max_tokens    most new tokens; -1: as many as fit into the engine's max_model_len
    temperature   0: always the likeliest token; 1: the model's own probabilities
    top_k         only the k likeliest tokens; 0: all
    top_p         only the likeliest tokens that together have this probability; 1: all
    seed          equal seeds give equal tokens, whatever else is served; None: random
    stop          up to 8 strings of 1 to 64 characters; the text ends before the first of them
    logprobs      report each token's log-probability and those of this many likeliest tokens
                  (0 to 20); None: report none
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self):
        seed, logprobs = self.seed, self.logprobs
        checked = {
            "max_tokens": _whole("max_tokens", self.max_tokens, 1, none=-1),
            "temperature": _real("temperature", self.temperature),
            "top_k": _whole("top_k", self.top_k, 0),
            "top_p": _real("top_p", self.top_p),
            "seed": None if seed is None else _whole("seed", seed, 0, 2**63 - 1),
            "stop": _strings(self.stop),
            "logprobs": None if logprobs is None else _whole("logprobs", logprobs, 0, LOGPROBS),
        }
        if not 0 < checked["top_p"] <= 1:
            raise BadRequest(f"top_p {self.top_p!r} must be above 0 and at most 1 (1: all tokens)")
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def _whole(name, value, least, most=2**31 - 1, none=None):
    """The value as an int; `none`: a further value that means "no limit"."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not (least <= number <= most or number == none):
        no_limit = "" if none is None else f", or {none} for no limit"
        raise BadRequest(
            f"{name} {_short(value)} is not an integer from {least} to {most}{no_limit}"
        )
    return number


def _real(name, value):
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, (bool, str, bytes)) or not 0 <= number < math.inf:
        raise BadRequest(f"{name} {_short(value)} is not a finite number of at least 0")
    return number


def _strings(stop):
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, (list, tuple)) or len(stop) > STOPS:
        raise BadRequest(f"stop {_short(stop)} is not a list of at most {STOPS} strings")
    for text in stop:
        if not isinstance(text, str) or not 1 <= len(text) <= STOP_CHARACTERS:
            raise BadRequest(
                f"stop string {_short(text)} is not a string of 1 to {STOP_CHARACTERS} characters"
            )
    return tuple(stop)


def check_tokens(tokens: Any, vocab_size: int) -> list[int]:
    """The tokens as a list of int. Raises BadRequest for anything but a list of token ids."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens  # numpy, torch
    if not isinstance(tokens, (list, tuple)):
        raise BadRequest(f"tokens {_short(tokens)} is not a list of token ids")
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadRequest(
                f"token {_short(token)} is not in the vocabulary: ids are integers from 0 to "
                f"{vocab_size - 1}"
            )
    return list(tokens)


def _short(value):
    """A value for a message, shortened if necessary."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- results


@dataclass(frozen=True)
class Chunk:
    """The output since the last chunk.

    tokens   ids, including the end token if it was generated
    text     the text that is final; it excludes the end token and the stop string
    finish   None until the end, then "stop" (end token or stop string), "length" or "cancelled"
    logprobs   if requested, one entry per token, as `Decoder.told` returns it
    """

    tokens: list[int]
    text: str
    finish: str | None
    logprobs: list[dict] = field(default_factory=list)


class Completion(Chunk):
    """The whole output of a request: all chunks together."""


class Stream:
    """The output of one request as it is generated: iterate over chunks, or wait for the whole.

    A slow reader gets larger chunks; the engine never waits for a reader. If the engine cannot
    finish the request, Unavailable follows the last chunk. A stream has a single reader.

    prompt_tokens   positions before the output: tokens and virtual tokens
    """

    def __init__(self, id: str, cancel: Callable[[str], object], prompt_tokens: int):
        self.id, self.prompt_tokens = id, prompt_tokens
        self._cancel = cancel
        self._changed = threading.Condition(threading.Lock())
        self._tokens, self._text, self._logprobs = [], [], []  # not read yet
        self._finish, self._error = None, None
        self._watched = False  # whether the reader wants to be woken at every token

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            chunk = self.read()
            yield chunk
            if chunk.finish:
                return

    def read(self, timeout: float | None = None) -> Chunk | None:
        """The next Chunk, as soon as there is any output; None after `timeout` seconds.

        Raises Unavailable.
        """
        with self._changed:
            self._watched = True
            self._changed.wait_for(self._something, timeout)
            self._watched = False
            return self._take(Chunk)

    def result(self, timeout: float | None = None) -> Completion | None:
        """Wait for the end; return all output not read yet, or None after `timeout` seconds.

        Raises Unavailable.
        """
        with self._changed:
            if not self._changed.wait_for(self._ended, timeout):
                return None
            if self._error:
                raise self._error
            return self._take(Completion)

    def cancel(self) -> None:
        """End the request now; its last chunk has finish "cancelled". No effect once it ended."""
        self._cancel(self.id)

    def _something(self):
        return self._tokens or self._text or self._ended()

    def _ended(self):
        return self._finish is not None or self._error is not None

    def _take(self, kind):
        if not self._something():
            return None
        if self._error and not (self._tokens or self._text):
            raise self._error
        taken = kind(self._tokens, "".join(self._text), self._finish, self._logprobs)
        self._tokens, self._text, self._logprobs = [], [], []
        return taken

    # the engine's side

    def put(
        self,
        tokens: list[int],
        text: str,
        finish: str | None = None,
        logprobs: Sequence[dict] = (),
    ) -> None:
        """Append output; a finish ends the stream."""
        with self._changed:
            if self._ended():
                return
            self._tokens += tokens
            self._logprobs += logprobs
            if text:
                self._text.append(text)
            self._finish = finish
            if self._watched or finish:
                self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End the stream with this exception."""
        with self._changed:
            if not self._ended():
                self._error = error
                self._changed.notify_all()
