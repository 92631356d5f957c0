"""Given: how many messages follow one another at most, found from each rank's list of messages."""

from collections import deque


def longest_path(messages: list[list[tuple[str, int | None, int]]]) -> int:
    """Messages on the longest path through all ranks: what latency multiplies.

    messages: for each rank its ("send" or "recv", other rank, bytes), in order. A rank does one
    thing at a time, and a receive ends no earlier than the send that it belongs to. Other rank
    None: received from whoever came first.
    """
    waiting = [deque(rank) for rank in messages]
    clock = [0] * len(messages)
    arrivals = {}  # (from, to) -> when each message in flight arrives
    while any(waiting):
        moved = [_advance(rank, waiting[rank], clock, arrivals) for rank in range(len(waiting))]
        if not any(moved) and not _send_ahead(waiting):
            raise ValueError("a receive has no send that belongs to it")
    return max(clock)


def _advance(rank: int, todo: deque, clock: list[int], arrivals: dict) -> bool:
    """Carries out what this rank can do now; True when there was something."""
    moved = False
    while todo:
        op, other, _ = todo[0]
        if op == "send":
            clock[rank] += 1
            arrivals.setdefault((rank, other), deque()).append(clock[rank])
        else:
            here = [queue for (sender, to), queue in arrivals.items()
                    if queue and to == rank and other in (None, sender)]
            if not here:
                break
            clock[rank] = max(clock[rank] + 1, min(here, key=lambda queue: queue[0]).popleft())
        todo.popleft()
        moved = True
    return moved


def _send_ahead(waiting: list[deque]) -> bool:
    """An asynchronous receive is listed when it is posted: a later send may come before it."""
    for todo in waiting:
        for message in todo:
            if message[0] == "send":
                todo.remove(message)
                todo.appendleft(message)
                return True
    return False
