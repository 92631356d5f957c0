"""Given: what the two check cells of exercise b look at: your model, and your client.

The model is loaded by the real server under two sizes, and gets drawn requests, alone and so many
at once that Triton hands over several in one call. The client asks a
model that does what its requests say (played.py), in a process of its own.
"""

import gc
import itertools
import json
import logging
import re
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from labs.support.deploy_to_triton import lab_server
from utils.course.assertions import NotHere, Wrong, described
from utils.course.runner import Trial
from utils.serving.server import ServerError

SECONDS = 10.0  # in which a call of the model must come to its end
SILENCE = 10.0  # until the next response must have come
CLIENT = 25.0  # until a client counts as an endless loop
TRIES = 5  # to have Triton hand over several requests in one call
ROWS = 16  # that Triton hands over at most in one call
LARGE = 10**16  # a number that no float has exactly; 300 of them fit into 64 bits
MANY = 300  # totals of a long request
TURNS = 3  # long requests, each of which leaves something behind if they do
ERROR, SILENT, PAUSE, EMPTY, LAST, TWO = -1, -2, -3, -4, -5, -6  # what played.py takes for these
SLOW, PAUSES = 3.0, 5  # seconds until its next response must have come; pauses, longer in all
CONFIG = """backend: "python"
max_batch_size: 16
input { name: "numbers" data_type: TYPE_INT64 dims: [ -1 ] allow_ragged_batch: true }
output { name: "total" data_type: TYPE_INT64 dims: [ 1 ] }
dynamic_batching { max_queue_delay_microseconds: 200000 }
model_transaction_policy { decoupled: true }
instance_group { kind: KIND_CPU count: 1 }
"""
PLAYS = CONFIG.replace("200000", "0")


# ---- the model


def model(trial: Trial) -> str:
    """Judges `TritonPythonModel`."""
    lab_server.not_started(trial.path)
    lab_server.server()
    draw, most = trial.draw, 0
    for size in (draw.choice([1, draw.randrange(2, 8)]), draw.randrange(10, 30)):
        version, case = load(trial.path, size), f"size {size}"
        rng = np.random.default_rng(trial.new_seed())
        first = [_numbers(rng, 1, 2 * size + 1)]
        bursts = [
            first,
            *(_burst(rng, size) for _ in range(2)),
            first,
            [_negative(rng, 2, 5, 3)],
            first,
        ]
        for burst in bursts:
            most = max(most, _right_burst(trial.path, version, case, burst, size))
    for _ in range(TRIES):
        if most == 1:  # the requests came one by one: a busy machine
            most = _right_burst(trial.path, version, case, _burst(rng, size), size)
    if most == 1:
        raise NotHere("on this machine requests do not come close together now: try it again.")
    _right_code(case, rng)
    _nothing_left(trial.path, version, case, rng, size)
    return (
        f"requests of 1 to 3 rows and 0 to {MANY} totals, alone and several in one call, under\n"
        "two sizes: totals to the last digit, in order, then the end, alone; a negative number is\n"
        "INVALID_ARG for its own request; no numbers were changed and nothing is kept."
    )


