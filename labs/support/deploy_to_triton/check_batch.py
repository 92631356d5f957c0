"""Given: what the check cell of exercise c looks at: real streams that come and go.

When a request comes is counted in steps, not in seconds (see Leader.arrive), so the same happens on
a slow machine. The shard writes down each prefill and each decode (its diary).
"""

from dataclasses import dataclass
from pathlib import Path

from labs.support.deploy_to_triton import lab_server
from utils.course.checks import Wrong
from utils.serving.server import ServerError

SLOTS = 3


@dataclass(frozen=True)
class Visit:
    """A request: its name, prompt and length, the step in which it comes; hold: see Leader."""

    name: str
    prompt: int
    tokens: int
    after: int = 0
    hold: int = 0


# A is long. B, C and D come with it or soon after it, one more than there are slots. F waits behind
# D; E comes late, when slots are free, and wants little.
COMPANY = (
    Visit("A", 0, 40),
    Visit("B", 1, 14),
    Visit("C", 2, 6),
    Visit("D", 0, 9, after=2),
    Visit("F", 1, 3, after=3),
    Visit("E", 2, 4, after=24),
)
# L gets 5 tokens, then its client goes; W's client goes while it waits; C waits behind it.
LEAVERS = (
    Visit("L", 0, 300, hold=5),
    Visit("B", 1, 20),
    Visit("D", 2, 18),
    Visit("W", 1, 30, after=1, hold=-1),
    Visit("C", 0, 7, after=2),
)


def batch(path: Path) -> str:
    """Judges `leave`, `join` and `step`."""
    lab_server.not_started(path)
    load(path)
    try:
        seen = visit(COMPANY)
        _right_company(seen)
        _right_cancelled(visit(LEAVERS))
    except lab_server.Silence:
        lab_server.stop()
        raise
    decodes = [line for line in seen["diary"] if line["do"] == "decode"]
    return (
        f"{len(COMPANY)} requests in {SLOTS} slots, {len(decodes)} decode steps, as many as the "
        "longest needs alone; the late\nshort one ends before the long one; nobody's tokens depend "
        "on the company; and those whose\nclient has gone give their place to others."
    )


def load(path: Path | None) -> Path:
    """The model with this scheduler.py (None: one request after the other); its version folder."""
    others = {"scheduler": path} if path else {}
    try:
        return lab_server.put(lab_server.LEADER, lab_server.settings(1, slots=SLOTS), **others)
    except ServerError as error:
        raise Wrong(f"the model does not load.\n{error}") from None


def visit(visits: tuple[Visit, ...]) -> dict:
    """Sends these requests to the loaded model. Returns {"tokens": {name: tokens}, "diary": the
    steps that were made for them}. Raises Wrong where one of them has not what it asked for."""
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
        tokens = {name: stream.tokens for name, stream in streams.items()}
    finally:
        for stream in streams.values():
            stream.close()
    lines = lab_server.diary(version)[before:]
    return {"tokens": tokens, "diary": [line for line in lines if "do" in line]}


def _follow(stream, who: Visit) -> None:
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
                raise Wrong(
                    f"request {who.name} asked for {who.tokens} tokens and gets more: who is over "
                    "must leave before the next decode."
                )
    except lab_server.Failed as error:
        raise Wrong(f"request {who.name} fails: {error}") from None
    right = list(lab_server.right(who.prompt, who.tokens))
    if stream.tokens != right:
        at = [a == b for a, b in zip(stream.tokens, right)]
        at = at.index(False) if False in at else len(at)
        raise Wrong(
            f"request {who.name} has other tokens in company than alone, from the {at + 1}th of "
            f"{who.tokens} on.\nDo the tokens go to the slots that they came from, each once?"
        )


def _right_company(seen: dict) -> None:
    steps = seen["diary"]
    decodes = [line["slots"] for line in steps if line["do"] == "decode"]
    rows = max(map(len, decodes))
    longest = max(who.tokens for who in COMPANY) - 1  # its first token comes from the prefill
    prefills = [number for number, line in enumerate(steps) if line["do"] == "prefill"]
    if len(prefills) != len(COMPANY):
        raise Wrong(f"{len(prefills)} prefills for {len(COMPANY)} requests: one for each.")
    if rows == 1:
        raise Wrong(
            f"{len(decodes)} decodes of one row each. Give all running slots to one call: the "
            "weights are read once for all."
        )
    _late_is_early(steps, prefills[-1], longest)
    if rows < SLOTS:
        raise Wrong(f"at most {rows} of {SLOTS} slots take part in a decode, while others wait.")
    if len(decodes) > longest + 2:
        raise Wrong(
            f"{len(decodes)} decode steps; {longest} will do, as many as the longest request needs "
            "alone.\nDoes everybody who runs take part in each step?"
        )
    _in_turn(steps, prefills)
    _lowest_first(steps, prefills[-1])


def _late_is_early(steps: list, last: int, longest: int) -> None:
    late, before = COMPANY[-1], sum(line["do"] == "decode" for line in steps[:last])
    if before >= longest:
        raise Wrong(
            f"the late short request (it came in step {late.after} and wants {late.tokens} tokens) "
            f"is begun after {before} decode\nsteps, when the long one is over. Slots were free: "
            "who waits joins as soon as there is one."
        )


def _in_turn(steps: list, prefills: list) -> None:
    lengths = [steps[number]["positions"] for number in prefills]
    wanted = [len(lab_server.prompt(who.prompt)) for who in COMPANY]
    if sorted(lengths[:SLOTS]) != sorted(wanted[:SLOTS]) or lengths[SLOTS:] != wanted[SLOTS:]:
        raise Wrong(
            "who came later got a slot earlier. The oldest of those who wait is the first to join."
        )


def _lowest_first(steps: list, last: int) -> None:
    """Where the late request came, only the long one was there."""
    running = steps[-1]["slots"]
    lowest = min(set(range(SLOTS)) - set(running))
    if steps[last]["slots"] != [lowest]:
        raise Wrong(
            f"slot {steps[last]['slots'][0]} was taken while slot {lowest} was free: the lowest "
            "first.\nAn engine that decodes all rows up to the highest in use has less to do then."
        )


def _right_cancelled(seen: dict) -> None:
    steps = seen["diary"]
    prefills = [line for line in steps if line["do"] == "prefill"]
    gone = next(who for who in LEAVERS if who.hold > 0)
    if len(prefills) == len(LEAVERS):
        raise Wrong(
            "a request whose client had gone while it waited was begun all the same: nobody reads "
            "its tokens.\nLook at request.over before you give it a slot."
        )
    long = len(lab_server.prompt(gone.prompt))
    begun = next(i for i, line in enumerate(steps) if line["positions"] == long)
    slot, made = steps[begun]["slots"][0], 0
    for line in steps[begun + 1 :]:
        if line["do"] == "prefill" and line["slots"][0] == slot:
            break
        made += slot in line["slots"]
    if made > gone.hold + 2:
        raise Wrong(
            f"the client of a request went after {gone.hold} tokens, and {made} decode steps were "
            "made in its slot.\nrequest.over is true for it: it leaves, and its slot is free."
        )
