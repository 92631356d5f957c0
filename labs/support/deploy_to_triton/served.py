"""Given: what the check cells of lab 16 ask of a real server, over the network.

Exercise b: your model gets drawn requests, alone and several in one call; your client asks a model
that does what its requests say (played.py). Exercises a, c and d: your file is part of the lab's
model, whose tokens must be the whole model's. Exercise e: the engine, your settings, under load.
"""

import functools
import gc
import logging
import re
import shutil
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from labs.support.deploy_to_triton import lab_server
from labs.support.deploy_to_triton.lab_server import Failed, Stream, lines_of
from utils.course.assertions import NotHere, Wrong, described
from utils.course.runner import Trial
from utils.serving.export import export
from utils.serving.metrics import scrape
from utils.serving.model_config import set_parameters
from utils.serving.server import ServerError


def put(case: str, *model: Any, **others: Any) -> Path:
    """`lab_server.put`, a refusal as Wrong."""
    try:
        return lab_server.put(*model, **others)
    except ServerError as error:
        raise Wrong(f"{case}: the server does not load it:\n{error}") from None


def tokens_of(case: str, stream: Stream, prompt: int) -> list[int]:
    """The tokens of a request; Wrong where they are not the whole model's."""
    try:
        tokens = list(stream)
    except Failed as error:
        raise Wrong(f"{case} fails: {error}") from None
    except Wrong:
        lab_server.stop()  # an unload would wait for it
        raise
    right = list(lab_server.right(prompt)[: len(tokens)])
    if tokens != right:
        raise Wrong(f"{case} has the tokens {tokens}, and {right} are the whole model's.")
    return tokens


# ---- a: the configuration

TOKENS = 12  # of a request


def right_config(text: str) -> None:
    """The lab's model with this config.pbtxt, asked for tokens. Raises Wrong."""
    put("the model with its config.pbtxt", lab_server.LEADER, text)
    for inputs in ({"max_tokens": [TOKENS]}, {}):
        stream = Stream(input_ids=lab_server.prompt(0), **inputs)
        if len(tokens_of(f"a request with {['input_ids', *inputs]}", stream, 0)) < TOKENS:
            raise Wrong(f"fewer than the {TOKENS} tokens come that were asked for.")


# ---- b: the model

SILENCE = 10.0  # seconds in which a request must have ended
TRIES = 5  # to have Triton hand over several requests in one call
ROWS = 16  # that Triton hands over at most in one call
LARGE = 10**16  # a number that no float has exactly; 300 of them fit into 64 bits
MANY = 300  # totals of a long request
CONFIG = """backend: "python"
max_batch_size: 16
input { name: "numbers" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
output { name: "total" data_type: TYPE_INT64 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 200000 }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""


def model(trial: Trial) -> str:
    """Judges `TritonPythonModel`."""
    lab_server.not_started(trial.path)
    draw = trial.draw
    for size in (draw.choice([1, draw.randrange(2, 8)]), draw.randrange(10, 30)):
        version, rng, most = load(trial.path, size), np.random.default_rng(trial.new_seed()), 1
        first = [drawn(rng, 1, 2 * size + 1)]
        for number in range(TRIES):
            if number < 2 or most == 1:  # the requests came one by one: a busy machine
                right_burst(version, size, first)
                most = max(most, right_burst(version, size, several(rng, size)))
        if most == 1:
            raise NotHere("on this machine requests do not come close together now: try it again.")
    asked = Stream(numbers=negative(rng, 1, 4, 1), headers=(("triton_grpc_error", "true"),))
    list(asked.events())  # the error's kind is told only to clients that ask for it
    if asked.status != "INVALID_ARGUMENT":
        raise Wrong(
            "a negative number is its client's mistake, INVALID_ARG; a client that asks for the "
            f"kind of the error gets {asked.status}."
        )
    return (
        f"requests of 1 to 3 rows and 0 to {MANY} totals, alone and several in one call, under\n"
        "two sizes: totals to the last digit, in order, then the end, alone; a negative number is\n"
        "INVALID_ARG for its own request; no numbers were changed and nothing is kept."
    )


def drawn(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return rng.integers(0, LARGE, (rows, count))


def negative(rng: np.random.Generator, rows: int, count: int, many: int) -> np.ndarray:
    """With a single negative number, the last of all; or with 3, whose first, row by row, is
    neither the least nor the greatest, nor the first column by column."""
    numbers = drawn(rng, rows, count)
    least, middle, greatest = np.sort(-rng.integers(1, LARGE, 3))
    numbers[-1, -1] = greatest
    if many == 3:
        numbers[0, 1], numbers[-1, 0 if rows > 1 else -2] = middle, least
    return numbers


def several(rng: np.random.Generator, size: int) -> list[np.ndarray]:
    """Requests of ROWS rows in all: when the last has come, Triton waits for no other."""
    counts = [0, 1, size - 1, size, size + 1, 2 * size, 3 * size]
    made = [
        drawn(rng, 2, 2 * size + 1), drawn(rng, 3, 0), drawn(rng, 1, MANY * size) // size,
        negative(rng, 1, size + 3, 1), negative(rng, 2, 2 * size + 4, 3),
    ]
    while (left := ROWS - sum(map(len, made))) > 0:
        made.append(drawn(rng, int(rng.integers(1, min(3, left) + 1)), int(rng.choice(counts))))
    rng.shuffle(made)
    return made


def load(path: Path, size: int) -> Path:
    """The model's version folder, in the server."""
    texts = {"model.py": (lab_server.GIVEN / "watched.py").read_text()}
    config = CONFIG + lab_server.parameter("size", size)
    return put(f"size {size}", [], config, texts, yours=path)


