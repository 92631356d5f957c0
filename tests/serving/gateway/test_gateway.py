"""The gateway in front of a real server: what passes, what is refused, what needs a key."""

import asyncio
import http.client
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from threading import Event, Semaphore
from types import SimpleNamespace

import numpy as np
import pytest
import tritonclient.http as triton

from tests.patience import patience
from tests.serving.probe import MODELS, at_rest, frozen, generate, served_now
from tests.serving.processes import PATIENCE, callers, until
from tests.serving.triton_models import write_models
from tests.serving.world import MODELS as MODEL_FOLDERS
from tests.serving.world import SLOTS, kintsugi, ranks, serving
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT
from utils.serving.client import Client
from utils.serving.gateway import Gateway
from utils.serving.gateway.process import Served
from utils.serving.gateway.stubs import Stubs
from utils.serving.gateway.triton import Triton
from utils.serving.install import SETTLE
from utils.serving.server import ServerError

pytestmark = pytest.mark.timeout(900)

TEXT = "def "
BODY = 100_000  # bytes, this gateway's limit
GENERATE = "/v2/models/gpt/generate"


@pytest.fixture(scope="module")
def gateway(server):
    with Gateway(server, body_bytes=BODY) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def locked(server):
    with Gateway(server, control_key="up and down", api_key="text") as gateway:
        yield gateway


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def ask(gateway, path=GENERATE, body=None, method=None, **headers):
    """(status, headers, body) of one request; body: an object, or bytes."""
    host, port = gateway.http.split(":")
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    method = method or ("GET" if body is None else "POST")
    with closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()


def error_of(gateway, *arguments, **options):
    """(status, sentence) of a request that is refused."""
    status, _, body = ask(gateway, *arguments, **options)
    assert status >= 400, body
    return status, json.loads(body)["error"]


def text(**fields):
    return {"text_input": TEXT, "max_tokens": 6, **fields}


# --- what passes ----------------------------------------------------------------------------------


def test_answers_are_those_of_the_server(server, gateway):
    direct, through = Client(server, timeout=PATIENCE), Client(gateway, timeout=PATIENCE)
    for options in ({}, {"temperature": 1.0, "seed": 5}, {"stop": ["\n"], "max_tokens": 30}):
        options = {"max_tokens": 12, **options}
        assert through.answer(TEXT, **options) == direct.answer(TEXT, **options)
        assert "".join(through.stream(TEXT, **options)) == direct.generate(TEXT, **options)


def test_tritons_own_client_is_served(server, gateway):
    """Binary tensors and JSON, metadata, statistics, model control."""
    with closing(triton.InferenceServerClient(gateway.http)) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("gpt") and not client.is_model_ready("absent")
        assert client.get_server_metadata()["name"].startswith("kintsugi-")
        assert client.get_model_metadata("gpt_tokenize")["inputs"][0]["name"] == "text"
        assert client.get_inference_statistics("gpt")["model_stats"][0]["name"] == "gpt"
        key = bearer(gateway.control_key)
        index = client.get_model_repository_index(headers=key)
        assert {entry["name"] for entry in index} >= set(MODELS)
        for binary in (True, False):
            wanted = triton.InferInput("text", [1], "BYTES")
            wanted.set_data_from_numpy(np.array([b"def run"], dtype=object), binary_data=binary)
            asked = [triton.InferRequestedOutput("ids", binary_data=binary)]
            ids = client.infer("gpt_tokenize", [wanted], outputs=asked).as_numpy("ids")
            assert ids.tolist() == Tokenizer.load(MODEL_FOLDERS / "tiny").encode("def run")
        client.unload_model("gpt_detokenize", headers=key)
        assert not client.is_model_ready("gpt_detokenize")
        assert client.is_server_ready()  # an unloaded model is not required
        client.load_model("gpt_detokenize", headers=key)
        assert client.is_model_ready("gpt_detokenize")


