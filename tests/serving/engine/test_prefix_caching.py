"""Equal beginnings are computed once: what is taken from the cache is right, and counted."""

import contextlib
import os
import signal
import uuid

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.engines import ODD, TIED, reference, version_of
from tests.serving.processes import until
from tests.tiers import first
from utils.models.gpt import GPT
from utils.serving.engine.engine import Engine
from utils.serving.engine.model import ServedDecoder
from utils.serving.engine.request import SamplingParams, Unavailable
from utils.serving.engine.scheduler import Request, Scheduler
from utils.serving.engine.version import Version

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

# ---- who finds what


def scheduler_of(slots, **options):
    return Scheduler(slots, queue=20, prefill_chunk=100, end_tokens=(), **options)


def request(tokens, count=1, virtual=0, prompt="p"):
    sampling = SamplingParams(max_tokens=count)
    return Request(uuid.uuid4().hex, tokens, sampling, prompt if virtual else None, virtual)


def enter(scheduler, *requests):
    """The commands for the first chunks of requests that come together."""
    for one in requests:
        scheduler.add(one)
    step = scheduler.plan()
    scheduler.advance(step, [9] * len(step.expected()))
    return step.command()["prefill"]


def finish(scheduler):
    while (step := scheduler.plan()) is not None:
        scheduler.advance(step, [9] * len(step.expected()))


@pytest.mark.parametrize(
    ("kept", "comes", "shared"),
    [
        (request([1, 2, 3, 4]), request([1, 2, 3, 5, 6]), 3),
        (request([1, 2, 3, 4]), request([2, 2, 3, 4]), 0),
        (request([1, 2, 3]), request([1, 2, 3]), 2),  # what follows is read from the last one
        (request([1]), request([1]), 0),
        (request([1, 2, 3], 4), request([1, 2, 3, 9, 9, 9, 9, 9]), 6),  # the last new one is not in
        (request([1, 2], virtual=3), request([1, 2, 5], virtual=3), 5),
        (request([1, 2], virtual=3), request([4], virtual=3), 3),  # the virtual ones alone
        (request([1, 2], virtual=3), request([1, 2, 5]), 0),
        (request([1, 2], virtual=3), request([1, 2], virtual=3, prompt="q"), 0),
        (request([], virtual=3), request([], virtual=3), 0),  # they are never divided
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_an_equal_beginning_is_found(kept, comes, shared, together):
    kept, comes = (Request(r.id, r.tokens, r.sampling, r.prompt, r.virtual) for r in (kept, comes))
    scheduler = scheduler_of(2)
    if together:
        one, other = enter(scheduler, kept, comes)
        shared = min(shared, kept.length)
    else:
        (one,) = enter(scheduler, kept)
        finish(scheduler)
        (other,) = enter(scheduler, comes)
    assert (one["slot"], other["slot"], one["start"]) == (0, 1, 0)
    assert (other["start"], comes.shared) == (shared, shared)
    assert other.get("source") == (0 if shared else None)
    assert other["tokens"] == comes.tokens[max(0, shared - comes.virtual) :]
    finish(scheduler)


def test_of_several_the_longest_is_taken_and_the_oldest_is_given_up():
    scheduler = scheduler_of(3)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3]):
        enter(scheduler, request(tokens))
    assert [one.tokens for one in scheduler.kept] == [[1, 2], [1, 2, 3, 4], [1, 2, 3]]
    (command,) = enter(scheduler, request([1, 2, 3, 4, 5]))  # of slot 0 nothing more can be wanted
    assert (command["slot"], command["start"], command["source"]) == (0, 4, 1)
    (command,) = enter(scheduler, request([7, 7]))  # slot 1 was left longest ago
    assert (command["slot"], command["start"]) == (1, 0) and "source" not in command


def test_a_conversation_goes_on_where_it_is():
    scheduler = scheduler_of(2)
    enter(scheduler, request([5, 5, 5]))
    enter(scheduler, request([1, 2, 3], 3))
    finish(scheduler)
    (command,) = enter(scheduler, request([1, 2, 3, 9, 9, 9, 4]))  # though slot 0 was left before
    assert command == {
        "slot": 1, "start": 5, "tokens": [9, 4], "sampling": [0.0, 0, 1.0, None],
    }
    (command,) = enter(scheduler, request([5, 5, 5, 6]))
    assert (command["slot"], command["start"]) == (0, 3) and "source" not in command


def test_a_token_of_the_same_step_is_not_there_yet():
    scheduler = scheduler_of(2)
    enter(scheduler, request([1, 2, 3], 5))
    (command,) = enter(scheduler, request([1, 2, 3, 9, 4]))  # the ranks read it before that 9
    assert (command["start"], command["source"]) == (3, 0)


