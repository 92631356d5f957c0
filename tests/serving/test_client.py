"""The client against a real server, with a small model for each kind of answer."""

import asyncio
import socket
import threading
import time

import psutil
import pytest

from tests.serving.processes import PATIENCE, until
from tests.serving.triton_models import gone, settled_gone
from utils.serving.client import Client, ServeError, tensors
from utils.serving.server import server_available

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
]


@pytest.fixture(scope="module")
def server(toy_server):
    return toy_server


def collect(pieces):
    """All items of an asynchronous iterator."""

    async def run():
        return [piece async for piece in pieces]

    return asyncio.run(run())


# --- what is sent and what comes back -------------------------------------------------------------


def test_a_text_as_a_whole(client):
    assert client.generate("the sea is blue") == "the sea is blue "
    answer = client.answer("the sea is blue", max_tokens=2)
    assert answer["text_output"] == "the sea " and answer["finish_reason"] == "length"


def test_text_beyond_ascii_and_quotes_arrive_unchanged(server):
    text = 'ß "λ" \\ \n\t 𝄞 {data: [1]}'
    assert Client(server, model="echo").generate(text) == text
    assert collect_words(Client(server).stream(text)) == collect_words([text])
    assert collect_words(collect(Client(server).astream(text))) == collect_words([text])


def collect_words(pieces):
    return "".join(pieces).split()


def test_a_stream_comes_in_pieces_while_it_is_made(client):
    text = "a b c d e f g h " * 5
    arrived, begin = [], time.monotonic()
    for piece in client.stream(text):
        arrived.append((piece, time.monotonic() - begin))
    assert [piece for piece, _ in arrived] == [word + " " for word in text.split()]
    # the last word is made 2 s after the first: a client that waited for the end would see no gap
    assert arrived[-1][1] - arrived[0][1] > 0.1


def test_many_asynchronous_streams_in_one_loop(client):
    async def one(i):
        return [piece async for piece in client.astream(f"{i} {i + 1}")]

    async def all_of_them():
        return await asyncio.gather(*(one(i) for i in range(8)))

    assert asyncio.run(all_of_them()) == [[f"{i} ", f"{i + 1} "] for i in range(8)]


def test_tokens_go_in_and_out(client):
    assert list(client.tokens([17, 4, 4095])) == [[17], [4], [4095]]
    assert list(client.tokens([])) == []


