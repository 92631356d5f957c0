"""Given: what exercises 16a, 16c and 16d ask for, and how their check cells judge it.

First functions and tables in processes of their own, for what is drawn. Then the real server, where
there is one (served.py): the same files in a model that is asked over the network.
"""

import copy
import gc
import io
import json
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.deploy_to_triton import lab_server, served
from labs.support.deploy_to_triton.triton_model import leader
from utils.course.assertions import Wrong, alike, communication, described
from utils.course.contract import BOTH, Call, Case, Contract, Seen
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.serving.server import server_available

SECONDS = 10.0  # until an answer in one process counts as an endless loop
NO_SERVER = "there is no Triton server on this machine to try it."

# ---- a: the configuration

BITS = {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}
TYPES = {"bool": "TYPE_BOOL", "string": "TYPE_STRING", "bfloat16": "TYPE_BF16"} | {
    f"{kind}{bits}": f"TYPE_{kind.upper().replace('FLOAT', 'FP')}{bits}"
    for kind, many in BITS.items() for bits in many
}
BATCHING, POLICY = "dynamic_batching", "model_transaction_policy"
# what a file may say, because it is so anyway
HARMLESS = {
    "version_policy": {"latest": {"num_versions": 1}}, "default_model_filename": "model.py",
}
HINTS = {  # by the end of what is wrong
    "max_batch_size": "With more than 0 the server adds a dimension in front of all shapes, and "
    "the model must take batches.",
    "dims": "-1 stands for any number; the dimension of a batch is not among them.",
    "data_type": "It is the type that clients send.",
    BATCHING: "It is on as soon as the word stands there, with a delay of 0 too; where model.delay "
    "is None, the server\nmust not hold requests back.",
    POLICY: "A stream has one response for each token: decoupled. Where a request has exactly one, "
    "a decoupled model\nis refused to the clients that wait for it.",
    "instance_group": "Left out, or of KIND_GPU, there is one for each GPU. Two are two leaders, "
    "each with all ranks: one\nprocess group is one instance.",
}


@dataclass(frozen=True)
class Tensor:
    """See config.py."""

    name: str
    dtype: str
    dims: list[int]
    optional: bool = False


