"""Given: lab 17's checks against a real server, over the network.

Exercise b: your model gets drawn requests, singly and several in one call; your client sends
requests to a model that does what they say (played.py). Exercise c: the engine runs with your
settings, under load. At the end your configuration serves the engine of lab 16: its tokens must be
those of the whole model.
"""

import operator
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

from labs.support.deploy_to_triton import lab_server
from labs.support.deploy_to_triton.lab_server import NAME, Stream, late
from labs.support.inference_engine import streams
from utils.course.assertions import NotHere, Wrong, described
from utils.course.observe import looks
from utils.course.runner import Trial
from utils.serving import load
from utils.serving.client import Client
from utils.serving.export import export
from utils.serving.metrics import scrape, statistics

# ---- b: the model

SILENCE = 10.0  # seconds within which a request must end
TRIES = 5  # attempts to have Triton pass several requests in one call
LARGE = 10**16  # beyond the integers that a float holds exactly; 300 of them fit into 64 bits
CONFIG = """backend: "python"
max_batch_size: 16
input { name: "numbers" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
output { name: "total" data_type: TYPE_INT64 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 200000 }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""


def model(trial: Trial) -> str:
    """Judge `TritonPythonModel`."""
    streams.not_started(trial.path)
    size, rng = trial.draw.choice([2, 4, 5, 6, 7]), np.random.default_rng(trial.new_seed())
    load_yours(trial.path, size)
    right_burst(size, [drawn(rng, 1, 2 * size + 1)])
    if not any(right_burst(size, several(rng, size)) for _ in range(TRIES)):
        raise NotHere("requests do not arrive close together on this machine now: try again.")
    tell = {"triton_grpc_error": "true"}  # asks the server for the error's status code
    error = Stream(headers=tell, numbers=negative(rng, 1, 4)).events()[-1]
    if "INVALID_ARGUMENT" not in str(error.status()):
        raise Wrong(
            "a negative number is the client's mistake, INVALID_ARG; a client that asks for the "
            f"status gets {error.status()}."
        )
    return (
        "requests of 1 to 3 rows and 0 to 4 totals, singly and several in one call: exact totals,\n"
        "in order, then the final flag on its own; a negative number is INVALID_ARG for its own\n"
        "request only."
    )


def drawn(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return rng.integers(0, LARGE, (rows, count))


def negative(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """Numbers of which the last is negative. With two rows, three are; the first of them in row
    order is neither the least nor the greatest, nor the first in column order."""
    numbers = drawn(rng, rows, count)
    least, middle, greatest = np.sort(-rng.integers(1, LARGE, 3))
    numbers[-1, -1] = greatest
    if rows > 1:
        numbers[0, 1], numbers[1, 0] = middle, least
    return numbers


def several(rng: np.random.Generator, size: int) -> list[np.ndarray]:
    """Requests of 16 rows in total: once the last has arrived, Triton waits for no other."""
    shapes = [(2, 2 * size + 1), (3, 0), (1, 3 * size), (2, 1), (3, size - 1), (2, size + 1)]
    made = [negative(rng, 1, size + 3), negative(rng, 2, 2 * size + 4)]
    made += [drawn(rng, *shape) for shape in shapes]
    rng.shuffle(made)
    return made


def load_yours(path: Path, size: int) -> None:
    """Load the answer as a model into the server."""
    lab_server.put(CONFIG + lab_server.parameter("size", size), model=path)


def right_burst(size: int, burst: list[np.ndarray]) -> bool:
    """Send these requests at once; return whether several came in one call. Raises Wrong."""

    def calls() -> int:
        return int(statistics(lab_server.server(), NAME)["executions"].sum())

    before = calls()
    sent = [Stream(numbers=numbers, seconds=SILENCE) for numbers in burst]
    answers = [one.events() for one in sent]
    if any(late(event) for events in answers for event in events):
        lab_server.stop()  # an unload would wait for open requests
    for numbers, events in zip(burst, answers):
        case = f"size {size}, {len(burst)} request{'s' * (len(burst) > 1)} at once"
        right_answer(f"{case}: numbers of shape {numbers.shape}", numbers, events, size)
    return calls() - before < len(burst)


def right_answer(case: str, numbers: np.ndarray, events: list, size: int) -> None:
    """Check the responses to one request, and how its stream ended. Raises Wrong."""
    bad, ended = numbers[numbers < 0], not any(map(late, events))
    events = [event for event in events if not late(event)]
    errors = [str(event) for event in events if isinstance(event, InferenceServerException)]
    answers = [e.get_response() for e in events if not isinstance(e, InferenceServerException)]
    totals = [InferResult(answer) for answer in answers if len(answer.outputs)]
    last = [answer for answer in answers if answer.parameters["triton_final_response"].bool_param]
    ends = [] if bad.size else range(size, numbers.shape[1] + size, size)
    for number, (end, total) in enumerate(zip(ends, totals), start=1):
        right = numbers[:, :end].sum(1)[:, None]
        right_total(f"{case}: total {number}", total.as_numpy("total"), right)
    named = bad.size and errors and re.search(rf"(?<!\d){bad[0]}(?!\d)", errors[0])
    for wrong, words in (
        (bad.size and not errors, f"{bad[:1]} among them, but no error comes."),
        (bad.size and totals, f"{bad[:1]} among them, but totals come in addition to the error."),
        (errors and not bad.size, f"none is negative, but an error comes:\n{errors[:1]}\nAn "
         "exception that leaves execute is an error for all requests of the call."),
        (not ended, f"{len(totals)} of {len(ends)} totals have come, but for {SILENCE:g} s no end: "
         "the client waits for the final flag.\nDoes execute return?"),
        (len(totals) != len(ends), f"{len(totals)} totals come, and {len(ends)} are right."),
        (any(len(one.outputs) for one in last), "the final flag comes with a total, but must come "
         "on its own: otherwise a client of\ngenerate_stream may keep waiting."),
        (errors and (len(errors) > 1 or answers), "something comes after the error, "
         "which must be last: send the flag with it."),
        (errors and not named, f"the error does not name {bad[:1]}, the first negative number:\n"
         f"{errors[:1]}"),
    ):
        if wrong:
            raise Wrong(f"{case}: {words}")


def right_total(case: str, got: np.ndarray | None, right: np.ndarray) -> None:
    if got is None or got.dtype != np.int64 or got.shape != right.shape:
        kind = "none" if got is None else f"{got.dtype} {got.shape}"
        raise Wrong(f"{case} is {kind}, and int64 {right.shape} is right.")
    if (got != right).any():
        raise Wrong(f"{case} is {got.ravel().tolist()}, not {right.ravel().tolist()}.")


# ---- b: the client

CLIENT = 5.0  # seconds of work until a client counts as an endless loop
ERROR, SILENT, PAUSE, EMPTY, LAST = -1, -2, -3, -4, -5  # their codes in played.py


def client(trial: Trial) -> str:
    """Judge `ask`."""
    streams.not_started(trial.path)
    trial.forbid(("utils.serving",))
    config = CONFIG.replace("200000", "0")
    version = lab_server.put(config, model=lab_server.GIVEN / "played.py")
    cases, url = asked_for(np.random.default_rng(trial.new_seed())), lab_server.server().grpc
    requests = [one[1:] for one in cases]
    mark = version / "cancelled"
    outcomes, cancelled = trial.alone("in one process", asked, url, requests, mark, seconds=CLIENT)
    for (case, numbers, _), outcome in zip(cases, outcomes):
        right_outcome(case, numbers, outcome)
    if not cancelled:
        raise Wrong(
            "a request that got no more responses is still open at the server after ask has "
            "returned: cancel it."
        )
    return (
        "0 to 200 totals in order, even after pauses, among responses without one, and with the\n"
        "final flag; an error after none or some; ten requests at the same time; if nothing\n"
        "comes, TimeoutError, and the request is cancelled."
    )


def asked_for(rng: np.random.Generator) -> list[tuple[str, np.ndarray, float]]:
    """The client's requests: (description, numbers, `seconds`)."""

    def row(*parts: int, rows: int = 2) -> np.ndarray:
        """Columns of drawn numbers for each count, and of a code for each negative part."""
        return np.hstack([
            drawn(rng, rows, part) if part >= 0 else np.full((rows, 1), part) for part in parts
        ])

    cases = {
        "7 totals": row(7, rows=3), "1 total": row(1, rows=1), "0 totals": row(0),
        "200 totals": row(200), "an error after 0 totals": row(ERROR),
        "6 totals, among responses without one": row(3, EMPTY, 2, EMPTY, 1),
        "3 totals, the final flag with the last": row(LAST, 3),
        "an error after 3 totals": row(3, ERROR),
    }
    pauses = "7 totals, 5 pauses, each shorter than seconds=3", row(*[1, PAUSE] * 5, 2), 3.0
    silence = "silence after 2 totals, seconds=2", row(2, SILENT, rows=1), 2.0
    return [*((words, numbers, SILENCE) for words, numbers in cases.items()), pauses, silence]


