"""Invalid requests: each gets a client error with the reason, and harms nothing."""

import math
import re

import numpy as np
import pytest
from tritonclient.grpc import InferInput

from tests.serving.probe import Asked, astream, at_rest, generate, processes, stream, tokens
from tests.serving.processes import until
from tests.serving.world import post
from utils.serving.client import ServeError

pytestmark = pytest.mark.timeout(600)

TEXT, TOKENS = "def ", [40, 41]

# invalid field, part of the message
SAMPLING = [
    ({"max_tokens": 0}, "max_tokens 0 is not an integer from 1 to 2147483647, or -1 for no"),
    ({"max_tokens": -2}, "max_tokens -2"),
    ({"max_tokens": 2**31 - 1}, "max_tokens 2147483647"),
    ({"max_tokens": 512}, "512 positions"),
    ({"temperature": -0.5}, "temperature -0.5"),
    ({"temperature": math.nan}, "temperature nan"),
    ({"temperature": math.inf}, "temperature inf"),
    ({"temperature": -math.inf}, "temperature -inf"),
    ({"top_k": -1}, "top_k -1"),
    ({"top_p": 0.0}, "top_p 0"),
    ({"top_p": 1.5}, "top_p 1.5"),
    ({"top_p": math.nan}, "top_p nan"),
    ({"seed": -1}, "seed -1"),
    ({"logprobs": 21}, "logprobs 21 is not an integer from 0 to 20"),
    ({"stop": ["x"] * 9}, "at most 8"),
    ({"stop": [""]}, "1 to 64"),
    ({"stop": ["x" * 65]}, "1 to 64"),
    ({"stop": [b"\xff\xfe"]}, "stop is not UTF-8: invalid start byte at byte 0"),
    ({"prompt_name": "absent"}, "'absent' is unknown"),
    ({"prompt_name": "../../etc/passwd"}, "is unknown"),
    ({"prompt_name": b"\xc3("}, "prompt_name is not UTF-8"),
]
NOT_IN_JSON = [wrong for wrong, _ in SAMPLING if "\\x" in repr(wrong)]
NO_JSON_NUMBERS = [wrong for wrong, _ in SAMPLING if re.search("nan|inf", repr(wrong))]
TEXTS = [
    ("", "nothing to continue"),
    ("a " * 600, "512 positions"),
    ("a" * 100_000, "100000 bytes: give at most 35840"),
    (b"abc\xff", "text_input is not UTF-8: invalid start byte at byte 3"),
    (b"\xed\xa0\x80", "not UTF-8"),  # a surrogate
]
IDS = [
    ([], "nothing to continue"),
    ([-1], "token -1"),
    ([4096], "token 4096"),
    ([2**31 - 1], "token 2147483647"),
    ([40] * 512, "512 positions"),
    ([40] * 200_000, "512 positions"),
]


@pytest.fixture(scope="module")
def server(tiny_server):
    return tiny_server


@pytest.fixture(autouse=True, scope="module")
def unharmed(server, client):
    """After all tests: the same processes, the same answers, nothing in use."""
    before, answer = set(processes(server)), good(client)
    yield
    assert good(client) == answer
    assert set(processes(server)) == before
    until(lambda: at_rest(server))


def good(client):
    return [
        Asked(door, client, TOKENS if door is tokens else TEXT, max_tokens=6).outcome()
        for door in (generate, stream, astream, tokens)
    ]


def check_refused(outcome, reason):
    assert isinstance(outcome, ServeError), outcome
    assert outcome.status == "INVALID_ARG", outcome
    assert reason in str(outcome)
    assert len(str(outcome)) < 400  # not all that the client sent
    assert outcome.http in (None, 400), outcome.http


def name(value):
    return repr(value)[:40]


