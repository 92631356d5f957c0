"""For each fault that a contract must detect, an answer with that fault alone."""

import pytest

from utils.course.assertions import Wrong
from utils.course.contract import Contract, tensors
from utils.course.runner import Trial

TOTAL = Contract(
    "total",
    inputs=lambda case, rank, n, call: (case.numbers(rank, n, call), case.numbers(0, n, call) + 9),
    right=lambda case, given, rank: sum(x.double() for x, _ in given),
    sizes=(2,), in_place=0, same_bits=True, says="all of it",
    symptoms=[(lambda seen: seen.result.equal(seen.own[0]), lambda seen: f"own {seen.rank}")],
)
RIGHT = """
import torch
import torch.distributed as dist

KEPT = []


def swapped(x):
    received, other = torch.empty_like(x), 1 - dist.get_rank()
    works = [dist.isend(x.clone(), other), dist.irecv(received, other)]
    return received, works


def total(x, other):
    received, works = swapped(x)
    for work in works:
        work.wait()
    x += received
"""
WRONG = {  # words of the message: what replaces the last line
    "values differ": "x += received * 1.001",
    "own 0": "x = x + received",
    "should be nan": "x += received; x.nan_to_num_()",
    "memory next to the tensor": "x.as_strided((1,), (1,), x.storage_offset() - 1).zero_(); "
    "x += received",
    "other is not what it was": "x += received; other += 1",
    "after each call more bytes are kept": "x += received; KEPT.append(received)",
    "do not hold the same bits": "x += received; "
    "x *= 1 + dist.get_rank() * torch.finfo(x.dtype).eps",
    "in turn": "KEPT.append(x.dtype); x += received.to(min(KEPT, key=str))"
    " if x.shape[:1] > (299,) else received",
}


def judged(tmp_path, source):
    (tmp_path / "answer.py").write_text(source)
    return TOTAL.judge(Trial(tmp_path / "answer.py", seed=5))


def test_a_right_answer_passes(tmp_path):
    assert judged(tmp_path, RIGHT) == "all of it"


@pytest.mark.parametrize("words", WRONG)
def test_a_fault_is_seen(tmp_path, words):
    source = RIGHT.replace("    x += received\n", f"    {WRONG[words]}\n")
    with pytest.raises(Wrong, match=words):
        judged(tmp_path, source)


def test_what_nobody_waits_for_is_seen(tmp_path):
    with pytest.raises(Wrong, match="an isend is never waited on"):
        judged(tmp_path, RIGHT.replace("in works:", "in works[1:]:"))


def test_luck_ends_on_a_slow_network(tmp_path):
    early = RIGHT.replace("    for work", "    x += received\n    for work").replace(
        "wait()\n    x += received\n", "wait()\n"
    )
    with pytest.raises(Wrong, match="values differ"):
        judged(tmp_path, early)


def test_cases_reach_the_edges():
    drawn = tensors(Trial("answer.py", seed=1), 3)
    lengths = {case.numbers(0, 3).numel() for case in drawn}
    assert {0, 1} < lengths and max(lengths) > 100_000
    assert {length % 3 for length in lengths if length > 1} > {0}
    assert {case.odd for case in drawn} == {"", "zeros", "one NaN"}
    assert any(case.late for case in drawn) and any(case.calls > 1 for case in drawn)