def test_the_batch_stays_narrow():
    scheduler = scheduler_of(6)
    for token in range(4):  # one after another: each leaves its slot as it is
        enter(scheduler, request([token]))
    enter(scheduler, request([4, 4], 50), request([5, 5], 50))
    assert [one and one.tokens[0] for one in scheduler.slots] == [None] * 4 + [4, 5]
    (command,) = enter(scheduler, request([0, 7], 50))
    assert (command["slot"], command["start"], command["source"]) == (3, 1, 0)
    scheduler.end(scheduler.slots[4], "cancelled")
    (command,) = enter(scheduler, request([6, 6], 50))  # between others it costs no row more
    assert command["slot"] == 4


def test_of_who_left_early_only_what_was_read_is_taken():
    scheduler = Scheduler(2, queue=2, prefill_chunk=4, end_tokens=())
    long = request(list(range(20)))
    scheduler.add(long)
    for _ in range(2):
        scheduler.advance(scheduler.plan(), [])
    scheduler.plan()
    scheduler.end(long, "cancelled")  # while the ranks read its third chunk
    (command,) = enter(scheduler, request(list(range(20))))
    assert (command["slot"], command["start"], command["source"]) == (1, 12, 0)


def test_nothing_is_found_after_a_clear_or_where_it_is_switched_off():
    for scheduler in (scheduler_of(2), scheduler_of(2, enable_prefix_caching=False)):
        enter(scheduler, request([1, 2, 3]))
        if scheduler.enable_prefix_caching:
            scheduler.clear()  # the ranks died
        for _ in range(3):
            (command,) = enter(scheduler, request([1, 2, 3]))
            assert command["start"] == 0 and "source" not in command
            if scheduler.enable_prefix_caching:
                scheduler.clear()


# ---- anything in any order


class Rows:
    """What the ranks do with their cache, told with tuples: a position holds all up to it, and the
    token that follows depends on all of the row."""

    def __init__(self, slots, positions, virtual):
        self.rows = [[None] * positions for _ in range(slots)]
        self.lengths, self.virtual = [0] * slots, virtual
        self.read = 0

    def step(self, command):
        made = [self.prefill(**chunk) for chunk in command["prefill"]]
        made = [token for token in made if token is not None]
        slots = command["slots"]
        for slot in range(min(slots, default=0), max(slots, default=-1) + 1):
            row, at = self.rows[slot], min(self.lengths[slot], len(self.rows[slot]) - 1)
            if slot in slots:
                self.write(slot, at, [command["tokens"][slots.index(slot)]])
                made.append(self.follows(slot))
            else:
                row[at] = "nobody's"
        return made

    def prefill(self, slot, start, tokens, source=None, prompt=None, sampling=None):
        if source is not None:
            assert source != slot
            self.rows[slot][:start] = self.rows[source][:start]
        new = tokens if prompt is None else [prompt] * self.virtual + tokens
        assert new
        self.write(slot, start, new)
        self.read += len(new)
        return self.follows(slot) if sampling else None

    def write(self, slot, start, new):
        for at, token in enumerate(new, start):
            self.rows[slot][at] = (*(self.rows[slot][at - 1] if at else ()), token)
        self.lengths[slot] = start + len(new)

    def follows(self, slot):
        row = self.rows[slot][: self.lengths[slot]]
        assert all(one == row[-1][: at + 1] for at, one in enumerate(row)), row
        return follows(row[-1])


def follows(sequence):
    """The next token, one of four; 0 ends the text."""
    return sum(map(hash, map(str, sequence))) % 7 % 4


def answer(one):
    """What a request must get."""
    sequence, new = [one.prompt] * one.virtual + one.tokens, []
    while len(new) < one.sampling.max_tokens and 0 not in new:
        new.append(follows(sequence + new))
    return new