@pytest.mark.parametrize(("wrong", "reason"), SAMPLING, ids=name)
def test_sampling(client, wrong, reason):
    check_refused(Asked(astream, client, TEXT, **wrong).outcome(), reason)
    check_refused(Asked(tokens, client, TOKENS, **wrong).outcome(), reason)
    if wrong not in NOT_IN_JSON:
        for door in (generate, stream):
            outcome = Asked(door, client, TEXT, **wrong).outcome()
            if any(
                isinstance(value, float) and not math.isfinite(value) for value in wrong.values()
            ):
                assert isinstance(outcome, ServeError)  # JSON has no such numbers
            else:
                check_refused(outcome, reason)


@pytest.mark.parametrize(("text", "reason"), TEXTS, ids=name)
def test_text(client, text, reason):
    check_refused(Asked(astream, client, text).outcome(), reason)
    if isinstance(text, str):
        check_refused(Asked(generate, client, text).outcome(), reason)
        check_refused(Asked(stream, client, text).outcome(), reason)


@pytest.mark.parametrize(("ids", "reason"), IDS, ids=name)
def test_ids(client, ids, reason):
    check_refused(Asked(tokens, client, ids).outcome(), reason)


# ---- wrong types, shapes and names

WRONG_JSON = [
    ({"text_input": 5}, 500),
    ({"text_input": ["a", "b"]}, 400),
    ({"max_tokens": 4}, 400),
    ({"text_input": "a", "max_tokens": "four"}, 500),
    ({"text_input": "a", "max_tokens": 2**31}, None),
    ({"text_input": "a", "stop": ["a", 7]}, 500),
]


@pytest.mark.parametrize(("fields", "status"), WRONG_JSON, ids=name)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_wrong_types_in_json(server, fields, status, endpoint):
    """Refused before reaching a model; this version of Triton answers some with status 500."""
    got, answer = post(server, endpoint=endpoint, **fields)
    assert got in ((400, 500) if status is None else (status,)), answer
    assert "error" in answer


def tensor(name, array, kind, shape=None):
    array = np.array(array, dtype=object if kind == "BYTES" else None)
    array = array.astype(NUMPY[kind])
    found = InferInput(name, list(array.shape), kind)
    found.set_data_from_numpy(array)
    if shape is not None:
        found.set_shape(shape)  # unlike the data's
    return found


NUMPY = {"INT32": np.int32, "INT64": np.int64, "BYTES": object}
TEXT_TENSOR = ("text_input", [b"a"], "BYTES")
WRONG_TENSORS = [  # model, tensors, part of the message
    ("gpt", [], "number of inputs"),
    ("gpt", [("text_input", [5], "INT32")], "data-type"),
    ("gpt", [("text_input", [b"a", b"b"], "BYTES")], "unexpected shape"),
    ("gpt", [TEXT_TENSOR, ("no_such_input", [1], "INT32")], "unexpected inference input"),
    ("gpt", [(*TEXT_TENSOR, [-1])], "dimensions should be specified"),
    ("gpt_engine", [("input_ids", [40, 41], "INT64")], "data-type"),
    ("gpt_engine", [("input_ids", [40, 41], "INT32", [2**31])], "byte size mismatch"),
    ("gpt_engine", [], "INVALID_ARG: there is nothing to continue"),
    ("gpt_tokenize", [("text", [b"\xff"], "BYTES")], "INVALID_ARG: text is not UTF-8"),
    ("gpt_detokenize", [("ids", [4096], "INT32")], "INVALID_ARG: id 4096"),
    ("gpt_detokenize", [("ids", [-1], "INT32")], "INVALID_ARG: id -1"),
    ("no_such_model", [TEXT_TENSOR], "unknown model"),
]


@pytest.mark.parametrize(("model", "tensors", "reason"), WRONG_TENSORS, ids=name)
def test_wrong_tensors(client, model, tensors, reason):
    """Over gRPC: refused by Triton, which knows config.pbtxt, or by the model."""
    with pytest.raises(ServeError, match=reason):
        list(client.infer(model, [tensor(*fields) for fields in tensors]))
