"""Log-probabilities of the tokens: the training model's, and only on request."""

import json
from dataclasses import asdict

import pytest
import torch

from tests.serving.world import ENGINE, company, post, repo_of
from utils.serving.client import tensors
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import SamplingParams
from utils.serving.engine.worker import Worker

pytestmark = pytest.mark.timeout(600)

NEW, TOP = 10, 4
TEXT = "def read("


@pytest.fixture(scope="module")
def server(small_server):
    return small_server


@pytest.fixture(scope="module")
def reference(small_reference):
    return small_reference


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    """models/small on one rank; the server runs it on two."""
    return repo_of("small", 1, tmp_path_factory.mktemp("logprobs")) / "gpt_engine" / "1"


@torch.no_grad()
def check(reference, ids, made, told, top=TOP, greedy=True):
    """Compare `told`, about the tokens `made` after `ids`, with the training model."""
    logits = reference.model(torch.tensor([[*ids, *made]]))[0, len(ids) - 1 : -1]
    right = logits.log_softmax(dim=-1)
    assert [one["id"] for one in told] == made and len(made) > 0
    for row, one in zip(right, told, strict=True):
        listed = one["top_logprobs"]
        assert abs(one["logprob"] - row[one["id"]]) < 1e-4
        assert [entry["logprob"] for entry in listed] == pytest.approx(
            row.topk(top).values.tolist(), abs=1e-4
        )
        assert all(abs(entry["logprob"] - row[entry["id"]]) < 1e-4 for entry in listed)
        assert len({entry["id"] for entry in listed}) == top
        if greedy and top:
            assert listed[0] == {key: one[key] for key in ("token", "id", "logprob", "bytes")}
        for entry in (one, *listed):
            assert entry["token"] == bytes(entry["bytes"]).decode(errors="replace")


def joined(told):
    return b"".join(bytes(one["bytes"]) for one in told).decode()


def test_they_are_the_training_models_alone_and_in_a_full_batch(version, reference):
    ids = reference.tokenizer.encode(TEXT)
    wanted = SamplingParams(max_tokens=NEW, logprobs=TOP)
    with Engine(version, max_num_seqs=4, prefill_chunk=2) as engine:
        alone = engine.complete(ids, wanted)
        check(reference, ids, alone.tokens, alone.logprobs)
        assert joined(alone.logprobs) == alone.text
        some = [  # in one batch: greedy and sampled, with many, with none, without asking
            wanted,
            SamplingParams(NEW, temperature=1.5, seed=1, logprobs=20),
            SamplingParams(NEW, temperature=0.7, top_k=3, seed=2, logprobs=0),
            SamplingParams(NEW),
        ]
        streams = [engine.submit(ids + ids[:n], one) for n, one in enumerate(some)]
        *told, silent = (stream.result() for stream in streams)
        for n, (one, sampling) in enumerate(zip(told, some)):
            check(reference, ids + ids[:n], one.tokens, one.logprobs, sampling.logprobs, n == 0)
        assert silent.logprobs == [] and len(silent.tokens) == NEW
        chunks = list(engine.submit(ids, wanted))
        assert all(len(chunk.logprobs) == len(chunk.tokens) for chunk in chunks)
        together = [one for chunk in chunks for one in chunk.logprobs]
        check(reference, ids, alone.tokens, together)


def test_a_rank_tells_those_who_ask_and_nobody_else(version):
    setup = {"folder": version, "threads": 1, "rank": 0}
    worker = Worker(setup | {"config": asdict(EngineConfig(max_num_seqs=2))})
    read = {"start": 0, "tokens": [5, 6, 7], "sampling": [0.0, 0, 1.0, None]}

    def step(prefill, slots):
        command = {"prefill": prefill, "slots": slots, "tokens": [9] * len(slots), "blocks": []}
        return worker.step(command)

    assert step([read | {"slot": 0}], []).keys() == {"tokens"}
    answer = step([read | {"slot": 1, "logprobs": 2}], [0])
    assert answer["logprobs"].keys() == {0} and len(answer["logprobs"][0]) == 3
    assert step([], [0, 1])["logprobs"].keys() == {1}
    assert step([read | {"slot": 1}], [0]).keys() == {"tokens"}  # the slot's next request
    assert step([], [0, 1]).keys() == {"tokens"}


# ---- through the server


def test_whole_and_as_a_stream_by_every_way(server, client, reference):
    ids, made = reference.tokenizer.encode(TEXT), reference.tokens(TEXT, NEW)
    answer = client.answer(TEXT, max_tokens=NEW, logprobs=TOP)
    check(reference, ids, made, json.loads(answer["logprobs"]))
    fields = {"text_input": TEXT, "max_tokens": NEW, "logprobs": TOP, "stream": True}
    with company(server, 3):
        _, answer = post(server, endpoint="generate_stream", **fields)
    events = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:")]
    told = [json.loads(event["logprobs"]) for event in events]
    check(reference, ids, made, [one for some in told for one in some])
    counts = [event["completion_tokens"] for event in events]
    assert len(told) > 1
    assert [len(some) for some in told] == [b - a for a, b in zip([0, *counts], counts)]
    types = {**ENGINE, "text_input": "BYTES"}
    for values, model in (
        (fields, "gpt"),
        (fields | {"input_ids": ids}, "gpt_engine"),
        (fields | {"input_ids": ids, "stream": False}, "gpt_engine"),
    ):
        if model == "gpt_engine":
            del values["text_input"]
        answers = list(client.infer(model, tensors(values, types)))
        told = [json.loads(one.as_numpy("logprobs")[0]) for one in answers]
        check(reference, ids, made, [one for some in told for one in some])


def test_who_does_not_ask_is_not_told(server, client, reference):
    assert "logprobs" not in client.answer(TEXT, max_tokens=2)
    ids = reference.tokenizer.encode(TEXT)
    (answer,) = client.infer("gpt_engine", tensors({"input_ids": ids, "max_tokens": 2}, ENGINE))
    assert answer.as_numpy("logprobs") is None
    told = json.loads(client.answer(TEXT, max_tokens=2, logprobs=0)["logprobs"])
    assert [one["top_logprobs"] for one in told] == [[], []]


def test_a_stop_strings_tokens_are_told_as_well(client, reference):
    text = reference.text(TEXT, 40)
    stop = text[10:13]
    answer = client.answer(TEXT, max_tokens=40, stop=stop, logprobs=0, exclude_input_in_output=True)
    told = json.loads(answer["logprobs"])
    assert len(told) == answer["completion_tokens"]
    assert answer["text_output"] == text[: text.index(stop)]
    assert joined(told).startswith(text[: text.index(stop)] + stop[:1])