def test_what_was_loaded_stays_for_a_moment(monkeypatch):
    """Unloaded at once, it may take the server down with it; see SETTLE."""
    triton, called = Triton("never called"), []

    async def whole(*call, seconds):
        called.append(time.monotonic())

    async def change():
        for action in ("load", "load", "unload"):
            await triton.control("gpt", action, seconds=5)

    monkeypatch.setattr(triton, "whole", whole)
    asyncio.run(change())
    first, second, unload = called
    assert second - first >= SETTLE and unload - second >= SETTLE


def test_metrics_of_all_in_one_place(gateway):
    ask(gateway, body=text())
    _, _, found = ask(gateway, "/metrics")
    assert "nv_inference_request_success" in found
    assert "kintsugi_tokens_total" in found
    assert f'kintsugi_gateway_requests_total{{route="{GENERATE.replace("gpt", "{model}")}"' in found


def test_a_trace_goes_on(gateway):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    status, headers, _ = ask(gateway, body=text(), traceparent=f"00-{trace}-{span}-01")
    version, same, own, flags = headers["traceparent"].split("-")
    assert (status, version, same, flags) == (200, "00", trace, "01") and own != span
    _, headers, _ = ask(gateway, body=text(), traceparent="nonsense")
    assert len(headers["traceparent"].split("-")[1]) == 32  # a new trace


# --- what is refused ------------------------------------------------------------------------------

REFUSED = [
    (text(max_token=3), "the field 'max_token' is not known: did you mean max_tokens?"),
    (text(max_tokens=4294967300), "max_tokens 4294967300 is not an integer from -2147483648"),
    (text(max_tokens=2.5), "max_tokens 2.5 is not an integer"),
    (text(max_tokens=True), "max_tokens True is not an integer"),
    (text(max_tokens=[1, 2]), "max_tokens has 2 values: give 1"),
    (text(temperature=1e39), "temperature 1e+39 is not a finite number"),
    (text(stream=1), "stream 1 is not true or false"),
    (text(stream=True), "stream is true, but generate sends one response: use generate_stream"),
    (text(text_input=5), "text_input 5 is not a string"),
    (text(id=5), "id 5 is not a string"),
    ({"max_tokens": 5}, "text_input is missing"),
    (text(text_input="\ud800"), "failed to parse the request JSON"),
    (b"", "the body is not JSON"),
    (b"[1]", "the body is a list: give a JSON object"),
    (b'{"text_input": "a", "temperature": NaN}', "NaN is not a number in JSON"),
    (b"\xff\xfe", "the body is not JSON"),
    (b"[" * 50_000, "the body is nested too deeply"),
    (text(temperature=-1), "temperature -1.0 is not a finite number of at least 0"),  # by the model
]


@pytest.mark.parametrize("body, sentence", REFUSED)
def test_a_bad_body_is_refused_in_a_sentence(gateway, body, sentence):
    status, said = error_of(gateway, body=body)
    assert (status, said.startswith("INVALID_ARG: ")) == (400, True)
    assert sentence in said


def infer(**tensor):
    given = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"], **tensor}
    return {"inputs": [given]}


@pytest.mark.parametrize(
    "body, sentence",
    [
        (infer(shape=[1, 2**40]), "has more elements than the body has bytes"),
        (infer(shape=[2**62, 0]), "has more elements than the body has bytes"),
        (infer(shape=[-1]), "shape [-1] is not a list of integers of 0 or more"),
        (infer(shape=7), "shape 7 is not a list of integers of 0 or more"),
        (infer(data=json.loads("[" * 40 + "]" * 40)), "nested too deeply"),
        (infer(data=[["a"], json.loads("[" * 40 + "]" * 40)]), "nested too deeply"),
        (infer(parameters={"shared_memory_region": "x"}), "does not work through the gateway"),
        (infer(dtype="BYTES"), "the field of inputs 'dtype' is not known: did you mean datatype?"),
        (infer(parameters={"binary_data_size": -1}), "binary_data_size -1 is not a number"),
        ({"inputs": 3}, "inputs is not a list of objects"),
        ({}, "Unable to parse 'inputs'"),
        (infer(datatype=None), "Unable to parse 'datatype'"),
        (infer(data=[5]), "Unable to parse JSON bytes array"),
        ({**infer(), "input": []}, "the field 'input' is not known"),
    ],
)
def test_bad_tensors_are_refused_in_a_sentence(gateway, body, sentence):
    status, said = error_of(gateway, "/v2/models/gpt_tokenize/infer", body)
    assert status == 400
    assert sentence in said