def right_burst(version: Path, size: int, burst: list[np.ndarray]) -> int:
    """Sends these requests at once. Returns how many came in one call. Raises Wrong."""
    before = len(lines_of(version / "notes"))
    sent = [Stream(numbers=numbers, seconds=SILENCE) for numbers in burst]
    answers = [list(one.events()) for one in sent]

    def notes() -> list[dict]:
        return lines_of(version / "notes")[before:]

    if any(one.status == "DEADLINE_EXCEEDED" for one in sent):
        lab_server.stop()  # an unload would wait for those that are open
    else:
        count = len(burst)
        lab_server.wait_for(
            lambda: sum(note.get("requests", count) for note in notes()) >= count, SILENCE
        )
    case = f"size {size}, {len(burst)} request{'s' * (len(burst) > 1)} at once"
    for note in notes():
        if "raised" in note:
            raise Wrong(
                f"{case}: {note['raised']}\nWhat leaves execute is an error for all requests of "
                "the call."
            )
    for numbers, one, events in zip(burst, sent, answers):
        right_answer(f"{case}: numbers of shape {numbers.shape}", numbers, events, one.status, size)
    if any(note["changed"] for note in notes()):
        raise Wrong(f"{case}: execute changes the numbers of a request, which are its client's.")
    if held := max(note["held"] for note in notes()):
        raise Wrong(f"{case}: {held} of the requests before, all over, are still kept somewhere.")
    return max(note["requests"] for note in notes())


def right_answer(case: str, numbers: np.ndarray, events: list, status: str, size: int) -> None:
    """What has come for one request, and how its stream has ended. Raises Wrong."""
    bad, ended = numbers[numbers < 0], status != "DEADLINE_EXCEEDED"
    errors = [event.error for event in events if event.error]
    totals = [event for event in events if event.tensors]
    ends = [] if bad.size else range(size, numbers.shape[1] + size, size)
    for number, (end, event) in enumerate(zip(ends, totals), start=1):
        right_total(f"{case}: total {number}", event.tensors, numbers[:, :end].sum(1)[:, None])
    named = bad.size and errors and re.search(rf"(?<!\d){bad[0]}(?!\d)", errors[0])
    for wrong, words in (
        (bad.size and not errors, f"{bad[:1]} among them, and no error comes."),
        (bad.size and totals, f"{bad[:1]} among them, and totals come beside the error."),
        (errors and not bad.size, f"none is negative, and an error comes:\n{errors[:1]}"),
        (errors and not ended, f"an error comes, and for {SILENCE:g} s no end: no final flag with "
         "it."),
        (not ended, f"{len(totals)} of {len(ends)} totals have come, and for {SILENCE:g} s no end: "
         "the client waits for the final flag.\nDoes execute come to an end?"),
        (len(totals) != len(ends), f"{len(totals)} totals come, and {len(ends)} are right."),
        (any(event.last for event in totals), "the final flag comes with a total, and is to come "
         "alone: a client of\ngenerate_stream may wait on."),
        (errors and (len(errors) > 1 or not events[-1].error), "something comes after the error, "
         "which is the last: the flag goes with it."),
        (errors and not named, f"the error does not name {bad[:1]}, the first negative number:\n"
         f"{errors[:1]}"),
    ):
        if wrong:
            raise Wrong(f"{case}: {words}")


