"""Traces: the spans of a request form one tree, through every interface."""

import json
import os
import signal
import threading
from functools import partial
from urllib.request import Request, urlopen

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.serving.engines import ENDLESS, version_of
from tests.serving.processes import PATIENCE, until
from tests.serving.world import ENGINE, post
from utils.serving.client import tensors
from utils.serving.engine import trace
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import SamplingParams
from utils.serving.gateway import Gateway

pytestmark = pytest.mark.timeout(300)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
MALFORMED = [
    "", "nonsense", GOOD[:-1], GOOD + "0", GOOD + "-00", f" {GOOD}", f"{GOOD}\n", GOOD.upper(),
    f"01-{TRACE}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
    f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-0g", f"00-{TRACE[:-1]}x-{SPAN}-01",
    f"00_{TRACE}_{SPAN}_01", f"00-{TRACE}-{SPAN}", None, 5, [GOOD], GOOD.encode(),
]
NEW = 6


def spans_of(file, trace_id=TRACE):
    """{name: span} of a trace, each name once."""
    lines = file.read_text().splitlines() if file.exists() else []
    spans = [span for span in map(json.loads, lines) if span["traceId"] == trace_id]
    assert len({span["name"] for span in spans}) == len(spans), spans
    return {span["name"]: span for span in spans}


# ---- contexts and lines


def test_a_context_goes_there_and_back():
    context = trace.parse(GOOD)
    assert context == trace.Context(TRACE, SPAN, True) and context.header() == GOOD
    child = context.child()
    assert (child.trace_id, child.parent_id, child.sampled) == (TRACE, SPAN, True)
    assert child.span_id not in (SPAN, context.child().span_id)
    assert trace.parse(child.header()).span_id == child.span_id
    unsampled = trace.parse(f"00-{TRACE}-{SPAN}-02")  # only one flag is defined
    assert unsampled.child().header().endswith("-00")
    assert trace.parse(f"00-{TRACE}-{SPAN}-ff").header() == GOOD


@pytest.mark.parametrize("value", MALFORMED)
def test_what_is_no_traceparent_is_none(value):
    assert trace.parse(value) is None


def test_a_span_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "trace.jsonl"
    monkeypatch.setenv("KINTSUGI_TRACE", str(file))
    mine = trace.parse(GOOD).child()
    trace.write("gpt", mine, 10**18 + 1, 10**18 + 2, finish="stop", error="two\nlines")
    trace.write("gpt", trace.parse(f"00-{TRACE}-{SPAN}-00"), 1, 2)
    trace.write("gpt", None, 1, 2)
    [line] = file.read_text().splitlines()
    assert json.loads(line) == {
        "traceId": TRACE, "spanId": mine.span_id, "parentSpanId": SPAN, "name": "gpt",
        "startTimeUnixNano": 10**18 + 1, "endTimeUnixNano": 10**18 + 2,
        "attributes": {"finish": "stop", "error": "two\nlines"},
    }


