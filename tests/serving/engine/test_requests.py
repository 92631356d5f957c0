"""Requests to a running engine: limits, queue, cancellation, stop strings, seeds, bad input."""

import threading
import time

import pytest
import torch

from tests.serving.engines import ENDLESS, version_of
from tests.serving.processes import PATIENCE, until
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import BadRequest, SamplingParams, Unavailable
from utils.serving.engine.version import LoadError

pytestmark = pytest.mark.timeout(300)

LONG = SamplingParams(max_tokens=50_000)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    virtual = {"kind": torch.randn(5, 16), "names": torch.randn(3, 16)}
    folder = version_of(ENDLESS, tmp_path_factory.mktemp("engine"), 1, virtual)
    with Engine(folder, max_num_seqs=3, queue=2) as engine:
        yield engine


def idle(engine):
    until(lambda: not engine.stats()["running"] and not engine.stats()["waiting"])


def test_an_answer_in_chunks_and_at_once_is_the_same(engine):
    sampling = SamplingParams(max_tokens=40)
    whole = engine.complete([1, 2, 3], sampling)
    chunks = list(engine.submit([1, 2, 3], sampling))
    assert [token for chunk in chunks for token in chunk.tokens] == whole.tokens
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert whole.finish == "length" and len(whole.tokens) == 40
    assert whole.text == engine.decoder(whole.tokens)


def test_who_reads_late_gets_all_in_one_chunk(engine):
    stream = engine.submit([1, 2], SamplingParams(max_tokens=30))
    idle(engine)
    assert [len(chunk.tokens) for chunk in stream] == [30]


def test_equal_seeds_give_equal_tokens_whatever_the_batch(engine):
    wanted = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=11)
    alone = engine.complete([4, 5], wanted).tokens
    for company in (1, 2):
        others = [engine.submit([9], SamplingParams(40, 1.0, seed=11 + n)) for n in range(company)]
        stream = engine.submit([4, 5], wanted)
        assert stream.result().tokens == alone
        assert all(other.result().tokens != alone for other in others)
    drawn = [SamplingParams(max_tokens=30, temperature=1.0) for _ in range(2)]
    one, other = (engine.complete([4, 5], sampling).tokens for sampling in drawn)
    assert one != other  # without a seed they differ


def test_a_stop_string_ends_the_text_and_frees_the_slot(engine):
    text = engine.complete([1, 2, 3], SamplingParams(max_tokens=40)).text
    stop = next(text[n : n + 3] for n in range(6, 36) if text.find(text[n : n + 3]) == n)
    stream = engine.submit([1, 2, 3], SamplingParams(max_tokens=50_000, stop=("never seen", stop)))
    chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].finish == "stop" and sum(len(chunk.tokens) for chunk in chunks) <= 40
    never = text[-1] + "never"  # text held back for it comes at the end
    assert engine.complete([1, 2, 3], SamplingParams(max_tokens=40, stop=(never,))).text == text
    idle(engine)


def test_cancelling_frees_the_slot_for_who_waits(engine):
    before = engine.stats()
    running = [engine.submit([n], LONG, id=f"run-{n}") for n in range(3)]
    waiting = [engine.submit([n], SamplingParams(max_tokens=2)) for n in range(2)]
    for stream in running:
        assert stream.read(PATIENCE).tokens  # all three hold a slot now
    with pytest.raises(Unavailable, match="the queue is full: 3 requests run and 2 wait"):
        engine.submit([1], SamplingParams(max_tokens=1))
    assert engine.stats()["requests_rejected"] == before["requests_rejected"] + 1
    assert engine.stats()["occupancy"] == 1.0
    assert engine.cancel("run-1") and not engine.cancel("run-1") and not engine.cancel("absent")
    assert [stream.result(PATIENCE).finish for stream in waiting] == ["length"] * 2
    assert list(running[1])[-1].finish == "cancelled"
    running[0].cancel()
    running[2].cancel()
    running[2].cancel()
    idle(engine)
    after = engine.stats()
    assert after["requests_cancelled"] == before["requests_cancelled"] + 3
    assert after["kv_used"] == 0 and after["kv_size"] == 3 * 60_000 / 16
    assert running[0].result().finish == "cancelled"


def test_a_waiting_request_can_be_cancelled(engine):
    running = [engine.submit([n], LONG) for n in range(3)]
    waiting = engine.submit([7], LONG)
    assert waiting.read(0.05) is None
    waiting.cancel()
    assert waiting.result() is not None and waiting.result().tokens == []
    for stream in running:
        stream.cancel()
    idle(engine)