def asked(answer, url: str, requests: list, mark: Path | None = None) -> tuple[list, bool]:
    """In one process: the results of `ask` for each (numbers, seconds), all at once, or for an
    exception (the names of its classes, its text, the line in client.py); and whether `mark` was
    written."""

    def ask(request: tuple) -> Any:
        try:
            return answer.ask(url, NAME, *request)
        except Exception as error:
            lines = [at.lineno for at in traceback.extract_tb(error.__traceback__)]
            kinds = [kind.__name__ for kind in type(error).__mro__]
            return kinds, f"{error}", f"client.py line {lines[min(1, len(lines) - 1)]}"

    with ThreadPoolExecutor(len(requests)) as threads:
        outcomes = list(threads.map(ask, requests))
    return outcomes, mark is None or any(mark.exists() for _ in looks(SILENCE))


def right_outcome(case: str, numbers: np.ndarray, outcome: Any) -> None:
    """Check what `ask` returns or raises for a request. Raises Wrong."""
    kind, words = "", ""
    if (numbers == SILENT).any():
        kind = "TimeoutError"
    elif (numbers == ERROR).any():
        kind, words = "InferenceServerException", f"{np.abs(numbers).sum()}"
    if isinstance(outcome, tuple):
        kinds, text, place = outcome
        if kind not in kinds or words not in text:
            right = f"{kind} is right, with the server's message." if kind else ""
            raise Wrong(f"{case}: ask raises {kinds[0]}, {place}: {text}\n{right}")
        return
    if kind:
        raise Wrong(f"{case}: ask returns {described(outcome)}, but should raise {kind}.")
    columns = [column[:, None] for column in numbers.T if column[0] >= 0]
    if not isinstance(outcome, list) or len(outcome) != len(columns):
        count = len(outcome) if isinstance(outcome, list) else described(outcome)
        raise Wrong(f"{case}: ask returns {count} totals, but {len(columns)} were sent.")
    for number, (got, right) in enumerate(zip(outcome, columns), start=1):
        right_total(f"{case}: total {number}", got, right)


