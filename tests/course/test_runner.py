"""The check kit on real ranks: what it draws, observes and delays."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist

from utils.course.assertions import (
    Wrong,
    a_number,
    alike,
    close,
    communication,
    forbid,
    same_bits,
    told,
    unchanged,
)
from utils.course.observe import Look
from utils.course.runner import Trial, attempted, fractions


@pytest.fixture
def answer(tmp_path):
    """A function that writes an answer and returns its trial."""

    def write(source, seed=0):
        path = tmp_path / "answer.py"
        path.write_text("import torch\nimport torch.distributed as dist\n" + source)
        return Trial(path, seed)

    return write


# ---- drawing


def draws(trial) -> list:
    return [trial.draw.random(), trial.new_seed(), trial.fractions(2, 3).tolist()]


def test_equal_seeds_draw_equal_cases():
    assert draws(Trial("x.py", 3)) == draws(Trial("x.py", 3)) != draws(Trial("x.py", 4))
    untouched = Trial("x.py")
    assert not untouched.drawn and untouched.draw and untouched.drawn


def test_fractions_are_no_whole_numbers_and_the_same_for_the_same_seed():
    drawn = fractions(5, 100, dtype=torch.float32)
    assert drawn.dtype == torch.float32 and (drawn != drawn.round()).all()
    assert torch.equal(drawn, fractions(5, 100).float())


def luck(answer) -> tuple:
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_ranks_have_random_numbers_of_their_own(answer):
    for drawn in zip(*answer("").on_ranks(3, luck)):
        assert len(set(drawn)) == 3


# ---- failures


def call(answer):
    return answer.function()


FAILURES = {
    "def function():\n    dist.recv(torch.ones(2), 0) if dist.get_rank() else"
    " dist.send(torch.ones(9), 1)": "rank 1: a message does not fit where it is received in "
    "answer.py line 4",
    "def function():\n    dist.all_reduce(torch.ones(4, dtype=[torch.float32, torch.float64]"
    "[dist.get_rank()]))": "a message does not fit where it is received in answer.py line 4",
    "def function():\n    if dist.get_rank():\n        raise KeyError('k')\n    dist.barrier()": ""
    "5 rows, rank 1: KeyError in answer.py line 5 (`raise KeyError('k')`): 'k'",
}


@pytest.mark.parametrize("source", FAILURES)
def test_a_failure_is_a_sentence_with_the_case_and_the_line(answer, source):
    with answer(source + "\n").ranks(2) as group, pytest.raises(Wrong) as wrong:
        group.run(group.case("5 rows"), call)
    assert str(wrong.value).startswith("with 2 ranks and 5 rows, ") and FAILURES[source] in str(
        wrong.value
    )


def test_who_sleeps_again_and_again_is_ended_by_the_clock(answer):
    loop = "import time\ndef number():\n    while True: time.sleep(0.01)\n"
    with pytest.raises(Wrong, match=r"alone: did not finish within 2 s in answer.py line 5"):
        answer(loop).alone("alone", lambda answer: answer.number(), clock=2.0)


def test_only_the_answer_itself_can_say_that_it_is_not_started(answer):
    trial = answer("def function():\n    raise NotImplementedError('add')\n")
    with pytest.raises(NotImplementedError, match=r"^add$"):
        trial.alone("in one process", call)
    trial = answer("def function():\n    return torch.nn.Module()(1)\n")  # torch raises it
    with pytest.raises(Wrong, match=r"NotImplementedError in answer.py line 4"):
        trial.alone("in one process", call)


HANGS = {
    "        dist.recv(torch.ones(1), 1 - dist.get_rank())": "all receive",
    "        dist.send(torch.ones(1), 1 - dist.get_rank())": "all else",
    "        dist.recv(torch.ones(1), 1) if dist.get_rank() == 0 else None": "all else",
}


@pytest.mark.parametrize("line", HANGS)
def test_what_is_asked_about_a_hang_fits_the_calls_that_hang(answer, line):
    trial = answer(f"def function():\n    if True:\n{line}\n")
    hang = {"recv": "all receive", "": "all else"}
    with trial.ranks(2, hang) as group, pytest.raises(Wrong) as wrong:
        group.run(group.case(), call)
    assert str(wrong.value).endswith(f"\n{HANGS[line]}")


# ---- observations on a rank


def seen(answer) -> dict:
    x, dy = fractions(1, 5, 3).requires_grad_(), fractions(2, 5, 4)
    weight = fractions(3, 4, 3).requires_grad_()
    with Look(x=x, dy=dy, weight=weight) as look:
        y = answer.function(x, weight)
        y.backward(dy)
    gradients = [x.grad, weight.grad]
    largest, changed = look.largest, look.changed()
    halves = [(p.multiplications, p.backward) for p in look.products]
    del y
    events = [(e.op, e.payload) for e in look.events]
    return {
        "largest": largest, "changed": changed, "halves": halves, "events": events,
        "kept": look.kept(gradients),
    }


LINEAR = "def function(x, weight):\n    dist.all_reduce(torch.ones(7))\n    return x @ weight.T\n"


def test_look_sees_messages_products_and_sizes(answer):
    (found, other) = answer(LINEAR).on_ranks(2, seen)
    assert found == other
    assert found["events"] == [("all_reduce", 7 * 4)]
    assert sorted(found["halves"]) == [(60, False), (60, True), (60, True)]
    assert found["largest"] == 5 * 4 * 8 and found["kept"] == 0 and found["changed"] == []


def test_look_sees_what_is_kept_changed_and_too_large(answer):
    found = answer(
        "kept = []\ndef function(x, weight):\n    x.data.neg_()\n    kept.append(x.detach() + 1)\n"
        "    torch.empty(1000)\n    return x @ weight.T\n"
    ).alone("in one process", seen)
    assert found["kept"] == 5 * 3 * 8 and found["changed"] == ["x"] and found["largest"] == 4000


LOOPS = {
    "def function(x, weight):\n    return sum((x @ weight.T + i).sum() for i in range(6))\n": 1,
    "def function(x, weight):\n    every = [x @ weight.T + i for i in range(6)]\n"
    "    return sum(y.sum() for y in every)\n": 6,
}


def alive(answer) -> int:
    x, weight = fractions(1, 50, 30), fractions(3, 40, 30)
    with Look(x=x, weight=weight) as look:
        answer.function(x, weight)
    return look.peak


@pytest.mark.parametrize("source", LOOPS)
def test_look_sees_how_much_is_alive_at_the_same_time(answer, source):
    one = 50 * 40 * 8
    peak = answer(source).alone("in one process", alive)
    assert LOOPS[source] * one <= peak < (LOOPS[source] + 1.5) * one


def test_a_part_keeps_the_rest_in_memory():
    given = torch.ones(10)
    with Look() as look:
        large, whole = torch.ones(100), torch.ones(3)
        parts = [*large.split(50), given[:2]]
    assert look.spare(large[:30], whole) == 280 and look.spare(parts, whole) == 0


def test_what_may_be_kept_is_told_and_not_waited_for():
    with Look() as look:
        kept = torch.ones(100)
    assert look.kept(allowed=400) == 400 and look.kept(kept) == 0


# ---- a late network


def neighbours(answer) -> float:
    mine = torch.full((3,), dist.get_rank() + 0.5)
    return answer.function(mine).sum().item()


WAITS = {
    "all_reduce": "    dist.all_reduce(t, async_op=True){wait}\n    return t\n",
    "irecv": "    other, got = 1 - dist.get_rank(), torch.zeros(3)\n    s = dist.isend(t, other)\n"
    "    r = dist.irecv(got, other)\n    s.wait()\n    r{wait}\n    return got + t\n",
    "future": "    w = dist.all_reduce(t, async_op=True).get_future()\n    w{wait}\n    return t\n",
    "batch": "    other, got = 1 - dist.get_rank(), torch.zeros(3)\n"
    "    both = [dist.P2POp(dist.isend, t, other), dist.P2POp(dist.irecv, got, other)]\n"
    "    [w{wait} for w in dist.batch_isend_irecv(both)]\n    return got + t\n",
    "single": "    both = torch.zeros(6)\n"
    "    dist.all_gather_into_tensor(both, t, async_op=True){wait}\n"
    "    return both[:3] + both[3:]\n",
    "imported": "    from torch.distributed.distributed_c10d import all_gather\n"
    "    parts = [torch.zeros(3) for _ in range(2)]\n"
    "    all_gather(parts, t, async_op=True){wait}\n    return sum(parts)\n",
}


@pytest.mark.parametrize("source", WAITS)
def test_on_a_late_network_only_who_waits_has_the_result(answer, source):
    for wait, right in ((".wait()", True), ("", False)):
        trial = answer("def function(t):\n" + WAITS[source].format(wait=wait))
        with trial.ranks(2) as group:
            sums = group.run(group.case(), neighbours, late=True)
        assert (sums == [6.0, 6.0]) is right, (source, sums)


def test_a_future_delivers_before_what_follows_it(answer):
    trial = answer(
        "def function(t):\n    w = dist.all_reduce(t, async_op=True).get_future()\n"
        "    return w.then(lambda done: t).wait()\n"
    )
    with trial.ranks(2) as group:
        assert group.run(group.case(), neighbours, late=True) == [6.0, 6.0]


POLLS = {
    "for _ in range(10):\n        if w.is_completed(): break\n        time.sleep(0.01)": [1.5, 4.5],
    "while not w.is_completed():\n        time.sleep(0.01)": [6.0, 6.0],
}


@pytest.mark.parametrize("loop", POLLS)
def test_who_only_asks_a_late_network_needs_patience(answer, loop):
    work = "    w = dist.all_reduce(t, async_op=True)\n"
    trial = answer(f"import time\ndef function(t):\n{work}    {loop}\n    return t\n")
    with trial.ranks(2) as group:
        sums = group.run(group.case(), neighbours, late=True)
    assert sums == POLLS[loop]


def test_a_message_changed_before_its_wait_is_noticed(answer):
    trial = answer(
        "def function(t):\n    other = 1 - dist.get_rank()\n    work = dist.isend(t.clone(), other)"
        "\n    message = t.clone()\n    second = dist.isend(message, other)\n    message.zero_()\n"
        "    dist.recv(t, other)\n    dist.recv(t, other)\n    work.wait(); second.wait()\n"
        "    return t\n"
    )
    with trial.ranks(2) as group, pytest.raises(Wrong, match="changed after isend"):
        group.run(group.case(), neighbours, late=True)


# ---- expectations


def test_close_takes_rounding_and_nothing_else():
    right = fractions(1, 4, 5)
    close("here", "y", right.float(), right)
    close("here", "y", right * 1e-9 + 1e-6, right * 1e-9, scale=1e9)
    close("here", "y", torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 1]))
    for got, message in (
        (right.float().double(), r"y at \[0, 0\] is .* should be .* \(20 of 20 values differ\)"),
        (right.bfloat16().float(), "values differ"),
        (right[0], r"shape \(5,\), but should have \(4, 5\)"),
        (right.tolist(), "not a tensor"),
        (right * torch.nan, "is nan"),
        (right + 1e-9, r"y at \[0, 0\] is (\S+), but should be (?!\1 )\S+ "),
    ):
        with pytest.raises(Wrong, match=message):
            close("here", "y", got, right)
    whole = torch.tensor([2**60 + 1])  # more digits than a double can hold
    close("here", "y", whole, whole.clone())
    with pytest.raises(Wrong, match=f"is {2**60}, but should be {2**60 + 1}"):
        close("here", "y", whole - 1, whole)
    with pytest.raises(Wrong, match=r"float32, but should be torch.float64"):
        close("here", "y", right.float(), right, dtype=torch.float64)


def test_a_hidden_nan_is_asked_for():
    with pytest.raises(Wrong, match=r"0, but should be nan .*\nA NaN in the input must stay NaN"):
        close("here", "y", torch.tensor([0.0, 1]), torch.tensor([torch.nan, 1]), hint="no")


def test_a_float32_on_the_way_is_asked_for():
    right = fractions(3, 40)
    with pytest.raises(Wrong, match=r"differ\)\.\nCorrect only to float32 precision"):
        close("here", "y", right.float().double(), right, hint="another")
    with pytest.raises(Wrong, match=r"differ\)\.\nanother"):
        close("here", "y", right * 1.5, right, hint="another")


def test_the_first_symptom_that_fits_is_told():
    right = torch.tensor([1.0, 200.0], dtype=torch.float64)
    symptoms = [
        (lambda got: alike(got, right / 2), "half"), (lambda got: alike(got, 2 * right), "twice"),
        (lambda got: got.dim() == 1, lambda got: f"{len(got)} numbers"),
    ]
    cases = {"half": right.float() / 2, "twice": 2 * right.bfloat16(), "2 numbers": right * 1.5,
             "3 numbers": torch.ones(3), "": right[None] / 2}
    assert [told(symptoms, got) for got in cases.values()] == list(cases)
    assert not alike(right * torch.nan, right) and not alike(None, right)


def test_every_kind_of_number_is_a_number():
    for value in (2, 2.0, np.float32(2), Fraction(4, 2), torch.tensor([2]), np.array(2)):
        assert a_number("here", "n", value) == 2.0
    for value in (None, "two", "2", (2,), torch.ones(2)):
        with pytest.raises(Wrong, match=r"here: n is .*, but should be a number"):
            a_number("here", "n", value)


def test_bits_messages_and_inputs():
    zero = torch.zeros(2)
    same_bits("here", "y", [zero, zero.clone()])
    same_bits("here", "y", [torch.zeros(1, 2)[..., ::2], torch.zeros(1, 1)])
    with pytest.raises(Wrong, match="rank 1 and rank 0 do not hold the same bits of y"):
        same_bits("here", "y", [zero, -zero])
    communication("here", [], {"all_reduce": []})
    with pytest.raises(Wrong, match=r"calls nothing, but should call all_reduce once \(8 bytes\)"):
        communication("here", [], {"all_reduce": [8]})
    unchanged("here", [])
    with pytest.raises(Wrong, match="x is not what it was before the call"):
        unchanged("here", ["x"])


@pytest.mark.parametrize(
    "source, line",
    [
        ("import torch.fsdp", 1),
        ("x = 1\nfrom torch import fsdp as f", 2),
        ("torch.fsdp(1)", 1),
        ("import torch as t\nt.optim.zero.step()", 2),
        ("import torch.optim, torch.zero", None),
        ("'fsdp'\nimport labs.fsdp", None),
        ("x = __import__('torch.fsdp')", 1),
        ("def f():\n    'as fsdp does'\n    # fsdp\n    fsdp_like = 1", None),
    ],
)
def test_what_is_to_be_done_by_hand_names_no_library(tmp_path, source, line):
    path = tmp_path / "answer.py"
    path.write_text(source + "\n")
    if line is None:
        forbid(path, ["fsdp", "optim.zero"])
        return
    with pytest.raises(Wrong, match=f"answer.py line {line} uses .*: that is the library"):
        forbid(path, ["fsdp", "optim.zero"])


def test_what_a_notebook_shows_of_an_answer_that_is_not_ready_is_nothing(answer):
    for source, right in (
        ("def own(): return dist.get_rank()", [0, 1]),
        ("def own(): raise NotImplementedError('the rank')", None),
        ("def own(:", None),
    ):
        file = answer(source).path
        assert attempted(file, 2, lambda answer: answer.own()) == right
    assert attempted(file.with_name("none.py"), 2, lambda answer: answer.own()) is None
