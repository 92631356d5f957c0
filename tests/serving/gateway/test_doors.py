"""The doors of a server behind its gateway: what gRPC admits, and that no way leads past it."""

import asyncio
import socket
import stat
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import uvicorn
from tritonclient.utils import InferenceServerException

from tests.serving.probe import check_leaving
from tests.serving.processes import PATIENCE
from tests.serving.triton_models import write_models
from tests.serving.world import pids, serving
from utils.serving.client import Client
from utils.serving.gateway import Gateway
from utils.serving.gateway import __main__ as process

pytestmark = pytest.mark.timeout(600)

KEY = {"authorization": "Bearer text"}
CLOSED = (
    lambda client, **more: client.load_model("gpt", **more),
    lambda client, **more: client.unload_model("gpt", **more),
    lambda client, **more: client.get_model_repository_index(**more),
    lambda client, **more: client.update_log_settings({"log_error": False}, **more),
    lambda client, **more: client.update_trace_settings(settings={"trace_rate": "1"}, **more),
    lambda client, **more: client.register_system_shared_memory("a", "/triton_a", 64, **more),
    lambda client, **more: client.get_cuda_shared_memory_status(**more),
)


@pytest.fixture(scope="module")
def locked(server):
    with Gateway(server, api_key="text") as gateway:
        yield gateway


def refused(call, *arguments, **options):
    """The status and the sentence of a refused gRPC call."""
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **options)
    return caught.value.status(), caught.value.message()


def tokenize(client, text, **more):
    given = triton.InferInput("text", [1], "BYTES")
    given.set_data_from_numpy(np.array([text], dtype=object))
    return client.infer("gpt_tokenize", [given], **more).as_numpy("ids").tolist()


def test_answers_by_grpc_are_those_of_the_server(server, gateway):
    direct, through = Client(server, timeout=PATIENCE), Client(gateway, timeout=PATIENCE)
    here, there = (
        list(chain.from_iterable(client.tokens([40, 41], max_tokens=9)))
        for client in (through, direct)
    )
    assert here == there and len(here) == 9
    with closing(triton.InferenceServerClient(gateway.grpc)) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("gpt") and not client.is_model_ready("absent")
        assert client.get_model_config("gpt").config.name == "gpt"
        assert len(tokenize(client, b"def run")) > 1
        status, said = refused(client.get_model_metadata, "absent")
        assert (status, "absent" in said) == ("StatusCode.NOT_FOUND", True)


def test_a_client_that_leaves_a_grpc_stream_frees_its_slot(server, gateway):
    client = Client(gateway, timeout=PATIENCE)

    def ask():
        stream = client.tokens([40, 41], max_tokens=400)
        next(stream)
        return stream.close

    check_leaving(server, ask)


def test_grpc_wants_the_key_too(locked):
    with closing(triton.InferenceServerClient(locked.grpc)) as client:
        assert client.is_server_ready()  # a probe has no key
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "text"}):
            status, said = refused(tokenize, client, b"a", headers=headers)
            assert status == "StatusCode.UNAUTHENTICATED" and "give the key" in said
        assert tokenize(client, b"a", headers=KEY)


@pytest.mark.parametrize("call", CLOSED)
def test_what_no_client_needs_is_closed(server, locked, call):
    """Closed by the gateway and by Triton itself, whatever the headers."""
    with closing(triton.InferenceServerClient(locked.grpc)) as client:
        assert refused(call, client, headers=KEY)[0] == "StatusCode.UNIMPLEMENTED"
    with closing(triton.InferenceServerClient(server.grpc)) as client:
        for headers in ({}, {"triton-grpc-protocol-closed": "never"}):
            assert "This protocol is restricted" in refused(call, client, headers=headers)[1]


def test_a_text_that_fits_nowhere_is_not_tokenized(server, gateway):
    """200 MB are not admitted; less is refused by its length, by either tokenizer model."""
    stub = psutil.Process(pids(server)["gpt_tokenize"])
    before = stub.memory_info().rss
    with closing(triton.InferenceServerClient(gateway.grpc)) as client:
        status, _ = refused(tokenize, client, bytes(200_000_000))
        assert status == "StatusCode.RESOURCE_EXHAUSTED"
        assert stub.memory_info().rss < before + 10e6
        assert tokenize(client, b"def run")
        for text in (b"a" * 40_000, b"a" * 900_000):
            assert f"{len(text)} bytes: give at most 35840" in refused(tokenize, client, text)[1]
        ids = triton.InferInput("ids", [600], "INT32").set_data_from_numpy(np.ones(600, np.int32))
        said = refused(client.infer, "gpt_detokenize", [ids])[1]
        assert "there are 600 ids: give at most 512" in said


def test_nobody_gets_past_the_gateway(tmp_path):
    """Its server listens on Unix sockets that only this user can open."""
    repo = write_models(tmp_path, "echo")
    with serving(repo, private=True) as server, Gateway(server) as gateway:
        found = psutil.Process(server.pid).net_connections("tcp")
        ports = {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
        assert ports == {int(server.metrics.rpartition(":")[2])}
        for address in (server.http, server.grpc):
            file = Path(address.removeprefix("unix:"))
            assert stat.S_ISSOCK(file.stat().st_mode)
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert server.ready("echo") and server.versions("echo") == [1]
        assert list(Client(gateway).infer("echo", [text_input("a")]))


def text_input(text):
    given = triton.InferInput("text_input", [1], "BYTES")
    given.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return given


def test_half_a_head_does_not_stay(monkeypatch):
    monkeypatch.setattr(process, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(process, "KEPT", 0)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.5)  # longer than a head may take
        await send({"type": "http.response.body", "body": b"well"})

    async def talk(*sent):
        """All that is received until the connection ends."""
        reader, writer = await asyncio.open_connection(*own.getsockname())
        for part in sent:
            writer.write(part)
        with closing(writer):
            return await reader.read()

    async def everything():
        config = uvicorn.Config(app, lifespan="off", log_config=None, http=process.Protocol)
        config.load()
        server = process.Server(config)
        serving = asyncio.create_task(server.serve([own]))
        async with asyncio.timeout(PATIENCE):
            assert await talk(b"GET / HTT") == await talk() == b""
            whole = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
            assert (await talk(whole)).endswith(b"well\r\n0\r\n\r\n")
            assert (await talk(whole, b"GET / H")).endswith(b"well\r\n0\r\n\r\n")
        server.should_exit = True
        await serving

    with socket.create_server(("127.0.0.1", 0)) as own:
        asyncio.run(everything())
