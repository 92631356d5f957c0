"""The engine's parts without processes: scheduling, and logits to tokens."""

import pytest
import torch

from utils.serving.engine.request import BadRequest, SamplingParams, Unavailable, check_tokens
from utils.serving.engine.sampling import Sampler, sample
from utils.serving.engine.scheduler import LAST, Request, Scheduler

# ---- requests

REFUSED = {
    "max_tokens": (0, -2, 1.5, "4", None, True, 2**31),
    "temperature": (-0.1, float("nan"), float("inf"), "1", None, True, 10**400),
    "top_k": (-1, 2.0, None, "3"),
    "top_p": (0.0, -0.5, 1.01, float("nan"), None, "1"),
    "seed": (-1, 2**63, 1.0, "7"),
    "logprobs": (-1, 21, 1.0, "2", True),
    "stop": (5, b"x", ("",), ("a" * 65,), (3,), ["x"] * 9, None, {"a"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_sampling_is_refused_in_one_sentence(name):
    for value in REFUSED[name]:
        with pytest.raises(BadRequest, match=name.partition("_")[0]) as refused:
            SamplingParams(**{name: value})
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 250


def test_good_sampling_is_taken_as_plain_values():
    numpy = torch.tensor([3, 2]).numpy()
    taken = SamplingParams(max_tokens=numpy[0], top_k=numpy[1], temperature=1, stop="\n")
    assert (taken.max_tokens, taken.top_k, taken.temperature) == (3, 2, 1.0)
    assert type(taken.max_tokens) is int and taken.stop == ("\n",)
    assert check_tokens(numpy, 4) == check_tokens((3, 2), 4) == [3, 2]


@pytest.mark.parametrize("tokens", [5, "abc", None, [1, 4], [-1], [1.0], [True], [[1]], {1: 2}])
def test_bad_tokens_are_refused(tokens):
    with pytest.raises(BadRequest, match="token"):
        check_tokens(tokens, 4)


# ---- the scheduler


def request(name, length=3, count=4, virtual=0):
    """A request that shares no prefix with requests of other names."""
    prompt, tokens = "p" if virtual else None, [sum(map(ord, name))] * length
    return Request(name, tokens, SamplingParams(max_tokens=count), prompt, virtual)


def names(step):
    return [p.request.id for p in step.chunks], [r.id for r in step.running]


def test_requests_join_and_leave_between_steps():
    scheduler = Scheduler(2, num_blocks=8, queue=2, prefill_chunk=100, end_tokens=[0])
    a, b, c, d = (request(name, count=2 + (name == "b")) for name in "abcd")
    for one in (a, b, c, d):
        scheduler.add(one)
    with pytest.raises(Unavailable, match="0 requests run and 4 wait"):
        scheduler.add(request("e"))
    step = scheduler.plan()
    assert names(step) == (["a", "b"], []) and (a.slot, b.slot) == (0, 1)
    assert scheduler.advance(step, [5, 6]) == [(a, 5), (b, 6)]
    step = scheduler.plan()
    assert names(step) == ([], ["a", "b"])
    assert step.command() == {"prefill": [], "slots": [0, 1], "tokens": [5, 6], "blocks": []}
    scheduler.advance(step, [7, 8])
    assert (a.finish, a.new, b.finish) == ("length", [5, 7], None)
    step = scheduler.plan()  # c takes a's slot while b goes on
    assert names(step) == (["c"], ["b"]) and c.slot == 0
    assert step.command()["prefill"][0] == {
        "slot": 0, "start": 0, "tokens": [ord("c")] * 3, "sampling": [0.0, 0, 1.0, None],
        "blocks": [0],
    }
    assert step.expected() == [c, b]
    assert scheduler.advance(step, [0, 9]) == [(c, 0), (b, 9)]  # 0 ends a text
    assert (c.finish, b.finish) == ("stop", "length")
    scheduler.end(d, "cancelled")
    assert scheduler.plan() is None and not scheduler.requests and not scheduler.waiting


def test_who_is_cancelled_while_the_ranks_work_gets_nothing():
    scheduler = Scheduler(2, num_blocks=8, queue=0, prefill_chunk=100)
    a, b = request("a"), request("b")
    scheduler.add(a), scheduler.add(b)
    step = scheduler.plan()
    scheduler.end(a, "cancelled")
    c = request("c")
    scheduler.add(c)  # a's slot is free at once
    assert scheduler.advance(step, [5, 6]) == [(b, 6)]
    assert names(scheduler.plan()) == (["c"], ["b"]) and c.slot == 0


def test_a_long_prompt_is_read_in_chunks_and_nobody_waits_for_it():
    scheduler = Scheduler(4, num_blocks=8, queue=4, prefill_chunk=10)
    short, last = request("short", 4, count=9), request("last", 2)
    long = request("long", 25, virtual=3)
    for one in (short, long, last):
        scheduler.add(one)
    pieces = []
    for _ in range(5):
        step = scheduler.plan()
        assert sum(chunk.stop - chunk.start for chunk in step.chunks) <= 10
        pieces.append(names(step))
        scheduler.advance(step, [5] * len(step.expected()))
    assert pieces == [
        (["short", "long"], []),
        (["long"], ["short"]),
        (["long"], ["short"]),
        (["long", "last"], ["short"]),
        ([], ["short", "long", "last"]),
    ]
    assert long.length == long.cached - 1 == 28


def test_virtual_tokens_are_divided_like_others():
    scheduler = Scheduler(1, num_blocks=8, queue=1, prefill_chunk=4)
    scheduler.add(request("a", 2, virtual=5))
    commands = []
    for _ in range(2):
        step = scheduler.plan()
        commands.append(step.command()["prefill"][0])
        scheduler.advance(step, [7] * len(step.expected()))
    assert commands == [
        {"slot": 0, "start": 0, "tokens": [], "blocks": [0], "prompt": ["p", 0, 4]},
        {
            "slot": 0, "start": 4, "tokens": [ord("a")] * 2, "prompt": ["p", 4, 5],
            "sampling": [0.0, 0, 1.0, None],
        },
    ]


def test_the_youngest_gives_its_blocks_to_the_oldest_and_is_read_again_with_what_it_had():
    scheduler = Scheduler(2, num_blocks=3, queue=2, prefill_chunk=100)
    a, b, c = request("a", 15, count=8), request("b", 15, count=8), request("c", 1)
    for one in (a, b, c):
        scheduler.add(one)
    scheduler.advance(scheduler.plan(), [1, 2])
    scheduler.advance(scheduler.plan(), [1, 2])  # both blocks are full, and one is free
    step = scheduler.plan()
    assert names(step) == ([], ["a"]) and step.command()["blocks"] == [(0, 2)]
    assert (b.slot, list(scheduler.waiting), scheduler.preemptions) == (None, [b, c], 1)
    while a.finish is None:  # b needs two blocks and precedes c
        scheduler.advance(step, [1])
        step = scheduler.plan()
    (again, first) = step.command()["prefill"]
    # its full block is still cached; of the tokens it drew, only the last is read
    assert (again["start"], again["tokens"], again["drawn"]) == (16, [2], 2)
    assert step.chunks[0].again and first["tokens"] == [ord("c")]
    scheduler.advance(step, [2, 3])
    assert b.new == [2, 2, 2] and c.new == [3]


def test_a_step_is_planned_before_the_tokens_of_the_last_are_there():
    scheduler = Scheduler(2, num_blocks=8, queue=2, prefill_chunk=100, end_tokens=[0])
    a, b = request("a", count=3), request("b", count=2)
    scheduler.add(a), scheduler.add(b)
    first, second = scheduler.plan(), scheduler.plan()
    assert second.command()["tokens"] == [LAST, LAST]
    scheduler.advance(first, [5, 0])  # b ends: its second token is not asked for
    third = scheduler.plan()
    assert names(third) == ([], ["a"]) and third.command()["tokens"] == [LAST]
    assert scheduler.advance(second, [6, 7]) == [(a, 6)] and scheduler.plan() is None
    assert scheduler.advance(third, [8]) == [(a, 8)] and a.finish == "length"


# ---- logits to tokens

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5])


def frequencies(count=20000, **wanted):
    sampler = Sampler(**{"temperature": 1.0, "seed": 3, **wanted})
    drawn = [sample(LOGITS[None], [sampler])[0] for _ in range(count)]
    return torch.bincount(torch.tensor(drawn), minlength=5) / count


@pytest.mark.parametrize(
    "wanted, kept",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 4]),
        ({"top_p": 0.7}, [0, 4]),  # 0.44 is not enough, 0.44 + 0.27 is
        ({"top_k": 3, "top_p": 0.9}, [0, 2, 4]),
    ],
)
def test_tokens_come_as_often_as_their_probability(wanted, kept):
    scores = LOGITS.double() / wanted.get("temperature", 1.0)
    probabilities = torch.zeros(5, dtype=torch.double)
    probabilities[kept] = (scores[kept] - scores.max()).softmax(0)
    found = frequencies(**wanted)
    # 5 standard deviations of a frequency in 20,000 draws
    assert ((found - probabilities).abs() <= 5 * (probabilities / 20000).sqrt() + 1e-9).all(), found


