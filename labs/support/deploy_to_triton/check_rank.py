"""Given: what the check cell of exercise b looks at: a served model of two ranks, and of one.

Your rank.py is loaded into the running server. Looked at are the tokens, what the ranks said to
each other in every step (model_shard.py counts it), what a bad request does, and what is left when
the leader is killed.
"""

from pathlib import Path

from labs.support.deploy_to_triton import lab_server
from utils.course.checks import Wrong
from utils.serving.server import ServerError

TOKENS = 10
ANSWER = 15.0  # seconds in which the ranks must have made a step
END = 10.0  # seconds in which ranks without a leader must have ended
UNKNOWN = 99_999  # no token of the vocabulary


def rank(path: Path) -> str:
    """Judges `layer` and `loop`."""
    lab_server.not_started(path)
    calls = [_served(path, size) for size in (2, 1)]
    return (
        "the tokens of the whole model, from 2 ranks and from 1, before and after a bad request;\n"
        f"{calls[0]} all-reduces of one row a step, nothing else is said; rank 0 alone answers;\n"
        "and when the leader is killed, no rank stays."
    )


def _served(path: Path, size: int) -> int:
    """Looks at everything on `size` ranks; returns the all-reduces of a step."""
    many = f"with {size} rank{'s' * (size > 1)}"
    try:
        config = lab_server.settings(size, seconds=ANSWER)
        version = lab_server.put(lab_server.RANKS, config, rank=path)
    except ServerError as error:
        raise Wrong(f"{many}: the model does not load.\n{error}") from None
    pids = [int(pid) for pid in (version / "ranks").read_text().split()]
    try:
        _right_tokens(version, 0, many)
        for number in range(size):
            _right_logits(version, number, many)
        calls = [_right_messages(version, number, size, many) for number in range(size)]
        _bad_request(version, many)
        _right_tokens(version, 1, f"{many}, after a bad request")
        if size > 1:
            _right_end(version, pids, many)
        _only_rank_0(version, size, many)
        return calls[0]
    finally:
        lab_server.kill(pids)
        if size > 1:
            lab_server.stop()


def _right_tokens(version: Path, number: int, when: str) -> None:
    try:
        with lab_server.Stream(input_ids=lab_server.prompt(number), max_tokens=[TOKENS]) as answer:
            tokens = answer.all()
    except lab_server.Failed as error:
        why = _bad_why(version) if "after" in when else _why(version)
        raise Wrong(f"{when}: a request fails: {error}\n{why}") from None
    right = list(lab_server.right(number, TOKENS))
    if tokens == right:
        return
    steps = [line for line in lab_server.diary(version) if "do" in line]
    hint = "Each rank's part is added up over the ranks; x, which all have whole, is not."
    if len(tokens) != len(right):
        hint = f"{TOKENS} tokens were asked for."
    elif steps and not steps[0]["calls"] and len(lab_server.diary(version, 1)):
        hint = "The ranks say nothing to each other: each has only its part of every layer."
    elif len(steps) > 1 and all(step["do"] == "prefill" for step in steps):
        hint = "Every command was obeyed as a prefill: look at command['do']."
    same = next((i for i, (a, b) in enumerate(zip(tokens, right)) if a != b), len(tokens))
    raise Wrong(
        f"{when}: the tokens are not those of the whole model: {tokens[:6]} … instead of "
        f"{right[:6]} …,\nright up to the {same}th. {hint}"
    )


def _right_logits(version: Path, number: int, many: str) -> None:
    """Equal tokens may be luck: the numbers behind them, on every rank."""
    wanted = lab_server.right_logits(0, TOKENS)

    def made():
        return [line for line in lab_server.diary(version, number) if "do" in line]

    # rank 0 answers a little earlier
    lab_server.wait_for(lambda: len(made()) >= len(wanted), ANSWER)
    steps = made()
    if len(steps) < len(wanted):
        raise Wrong(f"{many}: rank {number} has made {len(steps)} of {len(wanted)} steps.")
    for place, (step, right) in enumerate(zip(steps, wanted)):
        if abs(step["logits"][0] - right) > 0.01:
            raise Wrong(
                f"{many}: the tokens are right, and that is luck: on rank {number} the logit of "
                f"token {place} is {step['logits'][0]:.2f},\nand in the whole model {right:.2f}. "
                "What is added to x must be the sum of the parts, on every rank."
            )