@dataclass(frozen=True)
class Model:
    """See config.py."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    max_batch: int = 0
    delay: int | None = None
    streams: bool = False
    instances: int = 1
    device: str = "model"
    parameters: dict[str, Any] = field(default_factory=dict)


def the_labs(tp: int, slots: int = 4) -> Model:
    """The model of this lab on so many ranks."""
    ids, length = Tensor("input_ids", "int32", [-1]), Tensor("max_tokens", "int32", [1], True)
    inputs = [ids, length, Tensor("arrival", "int32", [2], True)]
    outputs, given = [Tensor("output_ids", "int32", [-1])], {"tp": tp, "slots": slots}
    return Model(lab_server.NAME, inputs, outputs, streams=True, parameters=given)


def models() -> st.SearchStrategy:
    """Any model."""
    names = st.builds("{}_{}".format, st.sampled_from(["x", "key.value", "mask:0"]), st.integers(0))
    sizes = st.just(-1) | st.integers(1, 10**10)
    text = st.text([chr(code) for code in range(32, 127)])

    def tensors(optional: st.SearchStrategy) -> st.SearchStrategy:
        one = st.builds(
            Tensor, names, st.sampled_from(sorted(TYPES)), st.lists(sizes, min_size=1), optional
        )
        return st.lists(one, min_size=1, max_size=5, unique_by=lambda tensor: tensor.name)

    keys = st.sampled_from(["tp", "slots", "seconds", "stop", "a key", "k/v"])
    drawn = st.builds(
        Model, st.sampled_from(["a_model", "another"]), tensors(st.booleans()),
        tensors(st.just(False)), st.sampled_from([0, 1, 8]) | st.integers(0, 500),
        st.none() | st.sampled_from([0, 500]), st.booleans(), st.integers(1, 4),
        st.sampled_from(["model", "cpu", "gpu"]),
        st.dictionaries(keys, st.integers() | st.floats(0, 1) | text),
    )
    return drawn.map(lambda model: model if model.max_batch else replace(model, delay=None))


def config(trial: Trial) -> str:
    """Judges `config`."""
    trial.forbid(("utils", "utils.serving"))
    labs = [the_labs(trial.draw.randrange(2, 9), trial.draw.randrange(5, 99)) for _ in range(2)]
    trial.alone("in one process", configs, labs, trial.new_seed(), seconds=SECONDS)
    seen = (
        "of drawn models the parser reads names, types, dims, batches, instances, responses\n"
        "and parameters as they are, and nothing else; no model was changed;\n"
    )
    if server_available():
        return f"{seen}{NO_SERVER}"
    served.right_config(text_of(trial, the_labs(2, slots=trial.draw.randrange(2, 7))))
    return f"{seen}the server loads the lab's own, which streams the model's tokens."


def text_of(trial: Trial, model: Model) -> str:
    """What `config` returns."""
    return trial.alone("in one process", lambda answer: answer.config(model), seconds=SECONDS)


def configs(answer, labs: list[Model], seed: int) -> None:
    """In a process: the lab's models, and any others."""

    def fits(model: Model) -> None:
        before = copy.deepcopy(model)
        text = answer.config(model)
        if not isinstance(text, str):
            raise Wrong(f"config returns {described(text)}, not the text of the file.")
        for name, value in vars(before).items():
            if getattr(model, name) != value:
                raise Wrong(f"config changes model.{name}, and its owner still needs it.")
        found, right = understood(text), facts(model)
        harmless = HARMLESS | {"name": model.name}
        for key in {**right, **found}:
            got, wanted = found.get(key), right.get(key)
            spare = wanted is None and (key.startswith("parameter") or got == harmless.get(key))
            if got != wanted and not spare:
                seen, asked = ("none" if value is None else repr(value) for value in (got, wanted))
                hint = next((words for end, words in HINTS.items() if key.endswith(end)), "")
                raise Wrong(f"model “{model.name}”: {key} is {seen}, and {asked} is right.\n{hint}")

    for model in labs:
        fits(model)
    for_all(seed, models(), fits)


def facts(model: Model) -> dict[str, Any]:
    """What a file must say; what is left out is Triton's default."""
    found = {"backend": "python"}
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for tensor in tensors:
            found[f"{kind} {tensor.name}: data_type"] = TYPES[tensor.dtype]
            found[f"{kind} {tensor.name}: dims"] = list(tensor.dims)
            if tensor.optional:
                found[f"{kind} {tensor.name}: optional"] = True
    if model.max_batch:
        found["max_batch_size"] = model.max_batch
    if model.delay is not None:
        found[BATCHING] = {"delay": model.delay}
    if model.streams:
        found[POLICY] = {"decoupled": True}
    found["instance_group"] = {f"KIND_{model.device.upper()}": model.instances}
    return found | {f"parameter “{key}”": str(value) for key, value in model.parameters.items()}


def understood(text: str) -> dict[str, Any]:
    """The same, read out of a text by Triton's parser. Raises Wrong with its words."""
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    try:
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise Wrong(f"Triton cannot read the text: {error}\n{text[:400]}") from None
    said = json_format.MessageToDict(message, preserving_proto_field_name=True)
    found = {}
    for kind in ("input", "output"):
        for tensor in said.pop(kind, []):
            for name, value in tensor.items():
                if name != "name":
                    value = [int(size) for size in value] if name == "dims" else value
                    found[f"{kind} {tensor.get('name')}: {name}"] = value
    for key, value in said.pop("parameters", {}).items():
        found[f"parameter “{key}”"] = value.get("string_value", "")
    if BATCHING in said:
        delay = int(said[BATCHING].pop("max_queue_delay_microseconds", 0))
        found[BATCHING] = {"delay": delay, **said.pop(BATCHING)}
    groups, kinds = said.pop("instance_group", []), Counter()
    for group in groups:
        group.pop("name", None)
        kinds[group.pop("kind", "KIND_AUTO")] += max(1, group.pop("count", 1))
        kinds.update(group.keys())
    if kinds:
        found["instance_group"] = dict(kinds)
    return found | {key: value for key, value in said.items() if value != {}}