def right_total(case: str, tensors: dict[str, np.ndarray], right: np.ndarray) -> None:
    got = tensors.get("total")
    if got is None or got.dtype != np.int64:
        seen = {name: str(array.dtype) for name, array in tensors.items()}
        raise Wrong(f"{case}: the outputs are {seen}, not total, INT64.")
    if got.shape != right.shape:
        raise Wrong(f"{case} has the shape {got.shape}, and {right.shape} is right.")
    if (got != right).any():
        raise Wrong(f"{case} is {got.ravel().tolist()}, not {right.ravel().tolist()}.")


# ---- b: the client

CLIENT = 8.0  # seconds of work until a client counts as an endless loop
ERROR, SILENT, PAUSE, EMPTY, LAST, TWO = -1, -2, -3, -4, -5, -6  # what played.py takes for these


def client(trial: Trial) -> str:
    """Judges `ask`."""
    lab_server.not_started(trial.path)
    trial.forbid(("utils.serving",))
    texts = {"model.py": (lab_server.GIVEN / "played.py").read_text()}
    version = lab_server.put([], CONFIG.replace("200000", "0"), texts)
    url, visits = lab_server.server().grpc, asked_for(np.random.default_rng(trial.new_seed()))
    found, left_open = trial.alone("in one process", asked, url, visits, seconds=CLIENT)
    for visit, outcomes in zip(visits, found):
        for (case, numbers, _), outcome in zip(visit, outcomes):
            right_outcome(case, numbers, outcome)
    if not lab_server.wait_for((version / "cancelled").exists, SILENCE):
        lab_server.stop()
        raise Wrong(
            "a request to which nothing came any more is still open at the server after ask has "
            "returned: it is not cancelled."
        )
    if left_open:
        raise Wrong("ask has returned every time, and a connection to the server is left open.")
    came = len((version / "asked").read_text().splitlines())
    if came != (calls := sum(map(len, visits))):
        raise Wrong(
            f"ask was called {calls} times, and {came} requests came to the server: each call "
            "sends one."
        )
    return (
        "0 to 200 totals in their order, also after pauses, beside responses without one, and\n"
        "with the final flag; an error after none and some; five requests at the same time; where\n"
        "nothing comes, TimeoutError, and the request is cancelled; each is sent once; neither a\n"
        "stream nor a connection is left open."
    )


def asked_for(rng: np.random.Generator) -> list[list[tuple[str, np.ndarray, float]]]:
    """What the client asks, in words, and its `seconds`; requests of a visit at the same time."""

    def row(*parts: int, rows: int = 2) -> np.ndarray:
        """Numbers for each count among the parts, and columns of what played.py knows."""
        return np.hstack([
            drawn(rng, rows, part) if part >= 0 else np.full((rows, 1), part) for part in parts
        ])

    equal = row(200)
    equal[:, 50:60] = equal[:, 50:51]  # the same total again and again
    alone = [
        *((f"{count} totals", row(count, rows=rows)) for count, rows in ((7, 3), (1, 1), (0, 2))),
        ("200 totals, some of them equal", equal),
        ("6 totals, beside responses without one", row(3, EMPTY, 2, EMPTY, 1)),
        ("3 totals, the final flag with the last", row(LAST, 3)),
        ("an error after 3 totals", row(3, ERROR)), ("an error after 0 totals", row(ERROR)),
    ]
    pauses = "7 totals, pauses of a second, one of 5 requests at once, seconds=4"
    together = {
        "an error after 5 totals, one of 5 requests at once": row(5, ERROR),
        "3 totals, one of 5 requests at once": row(TWO, 3),
        "9 totals, one of 5 requests at once": row(TWO, 9),
        "8 totals, one of 5 requests at once": row(8),
    }
    return [
        *([(*one, SILENCE)] for one in alone),
        [(pauses, row(*[1, PAUSE] * 5, 2), 4.0), *((*one, SILENCE) for one in together.items())],
        [("silence after 2 totals", row(2, SILENT, rows=1), 1.0)],
    ]