# ---- c: the goal

ENGINE = "gpt_engine"
MIB = 2**20
DEVICE = 12 * MIB  # bytes that a rank may use
LENGTH = 16  # tokens of a request
FEW, MOST = 16, 32  # simultaneous requests
GOAL = 3.3  # tokens per step
REFUSED = 8  # of MOST


def goal(trial: Trial) -> str:
    """Judge `settings` by counts (bytes, steps, tokens, refusals); times would say more about the
    machine."""
    chosen = settings(trial)
    tp, slots, waits = chosen.values()
    weights, slot = memory(tp)
    if weights + slots * slot > DEVICE:
        raise Wrong(
            f"a rank needs {(weights + slots * slot) / MIB:.2f} MiB, but a device has only "
            f"{DEVICE / MIB:.0f}: {weights / MIB:.2f} MiB of weights and {slots} slots of "
            f"{slot / MIB:.2f} MiB.\nMore ranks reduce both per rank, fewer slots only the second."
        )
    serve(tp, max_num_seqs=slots, queue=waits)
    few = burst(FEW, lambda refused, rows: refused or rows >= GOAL)
    if few[0]:
        raise Wrong(
            f"of {FEW} simultaneous requests {few[0]} are refused: {slots} can run and "
            f"{waits} wait."
        )
    if few[1] < GOAL:
        raise Wrong(
            f"{FEW} requests of {LENGTH} tokens give {few[1]:.1f} tokens per step; the goal is "
            f"{GOAL}.\nThey run in groups of {slots}, one group after another."
        )
    refused, _ = burst(MOST, lambda refused, _: refused >= min(REFUSED, MOST - slots - waits))
    if refused < REFUSED:
        raise Wrong(
            f"of {MOST} simultaneous requests {refused} are refused, and at least {REFUSED} should "
            f"be: the last waits for {-(-(MOST - refused) // slots) - 1}\ngroups, and its client "
            "may have left by then. A queue that is too long only hides the overload."
        )
    return (
        f"tp {tp}, {slots} slots, a queue of {waits}: each device has room for its rank;\n"
        f"{FEW} simultaneous requests are all served, with at least {GOAL} tokens per step;\nof "
        f"{MOST}, the excess is refused at once; and no request is lost."
    )