def test_infer_of_a_streaming_model(gateway):
    status, said = error_of(gateway, "/v2/models/gpt/infer", infer())
    assert (status, said.split(":")[0]) == (400, "UNSUPPORTED")


def test_a_binary_part_longer_than_the_body(gateway):
    headers = {"Inference-Header-Content-Length": "9999"}
    status, said = error_of(gateway, "/v2/models/gpt_tokenize/infer", infer(), **headers)
    assert (status, "is not within the body" in said) == (400, True)


def test_bodies_up_to_the_limit_and_beyond(server, gateway):
    """Spaces after the JSON are enough to bring down the server itself."""
    good = json.dumps(text()).encode()
    assert ask(gateway, body=good.ljust(BODY))[0] == 200
    for size in (BODY + 1, 5 << 20, 64 << 20):
        status, said = error_of(gateway, body=good.ljust(size))
        assert (status, said) == (413, f"INVALID_ARG: the body is larger than {BODY} bytes")
    chunks = (b" " * 10_000 for _ in range(100))  # without a length
    assert error_of(gateway, body=chunks, method="POST")[0] == 413
    assert server.alive()


def test_what_is_not_offered(gateway):
    for method, path in (
        ("GET", "/"), ("GET", "/v2/systemsharedmemory/status"), ("POST", "/v2/logging"),
        ("POST", "/v2/models/gpt/trace/setting"), ("GET", "/v2/models/gpt/../../metrics"),
    ):
        assert error_of(gateway, path, method=method)[0] == 404, path
    assert error_of(gateway, GENERATE, method="GET")[0] == 405
    assert error_of(gateway, "/v2/models/absent/generate", text())[0] == 404


@pytest.mark.parametrize(
    "name",
    [
        "gpt/versions/..%2f..%2f..%2frepository%2fmodels%2fgpt%2funload%3fx",
        "gpt/versions/1%2f..%2f..%2f..%2f..%2frepository%2fmodels%2fgpt%2funload%3fx",
        "%2e%2e%2frepository%2fmodels%2fgpt%2funload%3fx",
        "gpt%2fconfig%3fx=",
        "gpt/versions/%31%3fx",
        "..",
    ],
)
def test_no_name_leads_to_another_path(server, locked, name):
    for what in ("generate", "generate_stream", "infer", "config"):
        path = f"/v2/models/{name}/{what}"
        body = None if what == "config" else infer() if what == "infer" else text()
        assert error_of(locked, path, body, **bearer("text"))[0] in (404, 405)
    assert server.ready("gpt")


# --- too much, too long ---------------------------------------------------------------------------


def test_a_full_queue_is_429(server, gateway):
    """The engine's own queue."""
    client = Client(gateway, timeout=PATIENCE)
    queue = int(server.config("gpt_engine")["parameters"]["queue"]["string_value"])
    until(lambda: at_rest(server))
    with ThreadPoolExecutor(SLOTS + queue) as pool, frozen(*ranks(server)):
        asked = [pool.submit(client.generate, TEXT, max_tokens=4) for _ in range(SLOTS + queue)]
        until(lambda: served_now(server) == SLOTS + queue)
        status, headers, body = ask(gateway, body=text())
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "the queue is full" in body
    assert len({request.result(PATIENCE) for request in asked}) == 1


