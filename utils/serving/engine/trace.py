"""Traces: where each request was, and how long, in every process that it passes through.

    context = parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")   # the caller's
    mine = context.child()                # our span, whose parent is the caller's
    ask(..., traceparent=mine.header())   # the next process, whose spans are children of ours
    write("gpt", mine, begin_ns, end_ns, finish="stop")

W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/). A span is one line of JSON in the
file that the environment variable KINTSUGI_TRACE names, with the names of OpenTelemetry's JSON; all
processes of a machine write to the same file. If the variable is not set, nothing is written.
"""

import functools
import json
import os
import re
import secrets
import sys
import time
from dataclasses import dataclass
from typing import Any

HEADER = "traceparent"
FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True)
class Context:
    """A span of a trace, by its ids in hexadecimal. sampled: whether it is to be recorded."""

    trace_id: str
    span_id: str
    sampled: bool
    parent_id: str = ""

    def child(self) -> "Context":
        """A new span within this one."""
        span_id = f"{secrets.randbits(64) or 1:016x}"  # 0 means none
        return Context(self.trace_id, span_id, self.sampled, self.span_id)

    def header(self) -> str:
        """The traceparent to send with calls made for this span."""
        return f"00-{self.trace_id}-{self.span_id}-{self.sampled:02x}"


def parse(traceparent: str | None) -> Context | None:
    """The caller's context; None if there is none or it is not a valid traceparent."""
    found = FORM.fullmatch(traceparent) if isinstance(traceparent, str) else None
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return Context(found[1], found[2], bool(int(found[3], 16) & 1))


def of_request(request: Any) -> Context | None:
    """The context of a Triton request: with gRPC from its header, which the server is configured
    to forward; with `generate` from a JSON field, as it forwards no header (server issue 8790)."""
    try:
        given = json.loads(request.parameters() or "{}")
    except ValueError:  # a header that is not text
        return None
    return parse({name.lower(): value for name, value in given.items()}.get(HEADER))


def write(
    name: str, context: Context | None, begin_ns: int, end_ns: int, **attributes: Any
) -> None:
    """Record a span, if it was sampled. begin_ns, end_ns: from time.time_ns(); attributes: JSON
    values.

    Never raises: if the file cannot be written, reports it once on standard error.
    """
    file = os.environ.get("KINTSUGI_TRACE")
    if not file or context is None or not context.sampled:
        return
    span = {
        "traceId": context.trace_id, "spanId": context.span_id,
        "parentSpanId": context.parent_id, "name": name,
        "startTimeUnixNano": begin_ns, "endTimeUnixNano": end_ns, "attributes": attributes,
    }
    try:
        # so that a pipe without a reader is an error instead of a wait
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(file, flags, 0o644)
        try:  # one call, so that lines of several processes are not interleaved
            os.write(descriptor, json.dumps(span).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        _complain(f"KINTSUGI_TRACE {file!r} cannot be written: {error.strerror}")


@functools.cache
def _complain(sentence):
    print(sentence, file=sys.stderr, flush=True)


class Phases:
    """Consecutive spans of a request, all children of `context`.

    begin(name)   ends the previous span, with the common attributes and those given now
    """

    def __init__(self, context: Context, **attributes: Any):
        self.context, self.attributes = context, attributes
        self.name, self.since = None, 0

    def begin(self, name: str | None, **attributes: Any) -> None:
        """Begin the next span; None: no further span."""
        now = time.time_ns()
        if self.name is not None:
            known = self.attributes | attributes
            write(self.name, self.context.child(), self.since, now, **known)
        self.name, self.since = name, now