def _why(version: Path) -> str:
    """What the diaries say of a step that did not come to its end."""
    ranks = [lab_server.diary(version, 0), lab_server.diary(version, 1)]
    begun = [sum("begins" in line for line in lines) for lines in ranks]
    ended = [sum("do" in line for line in lines) for lines in ranks]
    if (version / "diary-1").exists() and begun[1] < begun[0]:
        return (
            f"Rank 0 has begun {begun[0]} steps, rank 1 {begun[1]}: rank 0 waits in an all-reduce. "
            "Every rank obeys every command."
        )
    if begun[0] > ended[0]:
        return "Rank 0 is still in a step: do all ranks call the same collectives, in this order?"
    return (
        f"Rank 0 has made {ended[0]} steps. For each command its loop must write one line to "
        "`answers`, and push it out of the buffer: flush."
    )


def _right_messages(version: Path, number: int, size: int, many: str) -> int:
    """What one rank said to the others, step by step; returns the calls of a step."""
    config = lab_server.model().config
    calls = 2 * config.layers
    for line in lab_server.diary(version, number):
        if "do" not in line:
            continue
        rows = line["positions"] * len(line["slots"])
        payload = calls * rows * config.hidden_size * 4
        what = f"{many}, rank {number}, a {line['do']} of {rows} position{'s' * (rows > 1)}"
        if line["outside"]:
            raise Wrong(
                f"{what}: {line['outside']} messages outside of the layers. The commands come by "
                "pipe, to every rank: nothing else needs to be said."
            )
        others = {name: count for name, count in line["calls"].items() if name != "all_reduce"}
        if others:
            raise Wrong(
                f"{what}: {', '.join(f'{count} × {name}' for name, count in others.items())}. "
                "All ranks need the sum of the parts: that is an all-reduce."
            )
        made = line["calls"].get("all_reduce", 0)
        if made != calls:
            raise Wrong(
                f"{what}: {made} all-reduces in {config.layers} layers; {calls} will do: one for "
                "attention, one for the MLP."
            )
        if line["bytes"] != payload:
            raise Wrong(
                f"{what}: {line['bytes']:,} bytes were handed over; {payload:,} will do: "
                f"{calls} tensors of the size of x, fp32."
            )
    return calls


def _bad_request(version: Path, many: str) -> None:
    try:
        with lab_server.Stream(input_ids=[1, UNKNOWN], max_tokens=[TOKENS]) as answer:
            tokens = answer.all()
    except lab_server.Failed as error:
        if f"token {UNKNOWN}" not in str(error):
            raise Wrong(
                f"{many}: a bad request (a token that the vocabulary does not have) gets the "
                f"answer: {error}\n{_bad_why(version)}"
            ) from None
        return
    raise Wrong(
        f"{many}: a bad request gets tokens: {tokens}. shard raises ValueError: the answer is "
        'then {"error": its text}.'
    )


def _bad_why(version: Path) -> str:
    log = (version / "log-0").read_text()
    if "ValueError" in log:
        return "The ValueError of the shard has ended the loop: one client must not end all others."
    return 'The client should be told what the shard said: {"error": str(error)}.'


def _only_rank_0(version: Path, size: int, many: str) -> None:
    for number in range(1, size):
        path = version / f"answers-{number}"
        said = path.read_text() if path.exists() else ""
        if said:
            raise Wrong(
                f"{many}: rank {number} answers too: {said.splitlines()[0]}\n"
                "All ranks have the same tokens, and the leader wants them once, from rank 0."
            )


def _right_end(version: Path, pids: list[int], many: str) -> None:
    """The leader's process is killed: its ends of the pipes close, and that is all."""
    lab_server.kill_leader(version)
    if not lab_server.wait_for(lambda: not lab_server.alive(pids), END):
        left = len(lab_server.alive(pids))
        raise Wrong(
            f"{many}: the leader was killed, and {left} of {len(pids)} ranks still run {END:.0f} s "
            "later.\nA pipe that nobody writes to any more is at its end: there the loop must end."
        )
