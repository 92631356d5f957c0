"""Given: what the check cell of exercise d looks at: requests that come and go, in every step.

First drawn tables, from one slot to a hundred and from five requests to hundreds, in one process
(scenarios.py): there a step costs microseconds. Then real streams. When a request comes is counted
in steps, not in seconds (see Leader.arrive), so the same happens on a slow machine. The shard
writes down each prefill and each decode (its diary).
"""

import random
from dataclasses import dataclass
from pathlib import Path

from labs.support.deploy_to_triton import lab_server
from labs.support.deploy_to_triton.scenarios import Table, Visit, join_and_leave, simulate
from utils.course.assertions import Wrong
from utils.course.runner import Trial
from utils.serving.server import ServerError, server_available

SLOTS = 3
SECONDS = 8.0  # until simulated tables count as an endless loop
LIBRARY = ("utils", "utils.serving", "leader", "vllm")


def batch(trial: Trial) -> str:
    """Judges `leave`, `join` and `step`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:
        seeds = [trial.new_seed() for _ in range(40)]
        group.run("in one process", join_and_leave, seeds, seconds=SECONDS)
        for tables in _tables(trial.draw):
            (found,) = group.run("in one process", simulate, tables, seconds=SECONDS)
            if found["held"]:
                what = found["held"][0]
                raise Wrong(
                    f"{' beside '.join(map(str, tables))}: all is over, and somebody still holds "
                    f"{what}" + f" and {len(found['held']) - 1} more." * (len(found["held"]) > 1)
                )
    seen = (
        "tables of 1 to 70 slots and more with 5 to 400 requests, two at a time: the oldest join\n"
        "as soon as a slot is free, the lowest; everybody who runs gets a token in each step, in\n"
        "one decode; who is over, complete, refused or gone, leaves; and nothing is kept;\n"
    )
    if server_available():
        return f"{seen}there is no Triton server on this machine for real streams."
    load(trial.path)
    try:
        found = visit(COMPANY)
        steps = _right_company(found)
        _right_cancelled(visit(LEAVERS))
    except lab_server.Silence:
        lab_server.stop()
        raise
    return (
        f"{seen}{len(COMPANY)} real streams in {SLOTS} slots take {steps} decode steps, as many as "
        "the longest\nalone, and have the tokens that they have alone; two whose clients go make "
        "place."
    )


# ---- drawn tables


def _tables(draw: random.Random) -> list[list[Table]]:
    """Tables that are played side by side."""

    def visits(count, until, *, longest=12, odd=0.0, crowd=1):
        """odd: the part of those that are refused, end early, go, or want a single token."""
        found, after = [], 0
        for number in range(count):
            if number % crowd == 0:
                after = draw.randrange(until + 1)
            strange = draw.random() < odd
            found.append(
                Visit(
                    prompt=(
                        draw.choice([-1, 5, 5, 5]) if strange else draw.randrange(1000),
                        draw.choice([0, 1, 3]) if strange else 0,
                        *(draw.randrange(1000) for _ in range(draw.choice([0, 1, 2, 3, 400]))),
                    ),
                    tokens=draw.choice([1, longest]) if strange else draw.randrange(1, longest + 1),
                    after=after,
                    gone=after + draw.randrange(6) if strange and draw.random() < 0.5 else None,
                )
            )
        found.sort(key=lambda visit: visit.after)
        return tuple(found)

    few, one = draw.randrange(2, 5), draw.randrange(5, 9)
    company = (
        *(Visit((n, 0), draw.randrange(130, 300)) for n in (7, 8)),
        *visits(draw.randrange(few + 2, 9), 4),
    )
    company += (Visit((8, 0), draw.randrange(2, 6), after=draw.randrange(16, 24)),)
    wide = draw.randrange(70, 140)
    crowd = draw.randrange(5, 14)
    return [
        [
            Table("a late short request", few, company),
            Table("a long queue", few + 1, visits(draw.randrange(12, 20), 3)),
        ],
        [
            Table("some go, fail or end early", few, visits(16, 20, odd=0.6)),
            Table("one slot", 1, visits(one, 15, odd=0.3)),
        ],
        [
            Table("hundreds", crowd, visits(draw.randrange(250, 400), 200, odd=0.2, crowd=9)),
            Table("many slots", wide, visits(3 * wide, 30, longest=25, odd=0.2)),
        ],
    ]


# ---- real streams


@dataclass(frozen=True)
class Stream:
    """A request: its name, prompt and length, the step in which it comes; hold: see Leader."""

    name: str
    prompt: int
    tokens: int
    after: int = 0
    hold: int = 0


# A is long. B, C and D come with it or soon after it, one more than there are slots. F waits behind
# D; E comes late, when slots are free, and wants little.
COMPANY = (
    Stream("A", 0, 40),
    Stream("B", 1, 14),
    Stream("C", 2, 6),
    Stream("D", 0, 9, after=2),
    Stream("F", 1, 3, after=3),
    Stream("E", 2, 4, after=24),
)
# L gets 5 tokens, then its client goes; W's client goes while it waits; C waits behind it.
LEAVERS = (
    Stream("L", 0, 300, hold=5),
    Stream("B", 1, 20),
    Stream("D", 2, 18),
    Stream("W", 1, 30, after=1, hold=-1),
    Stream("C", 0, 7, after=2),
)


def load(path: Path | None) -> Path:
    """The model with this scheduler.py (None: one request after the other); its version folder."""
    others = {"scheduler": path} if path else {}
    try:
        return lab_server.put(lab_server.LEADER, lab_server.settings(1, slots=SLOTS), **others)
    except ServerError as error:
        raise Wrong(f"the model does not load.\n{error}") from None


def visit(visits: tuple[Stream, ...]) -> list[dict]:
    """Sends these requests to the loaded model. Returns the steps that were made for them. Raises
    Wrong where one of them has not the tokens that it has alone."""
    version = lab_server.repository() / lab_server.NAME / "1"
    before = len(lab_server.diary(version))
    streams = {}
    try:
        for who in visits:
            streams[who.name] = lab_server.Stream(
                input_ids=lab_server.prompt(who.prompt),
                max_tokens=[who.tokens],
                arrival=[len(visits), who.after, who.hold],
            )
            # each has a connection of its own, which may be slower than that of the next one; and
            # a request that is cancelled on its way would never come
            lab_server.wait_for_all()
        # who waits to be cancelled first: the leader makes no step until it is
        for who in sorted(visits, key=lambda who: who.hold if who.hold else 1_000):
            _follow(streams[who.name], who)
    finally:
        for stream in streams.values():
            stream.close()
    return lab_server.diary(version)[before:]


def decoded(steps: list[dict]) -> list[int]:
    """The rows of each decode step."""
    return [len(line["slots"]) for line in steps if line["do"] == "decode"]


def _follow(stream, who: Stream) -> None:
    """Reads a stream to its end, or cancels it where that is the plan."""
    if who.hold < 0:
        stream.cancel()
        return
    try:
        for _ in stream:
            if len(stream.tokens) == who.hold:
                stream.cancel()
                return
            if len(stream.tokens) > who.tokens:
                raise Wrong(f"stream {who.name} asked for {who.tokens} tokens and gets more.")
    except lab_server.Failed as error:
        raise Wrong(f"stream {who.name} fails: {error}") from None
    right = list(lab_server.right(who.prompt, who.tokens))
    if stream.tokens != right:
        raise Wrong(f"stream {who.name} has the tokens {stream.tokens}, and alone it has {right}.")


def _right_company(steps: list[dict]) -> int:
    """Returns how many decode steps there were."""
    rows = decoded(steps)
    longest = max(who.tokens for who in COMPANY) - 1  # its first token comes from the prefill
    if max(rows) < SLOTS or len(rows) > longest + 2:
        raise Wrong(
            f"{len(COMPANY)} streams in {SLOTS} slots take {len(rows)} decode steps of at most "
            f"{max(rows)} rows; {longest} will do, as many as the longest needs alone."
        )
    return len(rows)


def _right_cancelled(steps: list[dict]) -> None:
    prefills = [line for line in steps if line["do"] == "prefill"]
    gone = next(who for who in LEAVERS if who.hold > 0)
    if len(prefills) == len(LEAVERS):
        raise Wrong("a stream whose client had gone while it waited was begun all the same.")
    long = len(lab_server.prompt(gone.prompt))
    begun = next(i for i, line in enumerate(steps) if line["positions"] == long)
    slot, made = steps[begun]["slots"][0], 0
    for line in steps[begun + 1 :]:
        if line["do"] == "prefill" and line["slots"][0] == slot:
            break
        made += slot in line["slots"]
    if made > gone.hold + 2:
        raise Wrong(
            f"the client of a stream went after {gone.hold} tokens, and {made} decode steps were "
            "made in its slot."
        )