# ---- c: a layer of a rank


@dataclass
class Part:
    """What a rank's attention or MLP adds to x: no linear function of it."""

    name: str
    weight: torch.Tensor  # (C,)
    odd: str
    calls: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1:
            raise Wrong(
                f"a layer calls {self.name} twice. Each call of attend writes keys and values into "
                "the cache."
            )
        return self.of(x)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        part = torch.tanh(self.weight.to(x) * x.roll(1, -1))
        if self.odd == "zeros":
            part.zero_()
        elif self.odd:
            part[0, 0, 0] = torch.nan
        return part


def layers(trial: Trial, n: int) -> list[Case]:
    """Any shape; a step of one row, late; both types in turn; odd ranks. On many ranks the odd."""
    draw = trial.draw
    shape = draw.randrange(2, 5), draw.randrange(2, 12), draw.randrange(2, 70)
    row = draw.randrange(17, 80), 1, draw.randrange(2, 40)
    options = [(shape, {}), (row, {"late": n in (2, 3)}), (shape, {"calls": 4})]
    if n > 1:
        options += [(shape, {"odd": "zeros"}), (row, {"odd": "one number NaN"})]
    options = options[3:] if n > 3 else options
    return [Case(sizes, draw.choice(BOTH), trial.new_seed(), **more) for sizes, more in options]


def layer_inputs(case: Case, rank: int, n: int, call: int) -> tuple[torch.Tensor, Part, Part]:
    """x, attend, mlp."""
    odd = case.odd * (rank == n - 1)
    weights = fractions(case.seed + 7 * rank + 1, 2, case.shape[-1])
    return case.numbers(-2, n, call), Part("attend", weights[0], odd), Part("mlp", weights[1], odd)


def layer_right(case: Case, given: list, rank: int) -> torch.Tensor:
    x = given[0][0].double()
    for part in (1, 2):
        x = x + sum(own[part].of(x) for own in given)
    return x


def two_sums(where: str, case: Case, calls: list[Call]) -> None:
    """Two all-reduces of x; one rank alone may do without."""
    for rank, call in enumerate(calls):
        if len(calls) > 1 or call.events:
            communication(
                f"{where}, rank {rank}", call.events, {"all_reduce": [call.given[0].nbytes] * 2},
                "One sum for attention, one for the MLP, for all ranks: two all-reduces.",
            )


def looks_like(attend: str, mlp: str) -> Callable[[Seen], bool]:
    """Whether a result is what a layer makes that adds the ranks' parts in these ways."""

    def test(seen: Seen) -> bool:
        before = x = seen.own[0].double()
        for number, way in ((1, attend), (2, mlp)):
            parts = [call.given[number].of(x) for call in seen.calls]
            beside = [call.given[number].of(before) for call in seen.calls]
            x = x + {
                "sum": sum(parts), "own": parts[seen.rank], "mean": sum(parts) / seen.size,
                "beside": sum(beside), "with x": sum(parts) + (seen.size - 1) * x,
            }[way]
        return seen.size > 1 and alike(seen.result, x, slack=256)

    return test


