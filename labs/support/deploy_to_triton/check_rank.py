"""Given: what the check cell of exercise c looks at: ranks that obey a leader, with drawn models.

1 to 6 ranks put layers together, and 1 to 4 and 6 run your loop at a pipe like the leader's
(scenarios.py): values against the whole model in fp64, what the ranks say to each other in every
step, memory, bad requests, hundreds of commands. At last your file is served, and its leader is
killed.
"""

import json
import tempfile
from pathlib import Path

import torch

from labs.support.deploy_to_triton import lab_server
from labs.support.deploy_to_triton.scenarios import (
    Many,
    Parts,
    Served,
    obey,
    obey_many,
    put_together,
    short,
)
from utils.course.assertions import (
    Wrong,
    bitwise_equal,
    close,
    communication,
    described,
    same_bits,
    unchanged,
)
from utils.course.runner import Group, Trial
from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.serving.server import ServerError, server_available

TOKENS = 10
STEP = 15.0  # seconds in which the served ranks must have made a step
END = 10.0  # seconds in which ranks without a leader must have ended
UNKNOWN = 99_999  # no token of the vocabulary
ROOM = 64 * 1024  # bytes of activations of small models
LIBRARY = ("utils", "utils.parallel", "torch.distributed.tensor")
HANG = "Does every rank obey every command, and call the same collectives, in this order?"
WAITS = "\nSome calls are asynchronous: is each waited for before its result is read?"
ONE_LINE = (
    "For each command rank 0 writes one line to `answers`, and pushes it out of the buffer: flush."
)