def test_more_requests_than_the_gateway_takes_and_longer_ones(server):
    """The gateway's own limits; a request that times out frees its place."""
    limit = patience(3)
    with Gateway(server, requests=1, seconds=limit) as gateway, ThreadPoolExecutor(1) as pool:
        with frozen(*ranks(server)):
            first = pool.submit(ask, gateway, GENERATE, text())
            until(lambda: kintsugi(server)["requests_running"] == 1)
            assert error_of(gateway, body=text()) == (
                429, "UNAVAILABLE: 1 requests are here already, try again later",
            )
            status, _, body = first.result(PATIENCE)
            assert (status, json.loads(body)) == (
                504, {"error": f"DEADLINE_EXCEEDED: no answer after {limit} s"},
            )
        until(lambda: at_rest(server))
        assert ask(gateway, body=text())[0] == 200


# --- keys, control, origins -----------------------------------------------------------------------


def test_keys(locked):
    index = "/v2/repository/index"
    assert ask(locked, body=text(), **bearer("text"))[0] == 200
    assert ask(locked, index, b"{}", **bearer("up and down"))[0] == 200
    for path, key in ((GENERATE, "up and down"), (GENERATE, ""), (index, "text"), (index, "é")):
        status, said = error_of(locked, path, text(), **bearer(key))
        assert (status, said.split(":")[0]) == (401, "UNAUTHENTICATED"), path
    assert error_of(locked, "/v1/models")[0] == 401
    for path in ("/v2/health/ready", "/metrics"):  # a probe has no key
        assert ask(locked, path)[0] == 200


def test_model_control_wants_a_key_always(gateway):
    """The gateway draws one if none is given."""
    assert error_of(gateway, "/v2/repository/index", b"{}")[0] == 401
    assert ask(gateway, "/v2/repository/index", b"{}", **bearer(gateway.control_key))[0] == 200


def control(gateway, model, body=b"{}", action="load", **headers):
    """(status, headers, body) of a load or unload."""
    path = f"/v2/repository/models/{model}/{action}"
    return ask(gateway, path, body, **bearer(gateway.control_key), **headers)


def test_who_asks_for_a_model_that_is_not_there_changes_nothing(gateway):
    status, _, said = control(gateway, "absent")
    assert (status, json.loads(said)["error"].split(":")[0]) == (404, "NOT_FOUND")
    assert ask(gateway, "/v2/health/ready")[0] == 200