@dataclass
class Raised:
    """An exception: the names of its classes, its text, and where it comes from."""

    kinds: list[str]
    text: str
    place: str = ""


def asked(answer, url: str, visits: list[list]) -> tuple[list[list], bool]:
    """In a process: what `ask` does with each request, those of a visit at once; and whether a
    connection is left open at the end."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # grpc.aio wakes loops that have ended
    found = []

    def ask(outcomes: dict, number: int, numbers: np.ndarray, seconds: float) -> None:
        given = numbers.copy()
        try:
            outcomes[number] = answer.ask(url, lab_server.NAME, given, seconds)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [one.lineno for one in frames if one.filename == answer.__file__]
            place = f" in client.py line {lines[-1]}" if lines else ""
            kinds = [kind.__name__ for kind in type(error).__mro__]
            outcomes[number] = Raised(kinds, f"{error}", place)
        if (given != numbers).any():
            outcomes["changed"] = True

    for visit in visits:
        outcomes = {}
        threads = [
            threading.Thread(target=ask, args=(outcomes, number, *one))
            for number, (_, *one) in enumerate(visit)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if outcomes.pop("changed", False):
            raise Wrong("ask changes the numbers, which are its caller's.")
        found.append([outcomes[number] for number in range(len(visit))])

    def channels() -> list:
        gc.collect()
        kinds = grpc.Channel, grpc.aio.Channel
        return [one for one in gc.get_objects() if issubclass(type(one), kinds)]

    return found, not lab_server.wait_for(lambda: not channels(), 3.0)


def right_outcome(case: str, numbers: np.ndarray, outcome: Any) -> None:
    """What `ask` returns or raises for a request. Raises Wrong."""
    kind, words = "", ""
    if (numbers == SILENT).any():
        kind = "TimeoutError"
    elif (numbers == ERROR).any():
        kind, words = "InferenceServerException", f"{np.abs(numbers).sum()}"
    if isinstance(outcome, Raised):
        if kind not in outcome.kinds or words not in outcome.text:
            right = f"{kind} is right, with the server's words." if kind else ""
            seen = f"{outcome.kinds[0]}{outcome.place}: {outcome.text}"
            raise Wrong(f"{case}: ask raises {seen}\n{right}")
        return
    if kind:
        raise Wrong(f"{case}: ask returns {described(outcome)}, and should raise {kind}.")
    if not isinstance(outcome, list) or not all(isinstance(one, np.ndarray) for one in outcome):
        raise Wrong(f"{case}: ask returns {described(outcome)}, not a list of arrays.")
    columns = [column[:, None] for column in numbers.T if column[0] >= 0]
    if len(outcome) != len(columns):
        raise Wrong(f"{case}: ask returns {len(outcome)} totals, and {len(columns)} were sent.")
    for number, (got, right) in enumerate(zip(outcome, columns), start=1):
        right_total(f"{case}: total {number}", {"total": got}, right)


# ---- c: the ranks

STEP = 15.0  # seconds in which the served ranks must have made a step
END = 10.0  # seconds in which ranks without a leader must have ended
UNKNOWN = 99_999  # no token of the vocabulary


def right_ranks(path: Path) -> None:
    """Two ranks in the real server: tokens, a bad request, and the end of the leader."""
    config = lab_server.settings(tp=2, slots=4, seconds=STEP)
    version = put("two ranks in the server", lab_server.RANKS, config, rank=path)
    pids = [int(pid) for pid in (version / "ranks").read_text().split()]
    try:
        for number, case in enumerate(("a request", "a request after a bad one")):
            stream = Stream(input_ids=lab_server.prompt(number), max_tokens=[TOKENS])
            tokens_of(f"in the server {case}", stream, number)
            *_, last = Stream(input_ids=[1, UNKNOWN], max_tokens=[TOKENS]).events()
            if f"token {UNKNOWN}" not in last.error:
                raise Wrong(f"in the server: a bad request is answered with {last}.")
        lab_server.kill([int((version / "leader").read_text())])
        if not lab_server.wait_for(lambda: not lab_server.alive(pids), END):
            raise Wrong(
                f"in the server: the leader was killed, and {len(lab_server.alive(pids))} of "
                f"{len(pids)} ranks still run {END:.0f} s later.\nA pipe that nobody writes to any "
                "more is at its end: there the loop must end."
            )
    finally:
        lab_server.kill(pids)
        lab_server.stop()


# ---- d: real streams

SLOTS = 3
# prompt, length, and the step in which it comes. The first is long; the next three come with it or
# soon after it, one more than there are slots; one waits, and the last comes when slots are free
STREAMS = ((0, 40, 0), (1, 14, 0), (2, 6, 0), (0, 9, 2), (1, 3, 3), (2, 4, 24))


def right_streams(path: Path) -> str:
    """The lab's model with this scheduler: all get the tokens that they get alone, in few steps.
    Returns the sentence for the check."""
    rows = [len(step["slots"]) for step in decodes(load_scheduler(path))]
    longest = max(tokens for _, tokens, _ in STREAMS) - 1  # its first token comes from the prefill
    if max(rows) < SLOTS or len(rows) > longest + 2:
        raise Wrong(
            f"{len(STREAMS)} streams in {SLOTS} slots take {len(rows)} decode steps of at most "
            f"{max(rows)} rows; {longest} will do, as many as the longest needs alone."
        )
    return (
        f"{len(STREAMS)} real streams in {SLOTS} slots take {len(rows)} decode steps, as many as "
        "the longest\nalone, and have the tokens that they have alone."
    )


def load_scheduler(path: Path | None) -> Path:
    """The model with this scheduler.py (None: one request after the other); its version folder."""
    config = lab_server.settings(tp=1, slots=SLOTS)
    return put("the model", lab_server.LEADER, config, scheduler=path)


def decodes(version: Path) -> list[dict]:
    """Sends STREAMS to the model that was loaded. Returns the decode steps that were made. Raises
    Wrong where one of them has not the tokens that it has alone."""
    streams = [
        Stream(input_ids=lab_server.prompt(number), max_tokens=[tokens],
               arrival=[len(STREAMS), after])
        for number, tokens, after in STREAMS
    ]
    for stream, (number, tokens, after) in zip(streams, STREAMS):
        case = f"the stream of {tokens} tokens that comes in step {after}"
        if len(got := tokens_of(case, stream, number)) != tokens:
            raise Wrong(f"{case} has {len(got)}.")
    return [line for line in lines_of(version / "diary-0") if line["do"] == "decode"]


# ---- e: the goal

ENGINE = "gpt_engine"
MIB = 2**20
DEVICE = 12 * MIB  # bytes that a rank may use
LENGTH = 16  # tokens of a request
FEW, MOST = 16, 32  # requests at the same moment
GOAL = 3.3  # tokens a step
REFUSED = 8  # of MOST
LEAST = {"tp": 1, "slots": 1, "queue": 0}


def goal(trial: Trial) -> str:
    """Judges `settings`: what decides is counted, bytes, steps, tokens, refusals; times would tell
    more of the machine."""
    chosen = settings(trial)
    tp, slots, waits = chosen.values()
    try:
        version = exported(tp)
    except ValueError as error:
        raise Wrong(f"the export refuses tp {tp}: {error}") from None
    weights, slot = memory(tp)
    if weights + slots * slot > DEVICE:
        raise Wrong(
            f"a rank needs {(weights + slots * slot) / MIB:.2f} MiB and a device has "
            f"{DEVICE / MIB:.0f}: {weights / MIB:.2f} MiB of weights and {slots} slots of "
            f"{slot / MIB:.2f} MiB.\nMore ranks have less of both each, fewer slots less of the "
            "second."
        )
    serve(version, chosen)
    few = burst(FEW, lambda seen: seen["refused"] or seen["rows"] >= GOAL)
    if few["refused"]:
        raise Wrong(
            f"of {FEW} requests at the same moment {few['refused']} are refused: {slots} can run "
            f"and {waits} wait."
        )
    if few["rows"] < GOAL:
        raise Wrong(
            f"{FEW} requests of {LENGTH} tokens make {few['rows']:.1f} tokens a step, and {GOAL} "
            f"is the goal.\nThey come in groups of {slots}, one after the other."
        )
    many = burst(MOST, lambda seen: seen["refused"] >= REFUSED or slots + waits + REFUSED > MOST)
    if many["refused"] < REFUSED:
        turns = -(-(MOST - many["refused"]) // slots)
        raise Wrong(
            f"of {MOST} requests at the same moment {many['refused']} are refused, {REFUSED} is "
            f"the least: the last waits {turns - 1} turns of\nthe others, and its client may have "
            "gone by then. A queue that is too long only hides that there are too many."
        )
    return (
        f"tp {tp}, {slots} slots, a queue of {waits}: each has room for its rank;\n"
        f"{FEW} at once are all served, with {GOAL} tokens a step or more;\nof "
        f"{MOST} at once those who are too many hear it at once; and no request is lost."
    )


def settings(trial: Trial) -> dict[str, int]:
    """What `settings` returns, in a process of its own."""
    return trial.alone("in one process", chosen_by)


def chosen_by(answer) -> dict[str, int]:
    chosen = answer.settings()
    if not isinstance(chosen, dict) or set(chosen) != set(LEAST):
        raise Wrong(f"settings returns {chosen!r}, not a dictionary of {', '.join(LEAST)}.")
    for name, value in chosen.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < LEAST[name]:
            raise Wrong(f"{name} is {value!r}, not a whole number of at least {LEAST[name]}.")
    return {name: int(chosen[name]) for name in LEAST}


@functools.cache
def exported(tp: int) -> Path:
    """The checkpoint as a version folder for `tp` ranks."""
    return export(lab_server.CHECKPOINT, lab_server.folder() / f"export-{tp}", tp)


def memory(tp: int) -> tuple[int, int]:
    """Bytes of a rank's weights, fp32, and of a slot of its KV cache."""
    model = lab_server.model()
    config, weights = model.config, sum(one.numel() for one in model.parameters())
    values = 2 * config.layers * config.key_value_heads * config.head_size * config.max_positions
    return 4 * weights // tp, 4 * values // tp


