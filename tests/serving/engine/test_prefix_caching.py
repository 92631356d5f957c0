"""Equal prefixes are computed once: what comes from the cache is right, and counted."""

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
from utils.serving.engine.blocks import BLOCK, blocks_for
from utils.serving.engine.engine import Engine
from utils.serving.engine.model import ServedDecoder
from utils.serving.engine.request import SamplingParams, Unavailable
from utils.serving.engine.scheduler import LAST, Request, Scheduler
from utils.serving.engine.version import Version

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]

# ---- lookups


A, B, C = ([token] * BLOCK for token in (1, 2, 3))  # each fills a block


def scheduler_of(slots=2, num_blocks=12, **options):
    return Scheduler(slots, num_blocks, queue=20, prefill_chunk=100, **options)


def request(tokens, count=1, virtual=0, prompt="p"):
    sampling = SamplingParams(max_tokens=count)
    return Request(uuid.uuid4().hex, tokens, sampling, prompt if virtual else None, virtual)


def enter(scheduler, *requests):
    """The commands for the first chunks of requests that arrive together."""
    for one in requests:
        scheduler.add(one)
    step = scheduler.plan()
    commands = step.command()["prefill"]
    scheduler.advance(step, [9] * len(step.expected()))
    return commands


def finish(scheduler):
    while (step := scheduler.plan()) is not None:
        scheduler.advance(step, [9] * len(step.expected()))