HANG = "Does every rank obey every command, and call the same collectives, in this order?"
LAYER = Contract(
    "layer", layer_inputs, layer_right, cases=layers, sizes=(2, 3, 1, 6), same_bits=True,
    result="x after the layer", messages=two_sums, hang=HANG,
    library=("utils", "utils.parallel", "torch.distributed.tensor"),
    symptoms=[
        (lambda seen: any(event.asynchronous for event in seen.calls[seen.rank].events),
         "Some calls are asynchronous: is each waited for before its result is read?"),
        (looks_like("own", "own"), "These are this rank's own parts: the ranks' are to be added "
         "up."),
        (looks_like("sum", "own"), "The parts of the MLP are not added up."),
        (looks_like("own", "sum"), "The parts of attention are not added up."),
        (looks_like("mean", "mean"), "These are the means of the parts, and their sums are to be "
         "added."),
        (looks_like("with x", "with x"), "x, which all ranks have whole, is added up with the "
         "parts."),
        (looks_like("sum", "beside"), "The MLP is given x without what attention has added to it."),
        (lambda seen: True, "x + the sum of all ranks' attend(x); then that + the sum of their "
         "mlp(of that)."),
    ],
)

# ---- c: the loop of a rank

ANSWER = 5.0  # seconds in which a command must have been answered
# a command, and what comes of it: tokens, a ValueError's words, or None: another rank has gone
Story = list[tuple[dict, list[int] | str | None]]


class Gone(RuntimeError):
    """What a shard raises when it is no client's fault."""


class Shard:
    """A shard that says what the story says, and notes what it is asked."""

    def __init__(self, story: Story):
        self.story, self.asked = story, []

    def prefill(self, slot, tokens):
        return self._answer({"do": "prefill", "slot": slot, "tokens": list(tokens)})[0]

    def decode(self, slots, tokens):
        return self._answer({"do": "decode", "slots": list(slots), "tokens": list(tokens)})

    def _answer(self, command):
        said = self.story[min(len(self.asked), len(self.story) - 1)][1]
        self.asked.append(command)
        if said is None:
            raise Gone("the other ranks have gone")
        if isinstance(said, str):
            raise ValueError(said)
        return list(said)


class Pipe(io.TextIOBase):
    """A rank's commands and answers. On rank 0 a command comes when the one before has its line."""

    def __init__(self, commands: list[dict], waits: bool):
        self.commands, self.waits, self.read_lines = commands, waits, 0
        self.buffer, self.said, self.pushed = "", "", threading.Condition()

    def readline(self, size=-1):
        with self.pushed:
            number, self.read_lines = self.read_lines, self.read_lines + 1
            lines = number * self.waits
            if not self.pushed.wait_for(lambda: self.said.count("\n") >= lines, ANSWER):
                raise Wrong(
                    f"command {number}, {short(self.commands[number - 1])}, has no answer.\nFor "
                    "each command rank 0 writes one line to `answers`, and pushes it out of the "
                    "buffer: flush."
                )
        return "".join(f"{json.dumps(one)}\n" for one in self.commands[number : number + 1])

    def write(self, text):
        self.buffer += text
        return len(text)

    def flush(self):
        with self.pushed:
            self.said, self.buffer = self.said + self.buffer, ""
            self.pushed.notify_all()


def a_story(draw: random.Random) -> Story:
    """Commands, some of them refused; then one in which another rank has gone, and two more."""
    story = []
    for number in range(draw.randrange(120, 160)):
        slots = draw.sample(range(40), draw.randrange(1, 33))
        tokens = [draw.randrange(50_000) for _ in slots]
        command = {"do": "decode", "slots": slots, "tokens": tokens}
        if number % 3 == 0:
            command, slots = {"do": "prefill", "slot": slots[0], "tokens": tokens}, slots[:1]
        said = [draw.randrange(10**6) for _ in slots]
        refused = 'of a "bad" request\nit says: {1}', f"tøken {number} is not ok"
        story.append((command, draw.choice([said] * 9 + [draw.choice(refused)])))
    story[-3] = (story[-3][0], None)
    return story