def serve(version: Path, chosen: dict[str, int]) -> None:
    """Loads the engine with these settings in its config.pbtxt."""
    for name in (lab_server.NAME, ENGINE):
        lab_server.take(name)
    engine = lab_server.repository() / ENGINE
    shutil.rmtree(engine, ignore_errors=True)
    shutil.copytree(version.parent, engine)
    set_parameters(
        engine / "config.pbtxt", {"max_num_seqs": chosen["slots"], "queue": chosen["queue"]}
    )
    try:
        lab_server.load(ENGINE)
    except ServerError as error:
        raise Wrong(f"the engine does not start with these settings.\n{error}") from None


def burst(count: int, enough: Callable[[dict], Any], tries: int = 4) -> dict[str, float]:
    """Sends `count` requests at the same moment: how many were `refused`, and `rows`, the tokens of
    each step. Again, if it is not `enough`: on a busy machine they do not come at the same moment.
    """
    before, found, made = counted(), {"refused": 0}, 0
    sent = [
        (prompt, Stream(ENGINE, input_ids=lab_server.prompt(prompt), max_tokens=[LENGTH]))
        for prompt in [0, 1] * (count // 2)
    ]
    for prompt, stream in sent:
        try:
            made += len(tokens_of(f"one of {count} requests at the same moment", stream, prompt))
        except Wrong as error:
            if "UNAVAILABLE" not in str(error):
                raise
            found["refused"] += 1
    after = counted(before["tokens_total"] + made)
    found["rows"] = made / max(1.0, after["steps_total"] - before["steps_total"])
    return found if enough(found) or tries == 1 else burst(count, enough, tries - 1)


def counted(tokens: float = 0) -> dict[str, float]:
    """The engine's counters, when they have come to so many tokens: it tells them once a second."""
    found = {}

    def there() -> bool:
        found.update(scrape(lab_server.server()))
        return found.get("tokens_total", 0) >= tokens and "steps_total" in found

    if not lab_server.wait_for(there, lab_server.SECONDS):
        raise Wrong(f"the engine counts {found.get('tokens_total', 0):.0f} tokens of {tokens:.0f}.")
    return found
