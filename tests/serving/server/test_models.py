"""The models of triton_model_repo/ on a real server: their inputs and outputs.

The path from training checkpoint to served tokens is checked end to end: GPT.generate,
transformers.generate, text over HTTP and ids over gRPC give the same tokens, under load too.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving.world import (
    ENGINE,
    MODELS,
    TEXTS,
    company,
    post,
    text_of,
)
from utils.serving.client import ServeError, tensors

pytestmark = pytest.mark.timeout(600)

NEW = 12
ENDING = "if __name__ == '__main__':\n    main()\n"
TEXT_TYPES = {"text_input": "BYTES", "max_tokens": "INT32", "stream": "BOOL"}


@pytest.fixture(scope="module")
def server(small_server):
    return small_server


@pytest.fixture(scope="module")
def reference(small_reference):
    return small_reference


def engine_ids(client, ids, **parameters):
    return [token for piece in client.tokens(ids, **parameters) for token in piece]


def test_from_checkpoint_to_served_tokens_on_two_ranks(server, client, reference):
    peer = AutoModelForCausalLM.from_pretrained(MODELS / "small", dtype=torch.float32)
    lines = [
        (text, reference.tokenizer.encode(text), reference.tokens(text, NEW)) for text in TEXTS
    ]
    for _, ids, tokens in lines:
        judged = peer.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        assert judged[0, len(ids) :].tolist() == tokens
    with company(server):
        for text, ids, tokens in lines:
            assert engine_ids(client, ids, max_tokens=NEW) == tokens
            assert text_of(server, text, max_tokens=NEW) == reference.text(text, NEW)


# ---- text


def test_the_answer_begins_with_the_input_unless_told_otherwise(server, reference):
    status, answer = post(server, text_input="def ", max_tokens=NEW)
    answer = json.loads(answer)
    assert status == 200
    assert answer["text_output"] == "def " + reference.text("def ", NEW)
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("excluded", [True, False])
def test_a_stream_is_the_same_text_in_pieces(server, reference, excluded):
    text = TEXTS[3]
    status, answer = post(
        server, endpoint="generate_stream", text_input=text, max_tokens=NEW, stream=True,
        exclude_input_in_output=excluded,
    )
    events = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:")]
    assert status == 200
    assert len(events) > 1
    joined = "".join(event["text_output"] for event in events)
    assert joined == ("" if excluded else text) + reference.text(text, NEW)
    assert [event["finish_reason"] for event in events] == [""] * (len(events) - 1) + ["length"]


def test_how_long_and_where_it_ends(server, reference):
    whole = reference.text("def ", 64)
    assert text_of(server, "def ") == whole  # the default is 64 tokens
    stop = whole[7:10]
    _, answer = post(server, text_input="def ", stop=["§§", stop], exclude_input_in_output=True)
    answer = json.loads(answer)
    assert answer["text_output"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert text_of(server, "def ", stop=stop) == answer["text_output"]


def test_sampling(server, reference):
    greedy = reference.text("def ", NEW)
    hot = {"max_tokens": NEW, "temperature": 1.5}
    assert text_of(server, "def ", top_k=1, **hot) == greedy
    assert text_of(server, "def ", top_p=1e-6, **hot) == greedy
    drawn = {text_of(server, "def ", seed=seed, **hot) for seed in range(3)}
    assert len(drawn) > 1
    with company(server, 3):
        again = {text_of(server, "def ", seed=seed, **hot) for seed in range(3)}
    assert again == drawn  # a seed's tokens do not depend on other requests
    assert len({text_of(server, "def ", **hot) for _ in range(3)}) > 1  # no seed
    few = {"seed": 1, "top_k": 5, "top_p": 0.9, **hot}
    assert text_of(server, "def ", **few) == text_of(server, "def ", **few)


def test_a_prompt_by_name(server, client, reference):
    expected = reference.text("import os\nimport re\nimport json", NEW)
    ids = reference.tokenizer.encode(" json")
    virtual = reference.tokenizer.encode("import os\nimport re\nimport")
    assert reference.tokenizer.encode("import os\nimport re\nimport json") == virtual + ids
    assert text_of(server, " json", max_tokens=NEW, prompt_name="imports") == expected
    assert text_of(server, " json", max_tokens=NEW) != expected
    tokens = engine_ids(client, ids, max_tokens=NEW, prompt_name="imports")
    assert reference.tokenizer.decode(tokens) == expected
    alone = reference.text("import os\nimport re\nimport", NEW)
    assert text_of(server, "", max_tokens=NEW, prompt_name="imports") == alone


# ---- the other fields of an answer


def counted(answer):
    return [answer[name] for name in ("prompt_tokens", "completion_tokens", "weights_version")]


def test_an_answer_counts_its_tokens(client, reference):
    ids = reference.tokenizer.encode("def ")
    answer = client.answer("def ", max_tokens=NEW)
    assert counted(answer) == [len(ids), NEW, "1"]
    virtual = reference.tokenizer.encode("import os\nimport re\nimport")
    answer = client.answer(" json", max_tokens=NEW, prompt_name="imports")
    assert counted(answer) == [len(virtual) + len(reference.tokenizer.encode(" json")), NEW, "1"]
    answer = client.answer("", max_tokens=NEW, prompt_name="imports")
    assert counted(answer) == [len(virtual), NEW, "1"]


def test_a_stop_string_and_the_end_token_are_counted(client, reference):
    tokens, tokenizer = reference.tokens("def ", 64), reference.tokenizer
    stop = tokenizer.decode(tokens)[7:10]
    made = next(n for n in range(1, 65) if stop in tokenizer.decode(tokens[:n]))
    answer = client.answer("def ", stop=stop)
    assert (answer["completion_tokens"], answer["finish_reason"]) == (made, "stop")
    for seed in range(99):  # one in four ends at once
        drawn = {"temperature": 1.0, "seed": seed, "max_tokens": 8}
        answer = client.answer(ENDING, **drawn)
        if answer["finish_reason"] == "stop":
            break
    made = engine_ids(client, tokenizer.encode(ENDING), **drawn)
    assert made[-1] == tokenizer.end and answer["completion_tokens"] == len(made)


def test_every_response_of_a_stream_says_how_far_it_is(server, client, reference):
    ids, expected = reference.tokenizer.encode("def "), reference.tokens("def ", NEW)
    _, answer = post(
        server, endpoint="generate_stream", text_input="def ", max_tokens=NEW, stream=True
    )
    events = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:")]
    so_far = [event["completion_tokens"] for event in events]
    assert so_far == sorted(set(so_far)) and so_far[-1] == NEW
    assert all(counted(event)[::2] == [len(ids), "1"] for event in events)
    inputs = tensors({"text_input": b"def ", "max_tokens": NEW, "stream": True}, TEXT_TYPES)
    found = list(client.infer("gpt", inputs))
    text = b"".join(one.as_numpy("text_output")[0] for one in found).decode()
    assert len(found) > 1 and text == "def " + reference.text("def ", NEW)
    assert [one.as_numpy("prompt_tokens").tolist() for one in found] == [[len(ids)]] * len(found)
    assert found[-1].as_numpy("completion_tokens").tolist() == [NEW]
    inputs = tensors({"input_ids": ids, "max_tokens": NEW, "stream": True}, ENGINE)
    found = list(client.infer("gpt_engine", inputs))
    assert [id for one in found for id in one.as_numpy("output_ids").tolist()] == expected
    assert [one.as_numpy("prompt_tokens").tolist() for one in found] == [[len(ids)]] * len(found)
    assert {one.as_numpy("weights_version")[0] for one in found} == {b"1"}


def test_as_many_tokens_as_fit(client, reference):
    tokens = reference.tokenizer.encode(" a b" * 300)[:500]
    text = reference.tokenizer.decode(tokens)
    assert reference.tokenizer.encode(text) == tokens
    answer = client.answer(text, max_tokens=-1)
    assert counted(answer)[:2] == [500, 12] and answer["finish_reason"] == "length"
    assert len(engine_ids(client, tokens, max_tokens=-1)) == 12
    with pytest.raises(ServeError, match=r"512 tokens .* exceed the 512 positions"):
        engine_ids(client, [7] * 512, max_tokens=-1)


# ---- the other models


def test_tokens_and_back(server, reference):
    for text in (*TEXTS, "", "a<|end|>b", "\x00\uffff"):
        ids = json.loads(post(server, "gpt_tokenize", text=text)[1])["ids"]
        assert ids == reference.tokenizer.encode(text)
        back = json.loads(post(server, "gpt_detokenize", ids=ids)[1])["text"]
        assert back == text.replace("<|end|>", "")
    status, answer = post(server, "gpt_detokenize", ids=[7, 4096])
    assert status == 400
    assert "INVALID_ARG: id 4096 is not a token: ids are 0 to 4095" in answer


def test_the_engine_in_one_response(client, reference):
    ids = reference.tokenizer.encode("def ")
    inputs = tensors({"input_ids": ids, "max_tokens": NEW}, ENGINE)
    (answer,) = client.infer("gpt_engine", inputs)
    assert answer.as_numpy("output_ids").tolist() == reference.tokens("def ", NEW)
    assert answer.as_numpy("text")[0].decode() == reference.text("def ", NEW)
    assert answer.as_numpy("finish_reason")[0] == b"length"