def obey(answer, story: Story) -> None:
    """On a rank: `loop` with a story. Raises Wrong."""
    rank, shard, last = dist.get_rank(), Shard(story), len(story) - 3
    pipe = Pipe([command for command, _ in story], waits=rank == 0)
    with Look() as look, suppress(Gone):
        answer.loop(shard, pipe, pipe, rank)
    for number, (got, (command, _)) in enumerate(zip(shard.asked, story), start=1):
        if got != command:
            raise Wrong(
                f"command {number} is {short(command)}, and the shard was asked for {short(got)}."
            )
    obeyed, lines = len(shard.asked), pipe.said.splitlines()
    for wrong, words in (
        (obeyed <= last, f"command {obeyed + 1}, {short(story[min(obeyed, last)][0])}, was not "
         "obeyed."),
        (obeyed > last + 1, "the shard has raised RuntimeError (another rank has gone), and the "
         "loop goes on.\nA ValueError is a client's fault; any other exception ends the loop, and "
         "the leader will notice."),
        (look.events, f"{len(look.events)} messages outside of the layers. The commands come by "
         "pipe, to every rank: nothing else\nneeds to be said."),
        (rank and lines, f"this rank answers too: {short(''.join(lines[:1]))}\nAll ranks have the "
         "same tokens, and the leader wants them once, from rank 0."),
    ):
        if wrong:
            raise Wrong(words)
    for number, (line, (command, said)) in enumerate(zip(lines, story[:last]), start=1):
        here = f"the answer to command {number}, {short(command)}, is {short(line)}"
        try:
            reply = json.loads(line)
            tokens, error = reply.get("tokens"), reply.get("error")
        except (ValueError, AttributeError):
            raise Wrong(f"{here}: no JSON object.") from None
        if isinstance(said, str) and said not in str(error):
            raise Wrong(
                f"{here}, and the shard has raised ValueError: {said}.\nThe client should be told "
                'what the shard said: {"error": its text}.'
            )
        if not isinstance(said, str) and (error is not None or tokens != said):
            raise Wrong(f"{here}, and the shard's tokens are {short(said)}.")
    if len(lines) > last + 1 or "tokens" in "".join(lines[last:]):
        raise Wrong(f"there are {len(lines)} lines for {last} commands and one that failed.")