def _numbers(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    return rng.integers(0, LARGE, (rows, count))


def _negative(rng: np.random.Generator, rows: int, count: int, many: int) -> np.ndarray:
    """With 1 or 3 negative numbers, whose first, row by row, is neither the least nor the greatest,
    nor the first column by column; or with a single one, the last of all."""
    numbers = _numbers(rng, rows, count)
    if many == 1:
        numbers[-1, -1] = -rng.integers(1, LARGE)
        return numbers
    least, middle, greatest = np.sort(-rng.integers(1, LARGE, 3))
    numbers[0, 1], numbers[-1, -1] = middle, greatest
    numbers[-1, 0 if rows > 1 else -2] = least
    return numbers


def _burst(rng: np.random.Generator, size: int) -> list[np.ndarray]:
    """Requests of ROWS rows in all: when the last has come, Triton waits for no other."""
    counts = [0, 1, size - 1, size, size + 1, 2 * size, 3 * size]
    rows = [2, 3, 1, 1, 2]
    while sum(rows) < ROWS:
        rows.append(int(rng.integers(1, min(3, ROWS - sum(rows)) + 1)))
    made = [_numbers(rng, many, int(rng.choice(counts))) for many in rows]
    made[0], made[1] = _numbers(rng, 2, 2 * size + 1), _numbers(rng, 3, 0)
    made[2], made[3] = _negative(rng, 1, size + 3, 1), _negative(rng, 1, 2 * size + 4, 3)
    rng.shuffle(made)
    return made


def load(path: Path, size: int) -> Path:
    """The model's version folder, in the server."""
    given = (lab_server.GIVEN / "watched.py").read_text()
    config = CONFIG
    for key, value in {"size": size, "seconds": SECONDS}.items():
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    try:
        return lab_server.put([], config, {"model.py": given}, yours=path)
    except ServerError as error:
        version = lab_server.repository() / lab_server.NAME / "1"
        _came_to_an_end(path, version, "initialize")
        raise Wrong(f"size {size}: the server does not load the model:\n{error}") from None


def _right_burst(path: Path, version: Path, case: str, burst: list, size: int) -> int:
    """Sends these requests at once. Returns how many came in one call. Raises Wrong."""
    before = len(_notes(version))
    sent = [Asked(numbers) for numbers in burst]
    answers = [one.all() for one in sent]
    ended = all(answer.ended for answer in answers)
    lab_server.wait_for(lambda: _told(version, before, len(burst)), SILENCE if ended else 0.0)
    if not ended:
        lab_server.stop()  # an unload would wait for those that are open
    notes = _notes(version)[before:]
    _came_to_an_end(path, version, "execute")
    case = f"{case}, {len(burst)} request{'s' * (len(burst) > 1)} at once"
    for note in notes:
        if "raised" in note:
            raise Wrong(
                f"{case}: {note['raised']}\nWhat leaves execute is an error for all requests of "
                "the call."
            )
    for numbers, answer in zip(burst, answers):
        _right_answer(f"{case}: numbers of shape {numbers.shape}", numbers, answer, size)
    if any(note["changed"] for note in notes):
        raise Wrong(f"{case}: execute changes the numbers of a request, which are its client's.")
    if held := max(note["held"] for note in notes):
        raise Wrong(f"{case}: {held} of the requests before, all over, are still kept somewhere.")
    return max(note["requests"] for note in notes)


def _told(version: Path, before: int, many: int) -> bool:
    notes = _notes(version)[before:]
    done = sum(note.get("requests", 0) for note in notes)
    return done >= many or any("raised" in note for note in notes) or bool(_words(version))


def _notes(version: Path) -> list[dict]:
    path = version / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _words(version: Path) -> str:
    path = version / "words"
    return path.read_text() if path.exists() else ""


def _came_to_an_end(path: Path, version: Path, function: str) -> None:
    """Raises Wrong where a call of the model took too long: its process has ended itself."""
    if words := _words(version):
        lab_server.stop()
        found = re.findall(r'yours\.py", line (\d+) in', words)
        place = f" in model.py line {found[0]}" if found else ""
        code = path.read_text().splitlines()[int(found[0]) - 1].strip() if found else ""
        raise Wrong(
            f"{function} does not come to an end within {SECONDS:g} s{place}"
            f"{f' (`{code}`)' if code else ''}: an endless loop?"
        )


class Asked:
    """A request on a gRPC stream of its own: an error on a shared one does not say whose it is."""

    def __init__(self, numbers: np.ndarray, **headers: str):
        import grpc
        from tritonclient.grpc import service_pb2, service_pb2_grpc

        request = service_pb2.ModelInferRequest(model_name=lab_server.NAME)
        request.inputs.add(name="numbers", datatype="INT64", shape=numbers.shape)
        request.raw_input_contents.append(numbers.astype("<i8").tobytes())
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        self.channel = grpc.insecure_channel(lab_server.server().grpc)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.call = stub.ModelStreamInfer(
            iter([request]), timeout=SILENCE, metadata=list(headers.items())
        )

    def all(self) -> "Answer":
        """What comes, within SILENCE."""
        import grpc
        from tritonclient.grpc import InferResult

        answer = Answer()
        try:
            for event in self.call:
                last = event.infer_response.parameters["triton_final_response"].bool_param
                if event.error_message:
                    answer.errors.append((event.error_message, last))
                elif event.infer_response.outputs:
                    answer.totals.append((InferResult(event.infer_response), last))
                answer.after_error += bool(answer.errors) and not event.error_message
        except grpc.RpcError as error:
            answer.status = error.code().name
        self.channel.close()
        return answer


@dataclass
class Answer:
    """Of one request: its totals and errors, each with whether it was marked as the last; how many
    responses came after an error; how the stream ended."""

    totals: list = field(default_factory=list)
    errors: list = field(default_factory=list)
    after_error: int = 0
    status: str = "OK"

    @property
    def ended(self) -> bool:
        return self.status != "DEADLINE_EXCEEDED"


def _nothing_left(path: Path, version: Path, case: str, rng: np.random.Generator, size: int):
    """Long requests, a short one after each: then all that a long one needed is let go of."""
    held = []
    for _ in range(TURNS):
        long = rng.integers(0, LARGE // size, (3, MANY * size))
        for burst in ([long], [_numbers(rng, 1, 1)]):
            _right_burst(path, version, case, burst, size)
        held.append(_notes(version)[-1]["bytes"])
    least = min(after - before for before, after in itertools.pairwise(held))
    if least > long.nbytes // 4:
        raise Wrong(
            f"{case}: each request of {long.nbytes:,} bytes leaves {least:,} bytes or more in the "
            "model's memory when it is over: what is kept of it?"
        )


# ---- what is right


def _right_answer(case: str, numbers: np.ndarray, answer: Answer, size: int) -> None:
    """One request's responses. Raises Wrong."""
    negative = numbers[numbers < 0]
    if negative.size:
        _right_error(case, int(negative[0]), answer)
        return
    if answer.errors:
        raise Wrong(f"{case}: none is negative, and an error comes:\n{answer.errors[0][0]}")
    ends = range(size, numbers.shape[1] + size, size)
    for number, (end, (result, _)) in enumerate(zip(ends, answer.totals), start=1):
        _right_total(f"{case}: total {number}", result, numbers[:, :end].sum(1, keepdims=True))
    if len(answer.totals) != len(ends):
        raise Wrong(f"{case}: {len(answer.totals)} totals come, and {len(ends)} are right.")
    if not answer.ended:
        raise Wrong(
            f"{case}: {len(ends)} totals have come, and for {SILENCE:g} s no end: the client waits "
            "for the final flag."
        )
    if any(last for _, last in answer.totals):
        raise Wrong(
            f"{case}: the final flag comes with a total, and is to come alone: a client of "
            "generate_stream may wait on."
        )


def _right_total(case: str, result, right: np.ndarray) -> None:
    types = {output.name: output.datatype for output in result.get_response().outputs}
    if types != {"total": "INT64"}:
        raise Wrong(f"{case}: the outputs are {types}, not total, INT64.")
    got = result.as_numpy("total")
    if got.shape != right.shape:
        raise Wrong(f"{case} has the shape {got.shape}, and {right.shape} is right.")
    if (got != right).any():
        raise Wrong(f"{case} is {got.ravel().tolist()}, not {right.ravel().tolist()}.")


def _right_error(case: str, negative: int, answer: Answer) -> None:
    case = f"{case}, {negative} among them"
    if not answer.errors:
        raise Wrong(f"{case}: no error comes.")
    if answer.totals:
        raise Wrong(f"{case}: {len(answer.totals)} totals come beside the error.")
    if len(answer.errors) > 1 or answer.after_error:
        raise Wrong(
            f"{case}: something comes after the error, which is the last: the flag goes with it."
        )
    if not answer.ended:
        raise Wrong(f"{case}: an error comes, and for {SILENCE:g} s no end: no final flag with it.")
    if not re.search(rf"(?<!\d){negative}(?!\d)", answer.errors[0][0]):
        raise Wrong(
            f"{case}: the error does not name it, the first negative number:\n{answer.errors[0][0]}"
        )


def _right_code(case: str, rng: np.random.Generator) -> None:
    """The error's kind, which Triton tells only a client that asks for it by a header."""
    status = Asked(_negative(rng, 1, 4, 1), triton_grpc_error="true").all().status
    if status != "INVALID_ARGUMENT":
        raise Wrong(
            f"{case}: a negative number is its client's mistake, INVALID_ARG; a client that asks "
            f"for the kind of the error gets {status}."
        )


# ---- the client


def client(trial: Trial) -> str:
    """Judges `ask`."""
    lab_server.not_started(trial.path)
    trial.forbid(("utils.serving",))
    rng = np.random.default_rng(trial.new_seed())
    version = lab_server.put([], PLAYS, {"model.py": (lab_server.GIVEN / "played.py").read_text()})
    server = lab_server.server()  # a new one, perhaps: the model before could not be unloaded
    visits = _visits(rng)
    calls = 0
    for _ in range(TURNS):
        found, kept = trial.alone("in one process", asked, server.grpc, visits, seconds=CLIENT)
        calls += sum(map(len, found))
        if len(found) < len(visits) or not any(_late(outcome) for outcome in found[-1]):
            break  # else it is late among others: a busy machine? Try again
    for visit, outcomes in zip(visits, found):
        for (numbers, seconds), outcome in zip(visit, outcomes):
            case = _what(numbers) + f", one of {len(visit)} requests at once" * (len(visit) > 1)
            _right_outcome(f"{case}, seconds={seconds:g}", numbers, outcome)
    if not lab_server.wait_for((version / "cancelled").exists, SILENCE):
        lab_server.stop()
        raise Wrong(
            "a request to which nothing came any more is still open at the server after ask has "
            "returned: it is not cancelled."
        )
    if kept:
        raise Wrong("ask has returned every time, and a connection to the server is kept.")
    came = len((version / "asked").read_text().splitlines())
    if came != calls:
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


def _visits(rng: np.random.Generator) -> list[list[tuple[np.ndarray, float]]]:
    """What the client asks, and its `seconds`: the requests of a visit at the same time."""

    def row(*parts, rows=2):
        """Numbers for each count among the parts, and columns of what played.py knows."""
        columns = [
            _numbers(rng, rows, part) if part >= 0 else np.full((rows, 1), part) for part in parts
        ]
        return np.hstack(columns)

    plain = [row(count, rows=int(rng.integers(1, 4))) for count in (7, 1, 0, 200)]
    plain[-1][:, 50:60] = plain[-1][:, 50:51]  # the same total again and again
    plain[-1][:, 100] = 0
    others = row(3, EMPTY, 2, EMPTY, 1), row(LAST, 3), row(3, ERROR), row(ERROR)
    slow = row(*[1, PAUSE] * PAUSES, 2)
    at_once = row(5, ERROR), row(TWO, int(rng.integers(3, 30))), row(TWO, 3), row(8)
    return [
        *([(one, SILENCE)] for one in (*plain, *others, plain[0])),
        [(row(2, SILENT, rows=1), 1.0)],
        [(slow, SLOW), *((one, SILENCE) for one in at_once)],
    ]


def _late(outcome) -> bool:
    """Whether something did not come in time, or requests not together."""
    return isinstance(outcome, Raised) and (
        "TimeoutError" in outcome.kinds or "was to begin with another" in outcome.text
    )


def asked(answer, url: str, visits: list[list]) -> tuple[list[list], bool]:
    """In a process of its own: what `ask` does with each request, those of a visit at once; no
    further visit after one that waited in vain. And whether a connection is kept at the end."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # grpc.aio wakes loops that have ended
    found = []
    for visit in visits:
        outcomes, changed, errors = [None] * len(visit), [], []

        def ask(number, numbers, seconds, outcomes=outcomes, changed=changed, errors=errors):
            given = numbers.copy()
            try:
                outcomes[number] = answer.ask(url, lab_server.NAME, given, seconds)
            except Exception as error:
                kinds = [kind.__name__ for kind in type(error).__mro__]
                outcomes[number] = Raised(kinds, f"{error}", _line(error, answer.__file__))
                errors.append(error)  # with its client: the end of one waits for an open stream
            changed += [number] * bool((given != numbers).any())

        threads = [
            threading.Thread(target=ask, args=(number, *one)) for number, one in enumerate(visit)
        ]
        if len(visit) == 1:
            ask(0, *visit[0])
        else:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if changed:
            raise Wrong("ask changes the numbers, which are its caller's.")
        if not lab_server.wait_for(lambda: not _readers(), 3.0):
            raise Wrong("ask has returned, and its stream is still open: a thread of it reads on.")
        errors.clear()
        found.append(outcomes)
        silent = any((numbers == SILENT).any() for numbers, _ in visit)
        if not silent and any(_late(outcome) for outcome in outcomes):
            break
    return found, not lab_server.wait_for(lambda: not _connections(), 3.0)


def _connections() -> list:
    """gRPC's channels that are still somebody's."""
    import grpc

    gc.collect()
    kinds = grpc.Channel, grpc.aio.Channel
    return [one for one in gc.get_objects() if issubclass(type(one), kinds)]


def _readers() -> list:
    """The threads in which tritonclient reads a stream."""
    return [one for one in threading.enumerate() if "_process_response" in one.name]


def _line(error: Exception, file: str) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" in client.py line {lines[-1]}" if lines else ""


@dataclass
class Raised:
    """An exception: the names of its classes, its text, and where it comes from."""

    kinds: list[str]
    text: str
    place: str


def _what(numbers: np.ndarray) -> str:
    """What played.py makes of these."""
    said = {
        PAUSE: "pauses of less than a second",
        EMPTY: "some responses without one",
        LAST: "the final flag with the last",
        TWO: "the first of them when another request is there",
    }
    more = [words for mark, words in said.items() if (numbers == mark).any()]
    return ", ".join([f"{(numbers[0] >= 0).sum()} totals", *more])


def _right_outcome(case: str, numbers: np.ndarray, outcome) -> None:
    for mark, kind, words in (
        (SILENT, "TimeoutError", ""),
        (ERROR, "InferenceServerException", f"{np.abs(numbers).sum()}"),
    ):
        if (numbers == mark).any():
            totals = (numbers[0] >= 0).sum()
            what = f"an error after {totals} totals" if words else "silence"
            if not isinstance(outcome, Raised):
                raise Wrong(f"{what}: ask returns {described(outcome)}, and should raise {kind}.")
            if kind not in outcome.kinds or words not in outcome.text:
                seen = f"{outcome.kinds[0]}{outcome.place}: {outcome.text}"
                raise Wrong(f"{what}: ask raises {seen}\n{kind} is right, with the server's words.")
            return
    if isinstance(outcome, Raised):
        raise Wrong(f"{case}: {outcome.kinds[0]}{outcome.place}: {outcome.text}")
    columns = [column[:, None] for column in numbers.T if column[0] >= 0]
    if not isinstance(outcome, list) or not all(isinstance(one, np.ndarray) for one in outcome):
        raise Wrong(f"{case}: ask returns {described(outcome)}, not a list of arrays.")
    if len(outcome) != len(columns):
        raise Wrong(f"{case}: ask returns {len(outcome)} totals, and {len(columns)} were sent.")
    for number, (got, right) in enumerate(zip(outcome, columns), start=1):
        if got.dtype != right.dtype or got.shape != right.shape:
            raise Wrong(
                f"{case}: total {number} is {got.dtype}, {got.shape}, not {right.dtype}, "
                f"{right.shape}."
            )
        if (got != right).any():
            raise Wrong(
                f"{case}: total {number} is {got.ravel().tolist()}, and the server sent "
                f"{right.ravel().tolist()}."
            )
