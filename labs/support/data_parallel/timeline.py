"""Given: the duration of an exchange between N ranks, in messages, computed from what each rank
started and waited for (`utils.course.messages`)."""

from collections import defaultdict

from utils.course.messages import Note


def timeline(ranks: list[list[Note]], at_once: bool = True) -> int:
    """Time until all ranks are done, in messages, from the notes of each rank.

    A message begins when both its ranks have started it, and takes one unit of time. at_once: a
    rank can send one message and receive one at the same time; otherwise it does one or the other.
    A rank continues when the message it waits for has ended.
    """
    clock, place, busy = [0] * len(ranks), [0] * len(ranks), defaultdict(int)  # busy until
    started, ends, counts = defaultdict(dict), {}, defaultdict(int)
    messages = [{} for _ in ranks]  # number of a note -> (from, to, how many came before)
    moved = True
    while moved:
        moved = False
        for rank, notes in enumerate(ranks):
            while place[rank] < len(notes):
                name, other, number, _ = notes[place[rank]]
                if name == "wait":
                    end = ends.get(messages[rank][number])
                    if end is None:
                        break
                    clock[rank] = max(clock[rank], end)
                else:
                    way = (rank, other) if name == "isend" else (other, rank)
                    message = (*way, counts[rank, name, other])
                    counts[rank, name, other] += 1
                    messages[rank][number] = message
                    started[message][name] = clock[rank]
                    if len(started[message]) == 2:
                        lanes = [("out", way[0]), ("in", way[1])] if at_once else way
                        end = max(*(busy[lane] for lane in lanes), *started[message].values()) + 1
                        ends[message] = busy[lanes[0]] = busy[lanes[1]] = end
                place[rank] += 1
                moved = True
    if any(place[rank] < len(notes) for rank, notes in enumerate(ranks)):
        raise ValueError("a message is not sent, or not received")
    return max(clock)
