"""Given: how many messages follow one another when a rank can send and receive at once, found from
what each rank has started and waited for (`utils.course.messages`)."""

from collections import defaultdict

from utils.course.messages import Note


def timeline(ranks: list[list[Note]]) -> int:
    """Time until all ranks are done, in messages, from the notes of each rank.

    A message begins when it is sent and received, and takes one unit; a rank can send one message
    and receive one at the same time. A rank goes on when what it waits for has ended.
    """
    size = len(ranks)
    clock, place, lanes = [0] * size, [0] * size, defaultdict(int)  # lanes: busy until then
    posted, ends, counts = defaultdict(dict), {}, defaultdict(int)
    messages = [{} for _ in ranks]  # number -> message
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
                    posted[message][name] = clock[rank]
                    if len(posted[message]) == 2:
                        lane = max(lanes["out", way[0]], lanes["in", way[1]])
                        end = max(lane, *posted[message].values()) + 1
                        ends[message] = lanes["out", way[0]] = lanes["in", way[1]] = end
                place[rank] += 1
                moved = True
    if any(place[rank] < len(notes) for rank, notes in enumerate(ranks)):
        raise ValueError("a message is not sent, or not received")
    return max(clock)