def test_every_parameter_reaches_the_model_with_its_type(client):
    parameters = {"max_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 2**40}
    parameters |= {"stop": ["x", "y"], "prompt_name": "colours", "logprobs": 2}
    assert client.generate("a b", exclude_input_in_output=True, **parameters) == "a "
    assert list(client.stream("a b", **{**parameters, "stop": ["one"]})) == ["a "]
    assert collect(client.astream("a b", **{**parameters, "stop": "one"})) == ["a "]
    assert list(client.tokens([5], **parameters)) == [[5]]


def test_threads_share_a_client(client):
    found = {}

    def ask(i):
        found[i] = [client.generate(f"{i}"), "".join(client.stream(f"{i} {i}"))]
        found[i] += [list(client.tokens([i]))]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {i: [f"{i} ", f"{i} {i} ", [[i]]] for i in range(6)}


# --- errors ---------------------------------------------------------------------------------------


def test_a_refused_request_has_its_reason_and_its_name_by_every_way(client):
    calls = [
        lambda: client.generate("a", max_tokens=-1),
        lambda: list(client.stream("a", max_tokens=-1)),
        lambda: collect(client.astream("a", max_tokens=-1)),
    ]
    for call in calls:
        with pytest.raises(ServeError, match="max_tokens is not at least 1") as caught:
            call()
        assert caught.value.status == "INVALID_ARG"


def test_an_error_in_the_middle_of_a_stream_comes_after_what_was_made_before(client):
    pieces = []
    with pytest.raises(ServeError, match="a rank has died") as caught:
        pieces.extend(piece for piece in client.stream("a b fail c"))
    assert (caught.value.status, caught.value.http) == ("UNAVAILABLE", 200)

    stream = client.stream("a b fail c")
    assert [next(stream), next(stream)] == ["a ", "b "]
    with pytest.raises(ServeError, match="UNAVAILABLE: a rank has died"):
        next(stream)

    tokens = client.tokens([1, 2, -1, 3])
    assert [next(tokens), next(tokens)] == [[1], [2]]
    with pytest.raises(ServeError, match="a rank has died") as caught:
        next(tokens)
    assert caught.value.status == "UNAVAILABLE"


def test_a_model_that_is_not_there(server):
    client = Client(server, model="nothing", engine="nothing")
    for call in (
        lambda: client.generate("a"),
        lambda: list(client.stream("a")),
        lambda: collect(client.astream("a")),
        lambda: list(client.tokens([1])),
    ):
        with pytest.raises(ServeError, match="'nothing' is not found") as caught:
            call()
        assert caught.value.status == "NOT_FOUND"


def test_a_misspelled_parameter_is_refused_before_it_is_sent(client):
    with pytest.raises(TypeError, match="'max_token' is not a parameter of the model: it has max_"):
        client.generate("a", max_token=1)
    with pytest.raises(TypeError, match="'exclude_input_in_output' is not a parameter"):
        list(client.tokens([1], exclude_input_in_output=True))


def test_nobody_there_is_said_so():
    with socket.socket() as listener:  # bound but not listening: the port stays taken
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        client = Client(http=address, grpc=address, timeout=10)
        for call in (
            lambda: client.generate("a"),
            lambda: list(client.stream("a")),
            lambda: collect(client.astream("a")),
            lambda: list(client.tokens([1])),
        ):
            with pytest.raises(ServeError) as caught:
                call()
            assert caught.value.status == "NO_ANSWER"


def test_every_call_ends_at_its_time_limit(server):
    """The model takes 3 s; the client gives up at its own limit."""
    slow = Client(server, model="slow", timeout=0.3)
    for call in (
        lambda: slow.generate("3"),
        lambda: list(slow.stream("3")),
        lambda: list(slow.infer("slow", tensors({"text_input": "3"}, {"text_input": "BYTES"}))),
    ):
        with pytest.raises(ServeError) as caught:
            call()
        assert caught.value.status == "DEADLINE_EXCEEDED"


def test_a_limit_holds_for_the_whole_stream_not_for_each_piece(server):
    short = Client(server, timeout=2)
    words, before = "a " * 1000, settled_gone(server)  # 50 s in pieces of 50 ms
    for call in (
        lambda: list(short.stream(words, max_tokens=1000)),
        lambda: collect(short.astream(words, max_tokens=1000)),
    ):
        with pytest.raises(ServeError) as caught:
            call()
        assert caught.value.status == "DEADLINE_EXCEEDED"
    until(lambda: gone(server) == before + 2)  # and the server stops generating


def test_an_address_and_a_sensible_limit_are_needed():
    with pytest.raises(ValueError, match="give a server, or http="):
        Client()
    with pytest.raises(ValueError, match="timeout 0 is not a time limit"):
        Client(http="127.0.0.1:1", timeout=0)


# --- leaving early --------------------------------------------------------------------------------


def test_a_stream_that_is_left_is_cancelled_at_the_server(server, client):
    words = "a " * 1000  # 50 s unless it is cancelled

    def by_http():
        for _ in client.stream(words, max_tokens=1000):
            break

    def by_grpc():
        async def run():
            async for _ in client.astream(words, max_tokens=1000):
                break

        asyncio.run(run())

    for leave in (by_http, by_grpc):
        before = settled_gone(server)
        leave()
        until(lambda before=before: gone(server) == before + 1)


def test_no_http_connection_stays_open_after_a_call(server, client):
    """An open connection would delay the server's shutdown."""
    client.generate("a")
    list(client.stream("a b"))
    next(client.stream("a b c"))
    port = int(server.http.rpartition(":")[2])

    def open_ones():
        connections = psutil.Process().net_connections("tcp")
        return [c for c in connections if c.raddr and c.raddr.port == port]

    until(lambda: not open_ones())


# --- other programs -------------------------------------------------------------------------------


def test_an_answer_that_is_no_answer_of_triton(tmp_path):
    """An answer by another program becomes an error that quotes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_once, args=(listener,), daemon=True).start()
        client = Client(http=f"127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE)
        with pytest.raises(ServeError, match="not a response of Triton: b'hello'"):
            client.generate("a")


def answer_once(listener):
    connection, _ = listener.accept()
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