def settings(trial: Trial) -> dict[str, int]:
    """The result of `settings`, run in its own process: tp, slots, queue."""

    def chosen(answer) -> dict[str, int]:
        made = answer.settings()
        return {name: operator.index(made[name]) for name in ("tp", "slots", "queue")}

    return trial.alone("in one process", chosen)


def memory(tp: int) -> tuple[int, int]:
    """Bytes of a rank's fp32 weights, and of a slot of its KV cache."""
    model = streams.model()
    config, weights = model.config, sum(one.numel() for one in model.parameters())
    values = 2 * config.layers * config.key_value_heads * config.head_size * config.max_positions
    return 4 * weights // tp, 4 * values // tp


def serve(tp: int, dtype: str = "auto", **options: int) -> None:
    """Export and load the engine with these options in its config.pbtxt."""
    for name in (lab_server.NAME, ENGINE):
        lab_server.take(name)
    engine = lab_server.repository() / ENGINE
    with tempfile.TemporaryDirectory() as folder:
        export(streams.CHECKPOINT, folder, tp, options=options, dtype=dtype)
        shutil.rmtree(engine, ignore_errors=True)
        shutil.copytree(Path(folder, ENGINE), engine)
    lab_server.load(ENGINE)


def requests(clients: int, count: int, tokens: int = LENGTH) -> load.Load:
    """Send `count` requests to the engine from `clients` clients at a time."""
    client = Client(lab_server.server())
    prompts = [list(streams.prompt(number)) for number in (0, 1)]
    return load.run(lambda i: client.tokens(prompts[i % 2], max_tokens=tokens), clients, count)


def burst(count: int, enough: Callable[[int, float], Any], tries: int = 4) -> tuple[int, float]:
    """Send `count` requests at once; return the number refused and the tokens per step. Repeats if
    that is not `enough`: on a busy machine they do not arrive at once."""
    before = counted()
    sent = requests(count, count)
    for error in sent.errors:
        if "UNAVAILABLE" not in error:
            raise Wrong(f"one of {count} simultaneous requests fails: {error}")
    good = sent.requests[sent.requests["error"].isna()]
    after = counted(before["tokens_total"] + LENGTH * len(good))
    rows = LENGTH * len(good) / max(1.0, after["steps_total"] - before["steps_total"])
    found = count - len(good), rows
    return found if enough(*found) or tries == 1 else burst(count, enough, tries - 1)


def counted(tokens: float = 0) -> dict[str, float]:
    """The engine's counters, once they reach `tokens`: it reports them once per second."""
    for _ in looks(lab_server.SECONDS):
        found = dict(scrape(lab_server.server()))
        if {"tokens_total", "steps_total"} <= found.keys() and found["tokens_total"] >= tokens:
            return found
    raise Wrong(f"the engine counts {found.get('tokens_total', 0):.0f} tokens of {tokens:.0f}.")


# ---- everything together

def right_engine(config: str, rank: Path, scheduler: Path) -> int:
    """Send the six streams of lab 16 over the network to its engine behind this config.pbtxt;
    return their number. Raises Wrong if a stream's tokens differ from those it gets on its own."""
    given = [*streams.ENGINE, lab_server.GIVEN / "model.py"]
    lab_server.put(config, *given, rank=rank, scheduler=scheduler)
    sent = [
        Stream(input_ids=streams.prompt(number), max_tokens=[tokens],
               arrival=[len(streams.STREAMS), after])
        for number, tokens, after in streams.STREAMS
    ]
    streams.right_streams([tokens_of(stream) for stream in sent])
    lab_server.take(NAME)
    return len(sent)


def tokens_of(stream: Stream) -> list[int]:
    """The tokens of a request, once it has ended. Raises Wrong."""
    tokens = []
    for event in stream.events():
        if late(event):
            lab_server.stop()  # an unload would wait for it
            raise Wrong(f"a stream has not ended after {lab_server.SECONDS:g} s.")
        if isinstance(event, InferenceServerException):
            raise Wrong(f"a stream fails: {event}")
        made = event.as_numpy("output_ids")
        tokens += [] if made is None else made.tolist()
    return tokens
