"""Messages are noted, not kept: after its wait, only the caller holds a received tensor."""

import weakref

import pytest
import torch
import torch.distributed as dist

from utils.course.messages import never_waited, noted
from utils.ranks import Ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2, device="cpu", timeout=60) as ranks:
        yield ranks


def exchange(waits):
    """Swap a message; returns (whether the received one is freed, the number never waited on)."""
    other = 1 - dist.get_rank()
    with noted() as notes:
        coming = torch.empty(3)
        works = [dist.isend(torch.ones(3), other), dist.irecv(coming, other)]
        if waits:
            [work.wait() for work in works]
        memory = weakref.ref(coming)
        del coming, works
        gone = memory() is None
    return gone, len(never_waited(notes))


@pytest.mark.parametrize("waits", [True, False])
def test_a_message_is_let_go_once_it_was_waited_for(two, waits):
    assert two.run(exchange, waits) == [(waits, 0 if waits else 2)] * 2