def test_limits_that_leave_one_token_or_all():
    for wanted in ({"temperature": 1e-300}, {"top_p": 1e-9}):
        assert frequencies(100, **wanted)[0] == 1
    assert torch.equal(frequencies(1000, top_k=9), frequencies(1000))


def test_what_a_row_draws_depends_on_its_seed_alone():
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 6, 50, generator=chance)  # 40 steps of 6 rows
    wanted = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
    alone = Sampler(**wanted, seed=5)
    expected = [sample(step[3:4], [alone])[0] for step in logits]
    row, found = Sampler(**wanted, seed=5), []
    for number, step in enumerate(logits):
        company = [Sampler(), Sampler(1.0, seed=number), Sampler(2.0, seed=5)]
        samplers = company + [row, Sampler(), Sampler(0.1, seed=1)]
        tokens = sample(step, samplers)
        assert tokens[0] == int(step[0].argmax()) and tokens[4] == int(step[4].argmax())
        found.append(tokens[3])
    assert found == expected and len(set(found)) > 10
    other = Sampler(**wanted, seed=6)
    assert [sample(step[3:4], [other])[0] for step in logits] != expected


def test_the_last_bits_of_logits_do_not_change_what_is_drawn():
    """Other requests in the batch change them; a seed must still give the same tokens."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 4096, generator=chance)
    near = logits * (1 + 1e-7 * torch.randn(300, 4096, generator=chance))
    assert not torch.equal(logits, near)
    for wanted in ({}, {"top_k": 500}, {"top_p": 0.9}):
        one, other = (Sampler(1.0, **wanted, seed=5) for _ in range(2))
        drawn = [sample(row[None], [one]) for row in logits]
        assert drawn == [sample(row[None], [other]) for row in near]