def test_ids_are_unlike_each_other_while_they_are_served(engine):
    first = engine.submit([1], LONG, id="same")
    with pytest.raises(BadRequest, match="'same' belongs to a request still being served"):
        engine.submit([1], id="same")
    for n in range(20):  # the next request of this id gets no tokens of the last one
        first.cancel()
        answer = engine.submit([n], SamplingParams(max_tokens=4), id="same").result()
        assert answer == engine.complete([n], SamplingParams(max_tokens=4))
        first = engine.submit([1], LONG, id="same")
        assert first.read(PATIENCE).tokens
    first.cancel()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([301],), "token 301 is not in the vocabulary: ids are integers from 0 to 300"),
        (([],), "there is nothing to continue"),
        (("text",), "'text' is not a list of token ids"),
        (([1], {"max_tokens": 3}), "sampling is a dict"),
        (([1], None, "absent"), "prompt 'absent' is unknown: this version has kind, names"),
        (([1], None, 7), "prompt 7 is unknown"),
        (([1], None, None, 7), "id 7 is not a string"),
        (
            ([1] * 11, SamplingParams(max_tokens=59_990)),
            r"0 virtual tokens \+ 11 tokens \+ max",
        ),
        (([1], SamplingParams(max_tokens=59_995), "kind"), "5 virtual .* the 60000 positions"),
        (([1] * 60_000, SamplingParams(max_tokens=-1)), r"60000 tokens \+ max_tokens 1 exceed"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(engine, arguments, message):
    with pytest.raises(BadRequest, match=message) as refused:
        engine.submit(*arguments)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_many_threads_ask_at_once(engine):
    """More than the queue holds: each gets its answer or a clear refusal."""
    expected = {n: engine.complete([n], SamplingParams(max_tokens=12)).tokens for n in range(4)}
    outcomes, lock = [], threading.Lock()

    def ask(number):
        try:
            outcome = engine.complete([number % 4], SamplingParams(max_tokens=12)).tokens
            outcome = outcome == expected[number % 4]
        except Unavailable as error:
            outcome = str(error).startswith("the queue is full")
        with lock:
            outcomes.append(outcome)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert outcomes == [True] * 40
    idle(engine)


def test_statistics_count(engine):
    before = engine.stats()
    engine.complete([1, 2], SamplingParams(max_tokens=9))
    after = engine.stats()
    assert after["requests_total"] == before["requests_total"] + 1
    assert after["tokens_total"] == before["tokens_total"] + 9
    assert after["steps_total"] >= before["steps_total"] + 9
    assert after["ready"] and after["slots"] == 3 and after["queue"] == 2
    assert after["tokens_per_second"] > 0 and after["step_seconds"] > 0
    assert after["time_to_first_token_last"] > 0 and after["time_to_first_token"] > 0
    assert after["restarts"] == after["requests_failed"] == 0
    assert after["prompt_tokens_total"] == before["prompt_tokens_total"] + 2


def test_histograms_count_requests_and_tokens(engine):
    before = engine.histograms()
    begin = time.monotonic()
    streams = [engine.submit([1, 2], SamplingParams(max_tokens=9)) for _ in range(4)]  # 3 slots
    for stream in streams:
        stream.result()
    lasted = time.monotonic() - begin
    idle(engine)
    took = engine.histograms()
    new = {name: took[name].count - before[name].count for name in took}
    assert new == {
        "request_queue_time": 4, "time_to_first_token": 4, "inter_token_latency": 4 * 8,
        "e2e_request_latency": 4,
    }
    seconds = {name: took[name].sum - before[name].sum for name in took}
    assert 0 < seconds["request_queue_time"] < seconds["time_to_first_token"]
    assert seconds["time_to_first_token"] < seconds["e2e_request_latency"] < 4 * lasted
    made = seconds["time_to_first_token"] + seconds["inter_token_latency"]
    assert made <= seconds["e2e_request_latency"] * (1 + 1e-9)  # plus delivery of the last token
    for found in took.values():  # each bound also counts all below it
        assert found.counts == sorted(found.counts) and found.counts[-1] == found.count


def test_no_folder(tmp_path):
    with pytest.raises(LoadError, match=r"nowhere/manifest\.json is missing"):
        Engine(tmp_path / "nowhere")