@pytest.mark.parametrize(
    ("kept", "comes", "shared"),
    [
        (request(A + B), request(A + B + C), 32),
        (request(A + B), request(A + C), 16),
        (request(A + B[1:]), request(A + B[1:] + [5]), 16),  # the second block was not full
        (request(A + B), request(B + B), 0),
        (request(A + B), request(B), 0),  # a block is identified with all before it
        (request(A), request(A), 0),  # the last position is always computed
        (request(A, 17), request(A + [9] * 17), 32),  # its new tokens are cached, too
        (request(A, 16), request(A + [9] * 16 + [1]), 16),  # except the last one
        (request(A[3:], virtual=3), request(A[3:] + [5], virtual=3), 16),
        (request([4], virtual=16), request([5], virtual=16), 16),  # only the virtual tokens
        (request(A, virtual=16), request(A + B), 0),
        (request(A, virtual=16), request(A, virtual=16, prompt="q"), 0),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_an_equal_beginning_is_found(kept, comes, shared, together):
    kept, comes = (Request(r.id, r.tokens, r.sampling, r.prompt, r.virtual) for r in (kept, comes))
    scheduler = scheduler_of()
    if together:
        one, other = enter(scheduler, kept, comes)
        shared = min(shared, kept.length // BLOCK * BLOCK)
    else:
        (one,) = enter(scheduler, kept)
        finish(scheduler)
        (other,) = enter(scheduler, comes)
    assert (one["start"], other["start"], comes.shared) == (0, shared, shared)
    same = [a == b for a, b in zip(one["blocks"], other["blocks"])]
    assert same[: shared // BLOCK] == [True] * (shared // BLOCK)
    assert other["tokens"] == comes.tokens[max(0, shared - comes.virtual) :]
    finish(scheduler)
    assert scheduler.blocks.used == 0


def test_what_nobody_can_find_is_taken_first_then_what_was_left_longest_ago():
    scheduler = scheduler_of(num_blocks=6)
    for tokens in (A + [5], B + [5], C + C + [5]):  # the last takes a partial block
        enter(scheduler, request(tokens))
    (command,) = enter(scheduler, request(B + [6] * 2 * BLOCK + [7]))  # four blocks, one is found
    assert (command["start"], len(command["blocks"])) == (16, 4)
    (command,) = enter(scheduler, request(C + C + [5]))
    assert command["start"] == 32
    (command,) = enter(scheduler, request(A + [5]))
    assert command["start"] == 0  # it was evicted


def test_who_does_not_find_enough_blocks_waits_and_nothing_is_lost():
    scheduler = scheduler_of(num_blocks=4)
    enter(scheduler, request(A + B + [5], 2))
    scheduler.add(request(A + C + C + [5]))  # shares one block, needs three
    scheduler.add(request([7]))  # would fit, but came later
    step = scheduler.plan()
    assert not step.chunks and scheduler.blocks.used == 3
    scheduler.advance(step, [9])
    step = scheduler.plan()
    assert [chunk.start for chunk in step.chunks] == [16]


def test_of_who_left_early_only_what_was_read_is_taken():
    scheduler = Scheduler(2, num_blocks=8, queue=2, prefill_chunk=20)
    long = request(A + B + C + [1])
    scheduler.add(long)
    scheduler.advance(scheduler.plan(), [])
    scheduler.plan()
    scheduler.end(long, "cancelled")  # while the ranks read its second chunk, up to 40
    (command,) = enter(scheduler, request(A + B + C + [1]))
    assert command["start"] == 32


def test_nothing_is_found_after_a_clear_or_where_it_is_switched_off():
    for scheduler in (scheduler_of(), scheduler_of(enable_prefix_caching=False)):
        enter(scheduler, request(A + B))
        for _ in range(3):
            if scheduler.enable_prefix_caching:
                scheduler.clear()  # the ranks died
            (command,) = enter(scheduler, request(A + B))
            assert command["start"] == 0


# ---- random sequences of requests


class Rows:
    """The ranks' cache in tuples: a position holds its whole prefix, and the next token depends on
    the whole row."""

    def __init__(self, slots, blocks):
        self.blocks = [[None] * BLOCK for _ in range(blocks)]
        self.tables = [[] for _ in range(slots)]
        self.lengths, self.last = [0] * slots, [None] * slots
        self.read = 0

    def step(self, command):
        made = [self.prefill(**chunk) for chunk in command["prefill"]]
        made = [token for token in made if token is not None]
        for slot, block in command["blocks"]:
            self.tables[slot] = self.tables[slot][: self.lengths[slot] // BLOCK] + [block]
        for slot, token in zip(command["slots"], command["tokens"]):
            self.write(slot, self.lengths[slot], [self.last[slot] if token == LAST else token])
            made.append(self.follows(slot))
        return made

    def prefill(self, slot, start, tokens, blocks=(), prompt=None, sampling=None, drawn=0):
        if blocks:
            self.tables[slot] = list(blocks)
        if prompt is not None:
            name, first, last = prompt
            tokens = [(name, i) for i in range(first, last)] + tokens
        assert tokens
        self.write(slot, start, tokens)
        self.read += len(tokens)
        return self.follows(slot) if sampling else None

    def at(self, slot, position):
        return self.blocks[self.tables[slot][position // BLOCK]], position % BLOCK

    def write(self, slot, start, new):
        for position, token in enumerate(new, start):
            block, place = self.at(slot, position)
            before = ()
            if position:
                other, where = self.at(slot, position - 1)
                before = other[where]
            block[place] = (*before, token)
        self.lengths[slot] = start + len(new)

    def follows(self, slot):
        row = []
        for position in range(self.lengths[slot]):
            block, place = self.at(slot, position)
            row.append(block[place])
        assert all(one == row[-1][: at + 1] for at, one in enumerate(row)), row
        self.last[slot] = follows(row[-1])
        return self.last[slot]


def follows(sequence):
    """The next token, one of four; 0, which is rare, ends the text."""
    number = sum(map(hash, map(str, sequence)))
    return number % 31 and 1 + number % 3


def answer(one):
    """The tokens that a request must get."""
    sequence, new = [(one.prompt, i) for i in range(one.virtual)] + one.tokens, []
    while len(new) < one.sampling.max_tokens and 0 not in new:
        new.append(follows(sequence + new))
    return new


steps = st.lists(
    st.one_of(
        st.tuples(
            st.lists(st.integers(1, 2), min_size=1, max_size=3),  # 2 tokens: many equal prefixes
            st.sampled_from([None, "p", "q"]),
            st.integers(10, 40),
        ),
        st.integers(0, 9),  # leaves, by its index among those served
        st.none(),  # a step
    ),
    min_size=3,
    max_size=60,
)
LONGEST = 20 + 3 * 11 + 40  # virtual, given and new tokens


@settings(max_examples=400, deadline=None)
@given(steps, st.integers(1, 4), st.integers(0, 2), st.integers(1, 40), st.booleans())
def test_whatever_comes_and_goes_all_get_their_answers_and_every_block_is_free_again(
    steps, slots, spare, prefill_chunk, ahead
):
    """With few enough blocks for requests to preempt one another; steps run in sequence, or each is
    planned before the previous one's tokens are known."""
    computed, asked = 0, []
    blocks = blocks_for(LONGEST) + spare
    scheduler = Scheduler(slots, blocks, 6, prefill_chunk, end_tokens=[0])
    rows, under_way = Rows(slots, blocks), []

    def step(leaves=()):
        nonlocal computed
        planned = scheduler.plan()
        if planned is not None:
            computed += sum(chunk.stop - chunk.start for chunk in planned.chunks)
            under_way.append((planned, rows.step(planned.command())))
        for one in leaves:  # while the ranks work
            scheduler.end(one, "cancelled")
        while len(under_way) > (ahead and planned is not None):
            scheduler.advance(*under_way.pop(0))
        taken = {one.slot for one in scheduler.running}
        assert taken.isdisjoint(scheduler.free) and len(taken) + len(scheduler.free) == slots

    for move in steps:
        if isinstance(move, tuple):
            parts, prompt, count = move
            tokens = [token for part in parts for token in [part] * 11]
            one = Request(
                str(len(asked)), tokens, SamplingParams(max_tokens=count), prompt,
                20 if prompt else 0,
            )
            with contextlib.suppress(Unavailable):
                scheduler.add(one)
                asked.append(one)
        elif isinstance(move, int):
            step(list(scheduler.requests.values())[move : move + 1])
        else:
            step()
    while scheduler.requests or under_way:
        step()
    for one in asked:
        if one.finish == "cancelled":
            assert one.new == answer(one)[: len(one.new)]
        else:
            assert one.new == answer(one)
    assert rows.read == computed
    assert sorted(scheduler.free) == list(range(slots)) and not scheduler.waiting
    assert scheduler.blocks.used == 0 and sorted(scheduler.blocks.free) == list(range(blocks))


# ---- the ranks


def test_the_logits_behind_a_beginning_that_is_shared(tmp_path):
    version = Version.read(version_of(ODD, tmp_path, 1))
    decoder = ServedDecoder(version.model, version.weights(0), 0, 1, 3, 40)
    tokens = [5, 9, 2, 30, 7, 7, 1, 8] * 2
    right = decoder.prefill(0, 0, tokens + [4])
    right_after = decoder.decode([0], [4])
    decoder.cache.assign(2, decoder.cache.blocks[0, :1].tolist())
    torch.testing.assert_close(decoder.prefill(2, 16, [4]), right)
    torch.testing.assert_close(decoder.decode([2], [4]), right_after)
    decoder.prefill(2, 16, [6, 6, 6])  # diverges; slot 0 stays as it is
    torch.testing.assert_close(decoder.prefill(0, 16, [4]), right)


@pytest.mark.parametrize(("config", "tp"), first(1, [(ODD, 2), (ODD, 1), (TIED, 2)]))
def test_answers_with_equal_beginnings_are_those_without(config, tp, tmp_path):
    """Greedy tokens are the training model's; sampled tokens and log-probabilities are those of an
    engine without prefix caching."""
    chance = torch.Generator().manual_seed(1)
    virtual = {"kind": torch.randn(5, config.hidden_size, generator=chance)}
    beginning = torch.randint(config.vocab_size, (50,), generator=chance).tolist()
    cases = [
        (
            beginning[: 50 - 5 * (number % 3)] + [number] * (1 + number % 4),
            (None, "kind")[number % 2],
        )
        for number in range(10)
    ]
    folder = version_of(config, tmp_path, tp, virtual)
    model = GPT.from_pretrained(tmp_path / "model")
    answers, stats = {}, {}
    for caching in (True, False):
        # with few enough blocks to preempt one of three requests at times
        with Engine(
            folder, max_num_seqs=3, max_model_len=80, prefill_chunk=16, num_blocks=8,
            enable_prefix_caching=caching,
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
    assert stats[False]["preemptions_total"] > 0
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
        right = engine.complete([3] * 30, four)
        assert hits() == 0
        assert engine.complete([3] * 30, four) == right and hits() == 16
        more = [3] * 30 + right.tokens + [8]
        engine.complete(more, four)  # all but the last new token were cached
        assert hits() == 16 + 32
        os.kill(engine.pids[0], signal.SIGKILL)
        until(lambda: engine.stats()["restarts"] == 1)
        assert engine.complete([3] * 30, four) == right and hits() == 16 + 32
        assert engine.complete([3] * 30, four) == right and hits() == 16 + 32 + 16