steps = st.lists(
    st.one_of(
        st.tuples(
            st.lists(st.integers(1, 2), max_size=6),  # two tokens: many begin alike
            st.sampled_from([None, "p", "q"]),
            st.integers(1, 5),
        ),
        st.integers(0, 9),  # leaves, by its place among those that are served
        st.none(),  # a step
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(steps, st.integers(1, 4), st.integers(1, 6))
def test_whatever_comes_and_goes_all_get_their_answers_and_every_slot_is_free_again(
    steps, slots, prefill_chunk
):
    virtual, computed, asked, number = 3, 0, [], 0
    scheduler = Scheduler(slots, queue=6, prefill_chunk=prefill_chunk, end_tokens=[0])
    rows = Rows(slots, virtual + 6 + 5, virtual)

    def step(leaves=()):
        nonlocal computed
        planned = scheduler.plan()
        if planned is not None:
            computed += sum(chunk.stop - chunk.start for chunk in planned.chunks)
            tokens = rows.step(planned.command())
            for one in leaves:  # while the ranks work
                scheduler.end(one, "cancelled")
            scheduler.advance(planned, tokens)
            taken = {slot for slot, one in enumerate(scheduler.slots) if one is not None}
            assert taken | set(scheduler.free) == set(range(slots))
            assert len(taken) + len(scheduler.free) == slots

    for move in steps:
        if isinstance(move, tuple) and (move[0] or move[1]):
            tokens, prompt, count = move
            number += 1
            sampling = SamplingParams(max_tokens=count)
            one = Request(str(number), tokens, sampling, prompt, virtual if prompt else 0)
            with contextlib.suppress(Unavailable):
                scheduler.add(one)
                asked.append(one)
        elif isinstance(move, int):
            served = list(scheduler.requests.values())
            step(served[move : move + 1])
        else:
            step()
    while scheduler.requests:
        step()
    for one in asked:
        if one.finish == "cancelled":
            assert one.new == answer(one)[: len(one.new)]
        else:
            assert one.new == answer(one)
    assert rows.read == computed
    assert sorted(scheduler.free) == list(range(slots)) and not scheduler.waiting


# ---- the ranks


def test_the_logits_behind_a_beginning_that_was_copied(tmp_path):
    version = Version.read(version_of(ODD, tmp_path, 1))
    decoder = ServedDecoder(version.model, version.weights(0), 0, 1, 3, 40)
    tokens = [5, 9, 2, 30, 7, 7, 1, 8]
    right = decoder.prefill(0, 0, tokens)
    right_after = decoder.decode([0], [4])
    for source in (0, None):  # copied, then where it is
        found = decoder.prefill(2, 6, tokens[6:], source=source)
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(decoder.decode([2], [4]), right_after)
    decoder.prefill(1, 3, [6, 6, 6], source=0)  # goes on in another way; slot 0 stays what it is
    torch.testing.assert_close(decoder.prefill(0, 7, tokens[7:]), right)


@pytest.mark.parametrize(("config", "tp"), first(1, [(ODD, 2), (ODD, 1), (TIED, 2)]))
def test_answers_with_equal_beginnings_are_those_without(config, tp, tmp_path):
    """Greedy tokens are those of the training model; drawn ones and log-probabilities those of an
    engine that shares nothing."""
    chance = torch.Generator().manual_seed(1)
    virtual = {"kind": torch.randn(5, config.hidden_size, generator=chance)}
    beginning = torch.randint(config.vocab_size, (30,), generator=chance).tolist()
    cases = [
        (
            beginning[: 30 - 5 * (number % 3)] + [number] * (1 + number % 4),
            (None, "kind")[number % 2],
        )
        for number in range(10)
    ]
    folder = version_of(config, tmp_path, tp, virtual)
    model = GPT.from_pretrained(tmp_path / "model")
    answers, stats = {}, {}
    for caching in (True, False):
        with Engine(
            folder, max_num_seqs=3, prefill_chunk=16, enable_prefix_caching=caching
        ) as engine:
            streams = [
                engine.submit(tokens, sampling, prompt)
                for sampling in (
                    SamplingParams(8, logprobs=3), SamplingParams(8, temperature=1.0, seed=5)
                )
                for tokens, prompt in cases
            ]
            answers[caching] = [stream.result() for stream in streams]
            stats[caching] = engine.stats()
    for (tokens, prompt), found in zip(cases, answers[True]):
        assert found.tokens == reference(model, tokens, 8, virtual.get(prompt))
    for found, right in zip(answers[True], answers[False], strict=True):
        assert (found.tokens, found.finish) == (right.tokens, right.finish)
        for one, other in zip(found.logprobs, right.logprobs, strict=True):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    positions = 2 * sum(len(tokens) + 5 * bool(prompt) for tokens, prompt in cases)
    assert stats[True]["prompt_tokens_total"] == stats[False]["prompt_tokens_total"] == positions
    assert stats[True]["prefix_cache_hits_total"] > positions / 3
    assert stats[False]["prefix_cache_hits_total"] == 0
    assert stats[True]["running"] == stats[True]["kv_used"] == 0


@pytest.mark.thorough
def test_what_is_found_is_counted_and_new_ranks_find_nothing(tmp_path):
    four = SamplingParams(max_tokens=4)

    def hits():
        return engine.stats()["prefix_cache_hits_total"]

    with Engine(version_of(TIED, tmp_path, 1), max_num_seqs=2) as engine:
        right = engine.complete([3] * 20, four)
        assert hits() == 0
        assert engine.complete([3] * 20, four) == right and hits() == 19
        more = [3] * 20 + right.tokens + [8]
        engine.complete(more, four)  # all but the last new token was in
        assert hits() == 19 + 23
        os.kill(engine.pids[0], signal.SIGKILL)
        until(lambda: engine.stats()["restarts"] == 1)
        assert engine.complete([3] * 20, four) == right and hits() == 19 + 23
        assert engine.complete([3] * 20, four) == right and hits() == 19 + 23 + 19