def test_a_load_runs_no_code_from_elsewhere(server, gateway, tmp_path):
    """Of all that `load` can carry, only values of the model's own parameters pass."""
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    served = server.config("gpt")
    for config in (
        served | {"default_model_filename": "../" * 20 + str(evil)},
        served | {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(tmp_path)}}},
        {"parameters": {"requests": "9"}},
        {"parameters": {"request": {"string_value": "9"}}},
        {"backend": "python_"},
        [],
    ):
        status, _, said = control(
            gateway, "gpt", {"parameters": {"config": json.dumps(config)}}
        )
        assert status == 400 and said.startswith('{"error": "INVALID_ARG: '), config
    body = {"parameters": {"config": "{}", "file:1/model.py": "aW1wb3J0IG9z"}}
    assert control(gateway, "gpt_tokenize", body)[0] == 400
    assert control(gateway, "gpt", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert not (tmp_path / "ran").exists()
    config = json.dumps({"parameters": {"requests": {"string_value": "9"}}})
    assert control(gateway, "gpt", {"parameters": {"config": config}})[0] == 200
    assert server.config("gpt") == served | {
        "parameters": served["parameters"] | {"requests": {"string_value": "9"}}
    }
    assert control(gateway, "gpt", action="unload")[0] == control(gateway, "gpt")[0] == 200
    assert server.config("gpt") == served


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Host": "[::1]:8000", "Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_a_web_page_of_another_site_may_ask_nothing(gateway, headers, status):
    assert ask(gateway, body=text(max_tokens=1), **headers)[0] == status


# --- loads that hang, starts that fail ------------------------------------------------------------

HANGS = """
import pathlib, time
import triton_python_backend_utils as pb

class TritonPythonModel:
    def initialize(self, args):
        here = pathlib.Path(args["model_repository"])
        with (here / "loads").open("a") as file:
            file.write("x")
        while (here / "hang").exists():
            time.sleep(0.05)

    def execute(self, requests):
        one = lambda request: pb.get_input_tensor_by_name(request, "text_input").as_numpy()
        return [pb.InferenceResponse([pb.Tensor("text_output", one(r))]) for r in requests]
"""


@pytest.mark.thorough
def test_a_load_that_hangs_is_ended_and_tried_again(tmp_path):
    repo = write_models(tmp_path, "echo")
    (repo / "echo" / "1" / "model.py").write_text(HANGS)
    limit = patience(3)  # a process that starts more slowly is killed before it writes
    with serving(repo) as server, Gateway(server, load_seconds=limit) as gateway:
        (repo / "echo" / "hang").touch()
        (repo / "echo" / "loads").unlink()
        (repo / "echo" / "2").mkdir()
        (repo / "echo" / "2" / "model.py").write_text(HANGS)
        status, _, said = control(gateway, "echo")
        assert status == 503 and f"UNAVAILABLE: loading echo took longer than {limit} s" in said
        assert (repo / "echo" / "loads").read_text() == "xx"
        assert server.versions("echo") == [1]  # keeps serving
        assert echo(gateway, "still") == "still"
        (repo / "echo" / "hang").unlink()
        until(lambda: control(gateway, "echo")[0] == 200)  # a busy machine may need more tries
        assert server.versions("echo") == [2]
        assert echo(gateway, "new") == "new"


def echo(gateway, word):
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [word]}]}
    status, _, answer = ask(gateway, "/v2/models/echo/infer", body)
    assert status == 200, answer
    return json.loads(answer)["outputs"][0]["data"][0]


def test_a_process_that_the_list_of_children_lacks_is_not_dead(server):
    """While a thread of the server ends, the list of children lacks that thread's."""

    async def watch():
        async with Triton(server.http, key=server.control_key) as triton:
            stubs = Stubs(triton, server.pid, load_seconds=PATIENCE)
            await stubs.begin()
            listed, looks, seen = stubs.stubs, 0, asyncio.Event()

            def lacking():
                nonlocal looks
                looks += 1
                if looks == 4:
                    seen.set()
                return listed() if looks == 1 else []

            stubs.stubs = lacking
            watching = asyncio.create_task(stubs.run())
            async with asyncio.timeout(PATIENCE):
                await seen.wait()
            watching.cancel()
            return dict(stubs.down), stubs.loads

    assert asyncio.run(watch()) == ({}, 0)


@pytest.mark.thorough
def test_a_new_gateway_misses_the_front_model_that_it_finds_unloaded(server):
    """The engine unloads `gpt` while its ranks restart; a model that no text needs may be out."""
    out = ("gpt_detokenize", "gpt")
    for model in out:
        server.unload(model)
    try:
        with Gateway(server) as gateway:
            assert error_of(gateway, "/v2/health/ready") == (
                503, "UNAVAILABLE: gpt is not served",
            )
            server.load("gpt")
            assert ask(gateway, "/v2/health/ready")[0] == 200
    finally:
        for model in out:
            server.load(model)


@pytest.mark.thorough
def test_why_it_does_not_start(server):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ServerError, match=r"[Aa]ddress already in use"):
            Gateway(server, port=other.getsockname()[1])
    with pytest.raises(ServerError, match="No such file"):
        Gateway(server, tls_cert="/nowhere.pem")
    nobody = SimpleNamespace(**{name: getattr(server, name) for name in Served.__annotations__})
    nobody.http = "127.0.0.1:9"
    with pytest.raises(ServerError, match=r"no server at 127.0.0.1:9 that has loaded its models"):
        Gateway(nobody, load_seconds=0.5)