def test_many_write_to_one_file(tmp_path, monkeypatch):
    file = tmp_path / "trace.jsonl"
    monkeypatch.setenv("KINTSUGI_TRACE", str(file))

    def some(number):
        for _ in range(50):
            trace.write("span", trace.parse(GOOD).child(), number, number, text="x" * 500)

    threads = [threading.Thread(target=some, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({span["spanId"] for span in spans}) == len(spans) == 400


def test_nothing_is_written_without_the_variable(tmp_path, monkeypatch):
    monkeypatch.delenv("KINTSUGI_TRACE", raising=False)
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments))
    trace.write("gpt", trace.parse(GOOD), 1, 2)
    monkeypatch.setenv("KINTSUGI_TRACE", "")
    trace.write("gpt", trace.parse(GOOD), 1, 2)
    assert not opened and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_named_once(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KINTSUGI_TRACE", str(tmp_path / "none" / "trace"))
    for _ in range(3):
        trace.write("gpt", trace.parse(GOOD), 1, 2)
    os.mkfifo(tmp_path / "pipe")  # without a reader: must not block
    monkeypatch.setenv("KINTSUGI_TRACE", str(tmp_path / "pipe"))
    trace.write("gpt", trace.parse(GOOD), 1, 2)
    first, second = capfd.readouterr().err.splitlines()
    assert "none/trace' cannot be written: No such file or directory" in first
    assert "pipe' cannot be written" in second


# ---- the engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    virtual = {"kind": torch.randn(5, 16)}
    folder = version_of(ENDLESS, tmp_path_factory.mktemp("engine"), 1, virtual)
    with Engine(folder, max_num_seqs=1) as engine:
        yield engine


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("KINTSUGI_TRACE", str(tmp_path / "trace.jsonl"))
    return tmp_path / "trace.jsonl"


def test_the_phases_of_a_request(engine, file):
    context = trace.parse(GOOD)
    stream = engine.submit([1, 2], SamplingParams(NEW), prompt="kind", context=context)
    stream.result()
    engine.complete([1, 2], SamplingParams(NEW))  # without a trace
    spans = until(lambda: len(found := spans_of(file)) == 3 and found)
    assert list(spans) == ["queue", "prefill", "decode"]
    assert {span["parentSpanId"] for span in spans.values()} == {SPAN}
    times = [(span["startTimeUnixNano"], span["endTimeUnixNano"]) for span in spans.values()]
    assert times[0][1] == times[1][0] and times[1][1] == times[2][0]
    assert all(begin <= end for begin, end in times)
    known = {"prompt_tokens": 7, "weights_version": "1"}
    assert spans["queue"]["attributes"] == spans["prefill"]["attributes"] == known
    assert spans["decode"]["attributes"] == known | {"completion_tokens": NEW, "finish": "length"}


def test_who_is_cancelled_in_the_queue_has_no_other_span(engine, file):
    running = engine.submit([1], SamplingParams(50_000))
    assert running.read(PATIENCE).tokens
    waiting = engine.submit([1], SamplingParams(NEW), context=trace.parse(GOOD))
    waiting.cancel()
    running.cancel()
    spans = until(lambda: spans_of(file))
    assert list(spans) == ["queue"]
    assert spans["queue"]["attributes"]["finish"] == "cancelled"


@pytest.mark.thorough
def test_a_request_that_is_cut_off_says_why(engine, file):
    stream = engine.submit([1], SamplingParams(50_000), context=trace.parse(GOOD))
    assert stream.read(PATIENCE).tokens
    until(lambda: "prefill" in spans_of(file))
    os.kill(engine.pids[0], signal.SIGKILL)
    decode = until(lambda: spans_of(file).get("decode"))
    assert "was killed by SIGKILL" in decode["attributes"]["error"]
    until(lambda: engine.ready)


# ---- through the server


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


def by_http(server, given, endpoint="generate", **fields):
    """(status, body) of a request with a traceparent."""
    fields = {"text_input": "def ", "max_tokens": NEW, "traceparent": given, **fields}
    return post(server, endpoint=endpoint, **fields)


def by_stream(server, given):
    return by_http(server, given, "generate_stream", stream=True)


def by_grpc(server, given, model="gpt", **values):
    values = values or {"text_input": b"def "}
    request = service_pb2.ModelInferRequest(model_name=model)
    types = {**ENGINE, "text_input": "BYTES"}
    for tensor in tensors({**values, "max_tokens": NEW, "stream": True}, types):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(
            iter([request]), timeout=PATIENCE, metadata=[("traceparent", given)]
        )
        answers = list(call)
    errors = [answer.error_message for answer in answers if answer.error_message]
    return 400 if errors else 200, "".join(errors)


@pytest.mark.parametrize("way", [by_http, by_stream, by_grpc])
def test_the_spans_of_a_request_join(server, client, traces, way):
    trace_id = os.urandom(16).hex()
    status, said = way(server, f"00-{trace_id}-{SPAN}-01")
    assert status == 200, said
    spans = until(lambda: len(found := spans_of(traces, trace_id)) == 4 and found)
    assert set(spans) == {"gpt", "queue", "prefill", "decode"}
    gpt = spans.pop("gpt")
    assert gpt["parentSpanId"] == SPAN
    assert {span["parentSpanId"] for span in spans.values()} == {gpt["spanId"]}
    for span in spans.values():
        assert gpt["startTimeUnixNano"] <= span["startTimeUnixNano"]
        assert span["startTimeUnixNano"] <= span["endTimeUnixNano"]
    prompt = client.answer("def ", max_tokens=1)["prompt_tokens"]
    known = {"prompt_tokens": prompt, "weights_version": "1", "completion_tokens": NEW}
    assert gpt["attributes"] == spans["decode"]["attributes"] == known | {"finish": "length"}


def test_the_spans_of_a_request_through_the_gateway_join(server, traces, monkeypatch):
    """Over Triton's protocol and OpenAI's; without a traceparent, in a new trace."""
    monkeypatch.setenv("KINTSUGI_TRACE", str(traces))
    asked = [
        ("/v2/models/gpt/generate", {"text_input": "def ", "max_tokens": NEW}),
        ("/v2/models/gpt/generate_stream", {"text_input": "def ", "stream": True}),
        ("/v1/completions", {"model": "gpt", "prompt": "def ", "max_tokens": NEW}),
    ]
    with Gateway(server) as gateway:
        for path, body in asked:
            for headers in ({"traceparent": f"00-{os.urandom(16).hex()}-{SPAN}-01"}, {}):
                own = traced_by(gateway, path, body, headers)
                spans = until(partial(all_spans, traces, own.trace_id))
                assert spans["gateway"]["spanId"] == own.span_id == spans["gpt"]["parentSpanId"]
                assert spans["gateway"]["parentSpanId"] == (SPAN if headers else "")
                assert spans["decode"]["parentSpanId"] == spans["gpt"]["spanId"]
                assert spans["gateway"]["attributes"] == {"route": route(path), "status": 200}


def traced_by(gateway, path, body, headers):
    """The gateway's span of a request, from the header of its answer."""
    request = Request(f"http://{gateway.http}{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=PATIENCE) as answer:
        answer.read()
        return trace.parse(answer.headers["traceparent"])


def all_spans(traces, trace_id):
    found = spans_of(traces, trace_id)
    return found if len(found) == 5 else None


def route(path):
    return path.replace("/gpt/", "/{model}/")


def test_the_engine_called_directly(server, traces):
    trace_id = os.urandom(16).hex()
    status, said = by_grpc(server, f"00-{trace_id}-{SPAN}-01", "gpt_engine", input_ids=[7, 8])
    assert status == 200, said
    spans = until(lambda: len(found := spans_of(traces, trace_id)) == 3 and found)
    assert {span["parentSpanId"] for span in spans.values()} == {SPAN}


def test_a_refused_request_leaves_its_reason(server, traces):
    trace_id = os.urandom(16).hex()
    status, _ = by_http(server, f"00-{trace_id}-{SPAN}-01", top_p=2.0)
    assert status == 400
    spans = until(lambda: spans_of(traces, trace_id))
    assert list(spans) == ["gpt"]
    assert spans["gpt"]["attributes"]["error"].startswith("INVALID_ARG: top_p 2.0")


def test_what_is_no_traceparent_is_ignored(server, traces):
    before = traces.read_text() if traces.exists() else ""
    some = [given for given in MALFORMED if isinstance(given, str | int)]
    for given in [*some, "caf\xe9", f"00-{TRACE}-{SPAN}-00"]:
        status, said = by_http(server, given)
        assert status == 200, (given, said)
    for given in [one.strip() for one in some if isinstance(one, str) and one.strip() != GOOD]:
        assert by_grpc(server, given)[0] == 200, given
    trace_id = os.urandom(16).hex()  # the only trace that may be written
    by_http(server, f"00-{trace_id}-{SPAN}-01")
    until(lambda: len(spans_of(traces, trace_id)) == 4)
    new = traces.read_text().removeprefix(before).splitlines()
    assert {json.loads(line)["traceId"] for line in new} == {trace_id}