def rank(trial: Trial) -> str:
    """Judges `layer` and `loop`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        for late in (True, False) if group.size in (2, 3) else (False,):
            _right_layers(trial, group, late)
        if group.size == 2:
            _right_many(trial, group)
        if group.size != 5:
            _right_loops(trial, group)
    seen = (
        "attention and MLP are added up on 1 to 6 ranks, in fp32 and fp64, also where a rank adds\n"
        "nothing or NaN, and when messages come late: two all-reduces of x a layer, nothing else;\n"
        "drawn models on 1, 2, 3, 4 and 6 ranks have the whole model's logits; nothing is kept;\n"
        "rank 0 alone answers, each command once, in order, bad requests too;\n"
    )
    if server_available():
        return f"{seen}there is no Triton server on this machine to be looked at."
    _served(trial.path)
    return f"{seen}and in a real server no rank stays when the leader is killed."


# ---- layers


def _right_layers(trial: Trial, group: Group, late: bool) -> None:
    cases = _layers(trial, group.size)
    slow = ", messages that come late" * late
    whole = group.case(" beside ".join(map(str, cases[:2]))) + slow
    ranks = group.run(whole, put_together, cases, late=late)
    for number, case in enumerate(cases):
        where = group.case(str(case)) + slow
        x = case.x().double()
        middle = x + sum(case.part(0, r, x) for r in range(group.size))
        right = middle + sum(case.part(1, r, middle) for r in range(group.size))
        finite = x[x.isfinite()].abs().max().item() + 2 * group.size
        found = [results[number] for results in ranks]
        for r, one in enumerate(found):
            hint = _symptom(case, group.size, r, one["y"], x)
            if any(event.asynchronous for event in one["events"]):
                hint += WAITS
            close(f"{where}, rank {r}", "x after the layer", one["y"], right, hint=hint,
                  dtype=case.dtype, scale=finite)
        same_bits(where, "x after the layer", [one["y"] for one in found])
        for r, one in enumerate(found):
            unchanged(f"{where}, rank {r}", one["changed"])
            if group.size > 1 or one["events"]:
                hint = "One sum for attention, one for the MLP, for all ranks: two all-reduces."
                right_calls = {"all_reduce": [case.bytes] * 2}
                communication(f"{where}, rank {r}", one["events"], right_calls, hint)
            if one["groups"]:
                raise Wrong(
                    f"{where}, rank {r}: the sums are made in a process group of the answer's own. "
                    "That of all ranks is there already."
                )
            if one["kept"]:
                raise Wrong(
                    f"{where}, rank {r}: {one['kept']:,} bytes of tensors are still held when the "
                    "caller has let go of all of them.\nWhat is kept between layers?"
                )


def _layers(trial: Trial, size: int) -> list[Parts]:
    """Any shape; a step of one row; the same shape in another dtype; an odd rank; a large one."""
    draw, (dtype, other) = trial.draw, trial.draw.sample([torch.float32, torch.float64], 2)
    shape = draw.randrange(1, 5), draw.randrange(2, 12), draw.randrange(1, 70)
    cases = [
        Parts(shape, dtype, trial.new_seed(), turned=draw.random() < 0.5),
        Parts(shape, other, trial.new_seed()),
        Parts((draw.randrange(1, 5), 1, draw.randrange(1, 40)), dtype, trial.new_seed()),
        Parts((draw.randrange(17, 80), 1, draw.randrange(1, 9)), other, trial.new_seed()),
    ]
    if size > 1:
        odd = draw.randrange(size)
        value = draw.choice([0.0, float("nan"), float("inf")]) if size > 3 else 0.0
        cases.append(Parts(shape, other, trial.new_seed(), odd=odd, odd_value=value))
    if size == 3:
        odd = draw.randrange(size)
        cases.append(Parts(shape, dtype, trial.new_seed(), odd=odd, odd_value=float("nan")))
    if size == 2:
        long = draw.randrange(17, 40), draw.randrange(20, 30), draw.randrange(150, 200)
        cases.append(Parts(long, dtype, trial.new_seed()))
    return cases


def _symptom(case: Parts, size: int, rank: int, y, x: torch.Tensor) -> str:
    """The mistake that has these numbers, or a question."""

    def made(first, second) -> torch.Tensor:
        middle = first([case.part(0, r, x) for r in range(size)], x)
        return second([case.part(1, r, middle) for r in range(size)], middle)

    def summed(parts, x):
        return x + sum(parts)

    def own(parts, x):
        return x + parts[rank]

    def mean(parts, x):
        return x + sum(parts) / size

    def x_too(parts, x):
        return size * x + sum(parts)

    if size > 1 and isinstance(y, torch.Tensor):
        for mistake, words in (
            ((own, own), "These are this rank's own parts: the ranks' parts are to be added up."),
            ((summed, own), "The parts of the MLP are not added up."),
            ((own, summed), "The parts of attention are not added up."),
            ((mean, mean), "These are the means of the parts, and their sums are to be added."),
            ((x_too, x_too), "x, which all ranks have whole, is added up with the parts."),
        ):
            if _near(y, made(*mistake)):
                return words
    both = x + sum(case.part(0, r, x) + case.part(1, r, x) for r in range(size))
    if _near(y, both):
        return "The MLP is given x without what attention has added to it."
    return "x + the sum of all ranks' attend(x); then that + the sum of their mlp(of that)."


def _near(a, b: torch.Tensor) -> bool:
    return (
        isinstance(a, torch.Tensor)
        and a.shape == b.shape
        and torch.allclose(a.double(), b, rtol=1e-4, atol=1e-6, equal_nan=True)
    )


# ---- loops


def _right_loops(trial: Trial, group: Group) -> None:
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        cases = [_model(trial, group.size, f"{folder}/model", at_once=group.size % 2 == 0)]
        if group.size == 2:
            cases.insert(0, _model(trial, group.size, f"{folder}/other", at_once=False))
        whole = group.case(" beside ".join(map(str, cases)))
        ranks = group.run(whole, obey, cases)
        for number, case in enumerate(cases):
            found = [results[number] for results in ranks]
            _right_run(group.case(str(case)), case, found)


def _model(trial: Trial, size: int, folder: str, at_once: bool) -> Served:
    """A model of drawn sizes in a folder, and commands for it."""
    draw = trial.draw
    kv_heads = size * (draw.choice([1, 2]) if size < 4 else 1)
    heads = kv_heads * draw.choice([1, 2, 3] if size < 4 else [1, 2])
    large = size == 2 and at_once
    config = GPTConfig(
        vocab_size=2 * draw.randrange(100, 200) + 1 if large else 2 * draw.randrange(8, 40) + 1,
        hidden_size=heads * (48 // heads if large else draw.randrange(1, 4)),
        layers=draw.randrange(1, 4 if size < 4 else 3),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw.randrange(1, 4),
        intermediate_size=400 if large else draw.randrange(size, 60),
        max_positions=draw.randrange(14, 24),
        tie_embeddings=draw.random() < 0.5,
    )
    torch.manual_seed(trial.new_seed())
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    slots = draw.randrange(3, 6)
    commands = _commands(trial, config, slots)
    dtype = torch.float64 if large else draw.choice([torch.float32, torch.float64])
    kind = str(dtype).removeprefix("torch.")
    what = (
        f"a model of {config.layers} layers, {heads} heads ({kv_heads} for keys), hidden size "
        f"{config.hidden_size}, {config.vocab_size} words in {kind}"
    )
    late = draw.randrange(size)
    return Served(folder, what, dtype, slots, commands, at_once=at_once, late=late)


def _commands(trial: Trial, config: GPTConfig, slots: int) -> tuple[tuple[dict, bool], ...]:
    """What a leader asks for: prefills and decodes in turns, slots that are used again, one that
    gets full, and requests that are bad."""
    draw, lengths, commands = trial.draw, {}, []

    def tokens(count):
        return [draw.randrange(config.vocab_size) for _ in range(count)]

    def prefill(slot, length):
        lengths[slot] = length
        commands.append(({"do": "prefill", "slot": slot, "tokens": tokens(length)}, True))

    def decode(who):
        for slot in who:
            lengths[slot] += 1
        commands.append(({"do": "decode", "slots": who, "tokens": tokens(len(who))}, True))

    def bad(**command):
        commands.append((command, False))

    first, second, third = draw.sample(range(slots), 3)
    prefill(first, draw.randrange(2, 9))
    decode([first])
    prefill(second, 1)
    decode([second, first])
    unknown = draw.choice([-1, config.vocab_size, config.vocab_size + draw.randrange(10**6)])
    bad(do="prefill", slot=third, tokens=[*tokens(draw.randrange(3)), unknown])
    decode([first, second])
    bad(do="prefill", slot=third, tokens=[])
    bad(do="decode", slots=[second, first], tokens=[*tokens(1), unknown])
    prefill(third, config.max_positions - 1)
    decode([third, first, second])
    bad(do="decode", slots=[second, third], tokens=tokens(2))  # the third is full
    decode(draw.sample([first, second], 2))
    prefill(third, draw.randrange(1, 4))  # shorter than who was there before
    bad(do="prefill", slot=second, tokens=tokens(config.max_positions + draw.randrange(2)))
    decode(draw.sample([first, second, third], 3))
    decode([third])
    return tuple(commands)


def _right_run(case: str, served: Served, ranks: list[dict]) -> None:
    for r, found in enumerate(ranks):
        where = f"{case}, rank {r}"
        _right_calls(where, [command for command, _ in served.commands], found)
        if r == 0:
            _right_answers(case, found, served.at_once)
        elif found["said"]:
            _only_rank_0(where, found)
    _right_logits(case, served, ranks)
    for r, found in enumerate(ranks):
        _right_steps(f"{case}, rank {r}", served, found, len(ranks))


def _right_calls(case: str, commands: list[dict], found: dict) -> None:
    """The shard was asked for what was commanded, in this order."""
    right = [_asked(command) for command in commands]
    seen = [(what, _plain(slots), _plain(tokens)) for what, slots, tokens in _calls(found)]
    for number, (got, wanted) in enumerate(zip(seen, right)):
        if got != wanted:
            raise Wrong(
                f"{case}: command {number + 1} is {short(commands[number])}, and the shard was "
                f"asked for {got[0]}({short(got[1])}, {short(got[2])})."
            )
    if len(seen) < len(right):
        words = f"{case}: command {len(seen) + 1}, {short(commands[len(seen)])}, was not obeyed."
        if found["missing"] is not None and found["missing"] < len(seen):
            asked = short(commands[found["missing"]])
            words = f"{case}: command {found['missing'] + 1}, {asked}, has no answer.\n{ONE_LINE}"
        elif seen:
            words += f"\nThe one before it was {short(commands[len(seen) - 1])}."
        raise Wrong(words)
    if len(seen) > len(right):
        raise Wrong(f"{case}: {len(right)} commands, and the shard was asked {len(seen)} times.")


def _asked(command: dict) -> tuple:
    return command["do"], command.get("slot", command.get("slots")), command["tokens"]


def _calls(found: dict) -> list[tuple]:
    return [call["asked"] for call in found["calls"]]


def _plain(given):
    return given if isinstance(given, int) else list(given)


def _right_answers(case: str, found: dict, at_once: bool = False) -> None:
    """A line for each command, in order."""
    lines = found["said"].splitlines()
    for number, call in enumerate(found["calls"]):
        what, *given = call["asked"]
        asked = f"the answer to command {number + 1}, {what}({short(given[0])}, {short(given[1])}),"
        if number >= len(lines) or (found["missing"] is not None and number >= found["missing"]):
            raise Wrong(f"{case}: {asked} has not come.\n{ONE_LINE}")
        try:
            answer = json.loads(lines[number])
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Wrong(f"{case}: {asked} is {described(lines[number])}, and no JSON object.")
        if "error" in call:
            if call["error"] not in str(answer.get("error")):
                raise Wrong(
                    f"{case}: {asked} is {short(answer)}, and the shard has raised ValueError: "
                    f"{call['error']}.\nThe client should be told what the shard said: "
                    '{"error": its text}.'
                )
        elif "error" in answer or answer.get("tokens") != call["tokens"]:
            raise Wrong(
                f"{case}: {asked} is {short(answer)}, and the shard's tokens are "
                f"{short(call['tokens'])}."
            )
    if len(lines) > len(found["calls"]):
        raise Wrong(
            f"{case}: {len(lines)} lines for {len(found['calls'])} commands; one line each."
        )


def _only_rank_0(case: str, found: dict) -> None:
    raise Wrong(
        f"{case} answers too: {short(found['said'].splitlines()[0])}\n"
        "All ranks have the same tokens, and the leader wants them once, from rank 0."
    )


def _right_logits(case: str, served: Served, ranks: list[dict]) -> None:
    """Of each row of each step: those of the whole model after all tokens of its request."""
    model = GPT.from_pretrained(served.folder, dtype=torch.float64)
    texts = {}
    for number, (command, good) in enumerate(served.commands):
        first = ranks[0]["calls"][number]
        where = f"{case}, command {number + 1}, {short(command)}"
        if good != ("error" not in first):
            raise Wrong(f"{where}: {first.get('error', 'no ValueError')}, which is not expected.")
        if not good:
            continue
        if command["do"] == "prefill":
            rows = [command["slot"]]
            texts[rows[0]] = list(command["tokens"])
        else:
            rows = command["slots"]
            for slot, token in zip(rows, command["tokens"]):
                texts[slot] = [*texts[slot], token]
        with torch.no_grad():
            right = torch.cat([model(torch.tensor([texts[slot]]))[:, -1] for slot in rows])
        for r, found in enumerate(ranks):
            call = found["calls"][number]
            if "error" in call:
                raise Wrong(f"{where}: rank {r} raises ValueError: {call['error']}, others do not.")
            close(f"{where}, rank {r}", "the logit (row, word)", call["logits"],
                  right, slack=1024, scale=1.0)
            if not bitwise_equal(call["logits"], first["logits"]):
                raise Wrong(
                    f"{where}: rank {r} and rank 0 do not hold the same bits of the logits."
                )


def _right_steps(case: str, served: Served, found: dict, size: int) -> None:
    """What was said in each step, and what is left when all is over."""
    config = json.loads((Path(served.folder) / "config.json").read_text())
    calls, value = 2 * config["num_hidden_layers"], torch.finfo(served.dtype).bits // 8
    for number, ((command, good), call) in enumerate(zip(served.commands, found["calls"])):
        rows = len(command["tokens"]) * good
        events = call["events"]
        if size > 1 or events:
            each = rows * config["hidden_size"] * value
            communication(
                f"{case}, command {number + 1}, {short(command)}",
                events,
                {"all_reduce": [each] * (calls if good else 0)},
                f"{calls} all-reduces in {config['num_hidden_layers']} layers, each of x.",
            )
    _nothing_outside(case, found)
    if found["peak"] > 0.5 * found["weights"] + ROOM:
        raise Wrong(
            f"{case}: while it obeys, {found['peak']:,} bytes of tensors are made and alive at the "
            f"same time; the weights of this rank are {found['weights']:,}.\nIs there a second "
            "copy of them?"
        )
    if found["kept"] or found["held"]:
        what = "its shard" if found["held"] else f"{found['kept']:,} bytes of tensors"
        raise Wrong(f"{case}: the loop is over, and somebody still holds {what}.")


def _nothing_outside(case: str, found: dict) -> None:
    if found["outside"]:
        raise Wrong(
            f"{case}: {found['outside']} messages outside of the layers. The commands come by "
            "pipe, to every rank: nothing else needs to be said."
        )


def _right_many(trial: Trial, group: Group) -> None:
    """Hundreds of commands for a shard that computes nothing, until another rank has gone."""
    draw, commands = trial.draw, []
    for number in range(draw.randrange(200, 300)):
        slots = draw.sample(range(40), draw.randrange(1, 33))
        if draw.random() < 0.4:
            length = draw.randrange(3000, 5000) if number == 50 else draw.randrange(1, 20)
            command = {"do": "prefill", "slot": slots[0], "tokens": _drawn(draw, length)}
        else:
            command = {"do": "decode", "slots": slots, "tokens": _drawn(draw, len(slots))}
        refused = draw.choice([""] * 9 + ['of a "bad" request\nit says: {1}', "tøken 7 is not ok"])
        commands.append((command, refused))
    case = Many(tuple(commands), gone=len(commands) - 2, late=draw.randrange(2))
    where = group.case(str(case))
    obeyed = [command for command, _ in commands[: case.gone + 1]]
    for r, found in enumerate(group.run(where, obey_many, case)):
        _right_gone(f"{where}, rank {r}", r, case, found, obeyed)


def _right_gone(case: str, rank: int, many: Many, found: dict, obeyed: list[dict]) -> None:
    last = (
        f"command {many.gone + 1}, in which the shard raises RuntimeError (another rank has gone)"
    )
    if len(found["calls"]) > len(obeyed):
        raise Wrong(
            f"{case}: {last}, is not the last that is obeyed.\nA ValueError is a client's fault; "
            "any other exception ends the loop, and the leader will notice."
        )
    _right_calls(case, obeyed, found)
    if rank == 0:  # the last command may have an answer, an error
        calls, lines = found["calls"][:-1], found["said"].splitlines()
        last_lines = lines[len(calls) :]
        _right_answers(case, found | {"calls": calls, "said": "\n".join(lines[: len(calls)])})
        if any("tokens" in line for line in last_lines):
            raise Wrong(f"{case}: {last}, gets an answer with tokens.")
    elif found["said"]:
        _only_rank_0(case, found)
    _nothing_outside(case, found)
    if found["pieces"] > 3 * len(obeyed):  # a command alone is more; one or so is Python's own
        raise Wrong(
            f"{case}: when the loop is over, {found['pieces']:,} pieces of memory more are in use "
            "than before it.\nWhat is kept of each command?"
        )


def _drawn(draw, count: int) -> list[int]:
    return [draw.randrange(50_000) for _ in range(count)]


# ---- the server


def _served(path: Path) -> None:
    """Two ranks in the real server: tokens, a bad request, and the end of the leader."""
    try:
        config = lab_server.settings(2, seconds=STEP)
        version = lab_server.put(lab_server.RANKS, config, rank=path)
    except ServerError as error:
        raise Wrong(f"in the server the model does not load.\n{error}") from None
    pids = [int(pid) for pid in (version / "ranks").read_text().split()]
    try:
        _right_tokens(0, "in the server")
        _bad_request()
        _right_tokens(1, "in the server, after a bad request")
        _right_end(version, pids)
    finally:
        lab_server.kill(pids)
        lab_server.stop()


def _right_tokens(number: int, when: str) -> None:
    try:
        with lab_server.Stream(input_ids=lab_server.prompt(number), max_tokens=[TOKENS]) as answer:
            tokens = answer.all()
    except lab_server.Failed as error:
        raise Wrong(f"{when}: a request fails: {error}\n{ONE_LINE}") from None
    right = list(lab_server.right(number, TOKENS))
    if tokens != right:
        raise Wrong(f"{when}: the tokens are {tokens}, and {right} are the whole model's.")


def _bad_request() -> None:
    try:
        with lab_server.Stream(input_ids=[1, UNKNOWN], max_tokens=[TOKENS]) as answer:
            tokens = answer.all()
    except lab_server.Failed as error:
        if f"token {UNKNOWN}" not in str(error):
            raise Wrong(
                f"in the server: a bad request (token {UNKNOWN}) gets the answer: {error}"
            ) from None
        return
    raise Wrong(f"in the server: a bad request gets tokens: {tokens}.")


def _right_end(version: Path, pids: list[int]) -> None:
    """The leader's process is killed: its ends of the pipes close, and that is all."""
    lab_server.kill_leader(version)
    if not lab_server.wait_for(lambda: not lab_server.alive(pids), END):
        left = len(lab_server.alive(pids))
        raise Wrong(
            f"in the server: the leader was killed, and {left} of {len(pids)} ranks still run "
            f"{END:.0f} s later.\nA pipe that nobody writes to any more is at its end: there the "
            "loop must end."
        )