def test_it_ends_when_told_and_requests_end_first(server):
    gateway = Gateway(server)
    with ThreadPoolExecutor(2) as pool:
        client = Client(gateway, timeout=PATIENCE)
        with frozen(*ranks(server)):
            first = pool.submit(lambda: list(generate(client, TEXT, max_tokens=5)))
            until(lambda: kintsugi(server)["requests_running"] == 1)
            ends = pool.submit(gateway.close)
            until(lambda: refuses(gateway))
        assert first.result(PATIENCE)[0].startswith(TEXT)
        ends.result(PATIENCE)
    assert not gateway.alive()


def test_it_drains_first(server):
    """Told to end, it says that it is not ready, but serves until its clients have noticed."""
    with Gateway(server, drain_seconds=patience(3)) as gateway, ThreadPoolExecutor(1) as pool:
        ends = pool.submit(gateway.close)
        until(lambda: ask(gateway, "/v2/health/ready")[0] == 503)
        assert ask(gateway, body=text(max_tokens=1))[0] == 200
        ends.result(PATIENCE)
        assert refuses(gateway)


def test_connections_to_the_server_are_kept_for_a_moment(server, gateway):
    """Some of twenty requests reuse the connection of the previous one."""
    seen = []
    for _ in range(20):
        assert ask(gateway, body=text(max_tokens=1))[0] == 200
        seen += callers(server)
    assert len(set(seen)) < len(seen)
    until(lambda: not callers(server))


@pytest.mark.thorough
def test_the_server_stops_while_clients_ask_on(tmp_path):
    """The gateway learns that the server takes no new requests, and closes its connections."""
    repo, answered, stopped = write_models(tmp_path, "echo"), Semaphore(0), Event()
    with (
        serving(repo, exit_seconds=60) as server, Gateway(server) as gateway,
        ThreadPoolExecutor(4) as pool,
    ):
        clients = [pool.submit(asks_on, gateway, answered, stopped) for _ in range(4)]
        try:
            for _ in range(20):
                assert answered.acquire(timeout=PATIENCE)
            assert server.close() == 0
        finally:
            stopped.set()
        for client in clients:
            client.result(PATIENCE)


def asks_on(gateway, answered, stopped):
    """Send one request after another; they are refused once the server stops."""
    while not stopped.is_set():
        with suppress(OSError, http.client.HTTPException):  # the gateway ends with the server
            status, _, said = ask(gateway, "/v2/models/echo/infer", infer(name="text_input"))
            assert status == 200 or said.startswith('{"error": "UNAVAILABLE: '), said
            answered.release()


def refuses(gateway):
    host, port = gateway.http.split(":")
    with socket.socket() as caller:
        return caller.connect_ex((host, int(port))) != 0


@pytest.mark.parametrize(
    "option, status, words",
    [
        ("--port={taken}", 1, "Address already in use"),
        ("--tls-cert=/nowhere/c.pem", 1, "No such file"),
        ("--port=99999", 2, "99999 is not a port: give one up to 65535, or 0"),
    ],
)
def test_what_is_wrong_is_told_before_a_server_is_waited_for(option, status, words):
    with socket.create_server(("127.0.0.1", 0)) as other:
        option = option.format(taken=other.getsockname()[1])
        options = ["--triton=127.0.0.1:1", "--port=0", option]
        done = subprocess.run(
            [sys.executable, "-m", "utils.serving.gateway", *options],
            cwd=ROOT, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=patience(100),
        )
    assert done.returncode == status and words in done.stderr.splitlines()[-1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_https(server, tmp_path):
    made = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout k.pem -out c.pem"
    subprocess.run(["openssl", *made.split()], cwd=tmp_path, check=True, capture_output=True)
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    with Gateway(server, tls_cert=cert, tls_key=key) as gateway:
        context = ssl.create_default_context(cafile=cert)
        context.check_hostname = False  # the certificate names localhost, the URL an address
        url = f"https://{gateway.http}/v2/health/ready"
        with urllib.request.urlopen(url, timeout=PATIENCE, context=context) as answer:
            assert answer.status == 200