def short(value: Any) -> str:
    """A text, or another value as JSON, that may be long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 70 else text[:67] + "…"


def rank(trial: Trial) -> str:
    """Judges `layer` and `loop`."""
    trial.forbid(LAYER.library)
    for group in trial.groups(LAYER.sizes, HANG):
        LAYER.kept_by(trial, group)
        if group.size <= 3:
            story = a_story(trial.draw)
            group.run(group.case(f"{len(story)} commands"), obey, story, seconds=SECONDS)
    seen = (
        "attention and MLP are added up on 1, 2, 3 and 6 ranks, in fp32 and fp64, also where one\n"
        "adds nothing or NaN, and when messages come late: two all-reduces of x a layer, no more;\n"
        "nothing is kept; rank 0 alone answers, each command once, in order, bad requests too;\n"
    )
    if server_available():
        return f"{seen}{NO_SERVER}"
    served.right_ranks(trial.path)
    return (
        f"{seen}in a real server two ranks have the whole model's tokens, and no rank stays when\n"
        "the leader is killed."
    )


# ---- d: continuous batching


@dataclass(frozen=True)
class Visit:
    """A request: how many tokens it wants, and after how many its text ends; the step in which it
    comes, and after how many more its client goes (None: never); bad: its prompt is refused."""

    wants: int
    ends: int | None = None
    after: int = 0
    goes: int | None = None
    bad: bool = False


class Guest(leader.Request):
    """A request that notices what is done with it."""

    def __init__(self, table: "Table", number: int, visit: Visit):
        super().__init__([number], visit.wants, self)
        self.table, self.number, self.visit, self.slot, self.added = table, number, visit, None, 0

    def __repr__(self):
        return f"request {self.number}{' (over)' * self.over}"

    def send(self, token):
        """It is its own client."""

    def begin(self, model, slot):
        self.table.expect(
            (model is not self.table, f"{self} is begun with another table's model."),
            (self.slot is not None, f"{self} is begun again: its prompt was read already."),
            (self.over, f"{self} had gone while it waited, and is begun all the same."),
        )
        self.slot = slot
        self.table.begun.append(self)
        super().begin(model, slot)

    def add(self, token):
        right = self.table.token(self.number, len(self.out))
        self.table.expect(
            (self.over, f"{self} is over and gets one more token."),
            (token != right, f"{self} in slot {self.slot} gets the token {described(token)}, and "
             f"{right} is its own.\nDo the tokens go to the slots that they came from, each once?"),
        )
        self.added += 1
        super().add(token)


class Table:
    """Requests that come and go at the slots of a model, which this object plays as well."""

    def __init__(self, slots: int, come: list[Visit]):
        self.slots, self.waiting, self.running, self.now = slots, deque(), {}, 0
        self.guests = [Guest(self, number, visit) for number, visit in enumerate(come)]
        self.coming = deque(sorted(self.guests, key=lambda guest: guest.visit.after))
        self.begun, self.decodes, self.idle = [], 0, 0
        self.told = f"slots {slots}, {come}"

    def expect(self, *wrong: tuple[Any, str]) -> None:
        """The first that is true is told."""
        for what, words in wrong:
            if what:
                raise Wrong(f"{self.told}, step {self.now}: {words}")

    @property
    def done(self) -> bool:
        return self.idle > 0 and not self.waiting and not self.running

    def token(self, number: int, count: int) -> int:
        """The token of a request that follows `count` others."""
        ended = count == self.guests[number].visit.ends
        return leader.END if ended else 1 + 100 * number + count

    def prefill(self, slot, tokens):
        if self.guests[tokens[0]].visit.bad:
            raise ValueError(f"token {tokens[0]} is not in the vocabulary")
        return self.token(tokens[0], 0)

    def decode(self, slots, last):
        slots, last, self.decodes = list(slots), list(last), self.decodes + 1
        guests = [self.running[slot] for slot in slots]
        over = [guest for guest in guests if guest.over]
        self.expect(
            (self.decodes > 1, "a second decode in the same step. Give all running slots to one "
             "call: the weights are read once for all."),
            (not slots, "a decode of no slots. Where nobody runs, nothing is to be called."),
            (over, f"a decode for {over[:1]}, which is over: it leaves before the next decode."),
            (last != [guest.last for guest in guests], f"the slots {slots} are decoded after the "
             f"tokens {last}, and {[guest.last for guest in guests]} are their last ones."),
        )
        return [self.token(guest.number, len(guest.out)) for guest in guests]

    def step(self, answer) -> None:
        """Who has come, and who has gone; then one step of the answer, and what it has done."""
        while self.coming and self.coming[0].visit.after <= self.now:
            self.waiting.append(self.coming.popleft())
        for guest in self.guests:
            goes, guest.added = guest.visit.goes, 0
            if goes is not None and self.now >= guest.visit.after + goes and not guest.complete:
                guest.cancelled = True
        ran = [guest for guest in self.running.values() if not guest.over]
        over = [guest for guest in self.running.values() if guest.over]
        there = [guest for guest in self.waiting if not guest.over]
        self.decodes, self.begun = 0, []
        self.leaves_and_joins(answer, there)
        answer.step(self.waiting, self.running, self.slots, self)
        begun, first = self.begun, there[: len(self.begun)]
        unfed = [guest for guest in ran if guest.added != 1]
        free = min(self.slots - len(ran), len(there)) - len(begun)
        held = {guest.slot: guest for guest in [*ran, *begun] if not guest.over}
        holds = {slot: guest for slot, guest in self.running.items() if not guest.over}
        self.idle += not self.coming and all(guest.over for guest in self.guests)
        self.expect(
            (unfed, f"{unfed[:1]} runs and does not get one token: everybody who runs takes part "
             "in each step."),
            ({*over} & {*self.running.values()}, f"one of {over} still holds a slot, and all were "
             "over before this step."),
            (free > 0, f"{free} of {self.slots} slots stay free, and as many of those who wait "
             "could run: who waits joins\nas soon as there is a slot."),
            ({*begun} != {*first}, f"{begun} were begun, and {first} have waited longer: the "
             "oldest of those who wait are the first to join."),
            ([guest for guest in self.waiting if not guest.over] != there[len(begun) :],
             "those who wait are not the ones who waited, less those who joined, in order."),
            (holds != held, f"`running` is {holds}, and {held} is right."),
            (self.idle > 3 and not self.done, "everybody is over, and somebody is still in the "
             "queue or holds a slot."),
        )
        self.now += 1

    def leaves_and_joins(self, answer, there: list[Guest]) -> None:
        """`leave` and `join` by themselves, of a copy."""
        running, waiting = dict(self.running), deque(self.waiting)
        right = {slot: guest for slot, guest in running.items() if not guest.over}
        answer.leave(running)
        self.expect(
            (running != right, f"leave({self.running}): running is then {running}, and {right} is "
             "right.\nWhoever is over, complete, failed or cancelled, leaves."),
        )
        before = f"join({[*waiting]}, {running}, {self.slots})"
        free = [slot for slot in range(self.slots) if slot not in running][: len(there)]
        right |= dict(zip(free, there))
        taken = answer.join(waiting, running, self.slots)
        taken = sorted(map(int, taken)) if isinstance(taken, Iterable) else taken
        rest = [guest for guest in waiting if not guest.over]
        self.expect(
            (running != right, f"{before}: running is then {running}, and {right} is right.\nThe "
             "oldest who wait get the lowest free slots: an engine that decodes all rows up to "
             "the highest in use has\nless to do then. Who has gone while it waited gets none: "
             "look at request.over."),
            (rest != there[len(free) :], f"{before}: {rest} wait then, and {there[len(free) :]} is "
             "right: who goes on waiting stays, in order."),
            (taken != free, f"{before}: it returns {taken}, and the slots just taken are {free}."),
        )


def play(answer, seed: int) -> None:
    """In a process: two tables, a step of each in turn."""

    def steps(example: list[tuple[int, list[Visit]]]) -> None:
        tables = [Table(*one) for one in example]
        while left := [table for table in tables if not table.done]:
            for table in left:
                table.step(answer)
        guests = [guest for table in tables for guest in table.guests]
        for guest in guests:
            asked, right = (guest.tokens, guest.max_tokens), ([guest.number], guest.visit.wants)
            guest.table.expect((asked != right, f"what {guest} asked for was changed."))
            guest.table = guest.answer = None  # no circle
        held = [weakref.ref(guest) for guest in guests]
        del tables, left, table, guests, guest
        if any(one() is not None for one in held):
            gc.collect()
        if any(one() is not None for one in held):
            raise Wrong("all is over, and somebody still holds a request. What for?")

    few, seldom, slots = st.integers(1, 6), st.none() | st.integers(0, 4), st.integers(1, 12)
    bad = st.sampled_from([False] * 4 + [True])
    visit = st.builds(Visit, few, st.none() | few, st.integers(0, 8), seldom, bad)
    table = st.tuples(slots, st.lists(visit, min_size=1, max_size=30))
    crowd = st.tuples(st.integers(9, 14), st.lists(st.builds(Visit, few), min_size=20))
    for_all(seed, st.lists(table | crowd, min_size=2, max_size=2), steps)


def batch(trial: Trial) -> str:
    """Judges `leave`, `join` and `step`."""
    trial.forbid(("utils", "utils.serving", "leader", "vllm"))
    trial.alone("in one process", play, trial.new_seed(), seconds=SECONDS)
    seen = (
        "drawn tables of 1 to 14 slots, two at a time: the oldest join as soon as a slot is free,\n"
        "the lowest; everybody who runs gets a token in each step, in one decode; who is over,\n"
        "complete, refused or gone, leaves; and nothing is kept;\n"
    )
    if server_available():
        return f"{seen}{NO_SERVER}"
    return seen + served.right_streams(trial.path)
