"""Given: what exercises 16a, 16c and 16d ask for, and how their check cells judge it.

Functions and tables run in processes of their own, for what is drawn. Then the real server gets the
files of c and d, where there is one (served.py, which the processes here do without).
"""

import json
import os
import random
import select
import threading
from collections import Counter, deque
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.deploy_to_triton.triton_model import leader
from utils.course.assertions import Wrong, alike, communication, described
from utils.course.contract import BOTH, Call, Case, Contract
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions

SECONDS = 10.0  # until an answer in one process counts as an endless loop

# ---- a: the configuration

TYPES = {"bool": "TYPE_BOOL", "string": "TYPE_STRING", "bfloat16": "TYPE_BF16"}
for name, bits in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64))):
    TYPES |= {f"{name}{n}": f"TYPE_{name.upper().replace('FLOAT', 'FP')}{n}" for n in bits}
# what a file may say, because it is so anyway
HARMLESS = {
    "version_policy.latest.num_versions": 1, "default_model_filename": "model.py",
    "model_transaction_policy": {},
}
HINTS = {
    "max_batch_size": "With more than 0 the server adds a dimension in front of all shapes, and "
    "the model must take batches.",
    "dims": "-1 stands for any number; the dimension of a batch is not among them.",
    "dynamic_batching": "It is on as soon as the word stands there, with a delay of 0 too; where "
    "model.delay is None, the server\nmust not hold requests back.",
    "model_transaction_policy": "A stream has one response for each token: decoupled. Where a "
    "request has exactly one, a decoupled model\nis refused to the clients that wait for it.",
    "instance_group": "Left out, or of KIND_GPU, there is one for each GPU. Two are two leaders, "
    "each with all ranks: one\nprocess group is one instance.",
}


def tensor(name: str, dtype: str, dims: list[int], optional: bool = False) -> SimpleNamespace:
    """An input or an output of a model."""
    return SimpleNamespace(name=name, dtype=dtype, dims=dims, optional=optional)


def the_labs(tp: int, slots: int = 4) -> SimpleNamespace:
    """The model of this lab on so many ranks; what its fields are stands in config.py."""
    ids, arrival = tensor("input_ids", "int32", [-1]), tensor("arrival", "int32", [2], True)
    return SimpleNamespace(
        name="lab", inputs=[ids, tensor("max_tokens", "int32", [1], True), arrival],
        outputs=[tensor("output_ids", "int32", [-1])], max_batch=0, delay=None, streams=True,
        instances=1, device="model", parameters={"tp": tp, "slots": slots},
    )


def models() -> st.SearchStrategy:
    """Any model."""
    names = st.builds("{}_{}".format, st.sampled_from(["x", "key.value", "mask:0"]), st.integers(0))
    dims = st.lists(st.just(-1) | st.integers(1, 10**10), min_size=1)
    text = st.text("ab '\"\\")

    def tensors(optional: st.SearchStrategy) -> st.SearchStrategy:
        one = st.builds(tensor, names, st.sampled_from(sorted(TYPES)), dims, optional)
        return st.lists(one, min_size=1, max_size=5, unique_by=lambda tensor: tensor.name)

    def model(max_batch: int, delay: int | None, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(max_batch=max_batch, delay=delay if max_batch else None, **given)

    keys = st.sampled_from(["tp", "slots", "seconds", "stop", "a key", "k/v"])
    return st.builds(
        model, st.sampled_from([0, 1, 8, 500]), st.none() | st.sampled_from([0, 500]),
        name=st.sampled_from(["a_model", "another"]), inputs=tensors(st.booleans()),
        outputs=tensors(st.just(False)), streams=st.booleans(), instances=st.integers(1, 4),
        device=st.sampled_from(["model", "cpu", "gpu"]),
        parameters=st.dictionaries(keys, st.integers() | st.floats(0, 1) | text),
    )


def config(trial: Trial) -> str:
    """Judges `config`."""
    trial.forbid(("utils",))
    labs = the_labs(trial.draw.randrange(2, 9), trial.draw.randrange(5, 99))
    trial.alone("in one process", configs, labs, trial.new_seed(), seconds=SECONDS)
    return (
        "of drawn models the parser reads names, types, dims, batches, instances, responses\n"
        "and parameters as they are, and nothing else; no model was changed."
    )


def configs(answer, labs: SimpleNamespace, seed: int) -> None:
    """In a process: the lab's model, and any others."""

    def fits(model: SimpleNamespace) -> None:
        before = deepcopy(model)
        text = answer.config(model)
        if not isinstance(text, str):
            raise Wrong(f"config returns {described(text)}, not the text of the file.")
        if model != before:
            raise Wrong("config changes the model, and its owner still needs it.")
        found, right = read(text), wanted(model)
        harmless = HARMLESS | {"name": model.name}
        for key in {**right, **found}:
            got, asked = found.get(key), right.get(key)
            spare = asked is None and (key.startswith("parameters") or got == harmless.get(key))
            if got != asked and not spare:
                words = ["none" if value is None else repr(value) for value in (got, asked)]
                hint = next((HINTS[part] for part in HINTS if part in key), "")
                raise Wrong(
                    f"model “{model.name}”: {key} is {words[0]}, and {words[1]} is right.\n{hint}"
                )

    fits(labs)
    for_all(seed, models(), fits, examples=60)


def wanted(model: SimpleNamespace) -> dict[str, Any]:
    """What a file must say, field by field; what is left out is Triton's default."""
    from tritonclient.grpc import model_config_pb2 as pb

    right = pb.ModelConfig(backend="python", max_batch_size=model.max_batch)
    for field, tensors in ((right.input, model.inputs), (right.output, model.outputs)):
        for one in tensors:
            optional = {"optional": True} if one.optional else {}
            field.add(name=one.name, data_type=TYPES[one.dtype], dims=one.dims, **optional)
    if model.delay is not None:
        right.dynamic_batching.SetInParent()
        right.dynamic_batching.max_queue_delay_microseconds = model.delay
    if model.streams:
        right.model_transaction_policy.decoupled = True
    right.instance_group.add(kind=f"KIND_{model.device.upper()}", count=model.instances)
    for key, value in model.parameters.items():
        right.parameters[key].string_value = str(value)
    return fields(right)


def read(text: str) -> dict[str, Any]:
    """The same, read out of a text by Triton's parser. Raises Wrong with its words."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return fields(text_format.Parse(text, ModelConfig()))
    except text_format.ParseError as error:
        raise Wrong(f"Triton cannot read the text: {error}\n{text[:400]}") from None


def fields(message: Any) -> dict[str, Any]:
    """{"input.ids.data_type": "TYPE_INT32", …}, in whatever order and groups they stand."""
    from google.protobuf.json_format import MessageToDict

    said = MessageToDict(message, preserving_proto_field_name=True)
    for kind in ("input", "output"):
        said[kind] = {one.pop("name", ""): one for one in said.get(kind, [])}
    groups = Counter()
    for group in said.pop("instance_group", []):
        groups[group.pop("kind", "KIND_AUTO")] += group.pop("count", 1)
        groups.update(group.keys() - {"name"})

    def flat(place: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {place: value}
        parts = [flat(f"{place}.{name}".lstrip("."), part) for name, part in value.items()]
        return {key: value for part in parts for key, value in part.items()}

    return flat("", said | {"instance_group": dict(groups)} if groups else said)


# ---- c: a layer of a rank


@dataclass(frozen=True)
class Part:
    """What a rank's attention or MLP adds to x: no linear function of it."""

    weight: torch.Tensor  # (C,)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C)."""
        return torch.tanh(self.weight.to(x) * x.roll(1, -1))


def layers(trial: Trial, n: int) -> list[Case]:
    """Any shape; a step of one row, late."""
    draw = trial.draw
    shape = draw.randrange(2, 5), draw.randrange(2, 12), draw.randrange(2, 70)
    row = draw.randrange(17, 80), 1, draw.randrange(2, 40)
    return [
        Case(shape, draw.choice(BOTH), trial.new_seed()),
        Case(row, draw.choice(BOTH), trial.new_seed(), late=True),
    ]


def layer_inputs(case: Case, rank: int, n: int, call: int) -> tuple[torch.Tensor, Part, Part]:
    """x, attend, mlp."""
    weights = fractions(case.seed + 7 * rank + 1, 2, case.shape[-1])
    return case.numbers(-2, n, call), *map(Part, weights)


def layer_right(case: Case, given: list, rank: int) -> torch.Tensor:
    x = given[0][0].double()
    for part in (1, 2):
        x = x + sum(own[part](x) for own in given)
    return x


def two_sums(where: str, case: Case, calls: list[Call]) -> None:
    """Two all-reduces of x."""
    for rank, call in enumerate(calls):
        communication(
            f"{where}, rank {rank}", call.events, {"all_reduce": [call.given[0].nbytes] * 2},
            "One sum for attention, one for the MLP, for all ranks: two all-reduces.",
        )


HANG = "Does every rank obey every command, and call the same collectives, in this order?"
LAYER = Contract(
    "layer", layer_inputs, layer_right, cases=layers, sizes=(2, 3), same_bits=True,
    result="x after the layer", messages=two_sums, hang=HANG,
    library=("utils", "torch.distributed.tensor"),
    symptoms=[
        (lambda seen: any(event.asynchronous for event in seen.calls[seen.rank].events),
         "Some calls are asynchronous: is each waited for before its result is read?"),
        (lambda seen: alike(seen.result, layer_right(None, [seen.own], 0), 256),
         "These are this rank's own parts: the ranks' are to be added up."),
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


def a_story(draw: random.Random, gone: bool) -> Story:
    """Commands, some of them refused; gone: in the last but one another rank has gone."""
    story = []
    for number in range(30):
        slots = draw.sample(range(40), draw.randrange(1, 9))
        tokens = [draw.randrange(50_000) for _ in slots]
        command = {"do": "decode", "slots": slots, "tokens": tokens}
        if number % 3 == 0:
            command, slots = {"do": "prefill", "slot": slots[0], "tokens": tokens}, slots[:1]
        said = [draw.randrange(10**6) for _ in slots]
        refused = f'the token {tokens[0]} is no "word"'
        story.append((command, draw.choice([said] * 4 + [refused])))
    if gone:
        story[-2] = (story[-2][0], None)
    return story


def obey(answer, story: Story) -> None:
    """On a rank: `loop` with a story, at pipes whose other ends a thread has. Raises Wrong."""
    rank, asked, lines, unanswered = dist.get_rank(), [], [], []
    (commands, to), (of, answers) = os.pipe(), os.pipe()

    def says(**command):
        _, said = story[min(len(asked), len(story) - 1)]
        asked.append(command)
        if said is None:
            raise Gone("the other ranks have gone")
        if isinstance(said, str):
            raise ValueError(said)
        return list(said)

    def lead():
        with open(of) as heard:
            with suppress(BrokenPipeError), open(to, "w") as told:
                for command, _ in story:
                    print(json.dumps(command), file=told, flush=True)
                    if rank == 0:
                        if not select.select([heard], [], [], ANSWER)[0]:
                            unanswered.append(command)
                            break
                        lines.append(heard.readline())
            lines.extend(heard)

    shard = SimpleNamespace(
        prefill=lambda slot, tokens: says(do="prefill", slot=slot, tokens=tokens)[0],
        decode=lambda slots, tokens: says(do="decode", slots=slots, tokens=tokens),
    )
    thread = threading.Thread(target=lead, daemon=True)
    thread.start()
    with open(commands) as heard, open(answers, "w") as told, suppress(Gone):
        answer.loop(shard, heard, told, rank)
    thread.join(ANSWER)
    last = next((n for n, (_, said) in enumerate(story) if said is None), len(story) - 1)
    wanted = [command for command, _ in story[: last + 1]]
    same = next((n for n, pair in enumerate(zip(asked, wanted)) if pair[0] != pair[1]), len(asked))
    for wrong, words in (
        (unanswered, f"{unanswered[:1]} has no answer.\nFor each command rank 0 writes one line to "
         "`answers`, and pushes it out of the buffer: flush."),
        (len(asked) > last + 1, "the shard has raised RuntimeError (another rank has gone), and "
         "the loop goes on.\nA ValueError is a client's fault; any other exception ends the loop, "
         "and the leader will notice."),
        (asked != wanted, f"command {same + 1} is {wanted[same:][:1]}, and the shard was asked for "
         f"{asked[same:][:1]}."),
        (rank and lines, f"this rank answers too: {lines[:1]}\nAll ranks have the same tokens, and "
         "the leader wants them once, from rank 0."),
    ):
        if wrong:
            raise Wrong(words)
    for line, (command, said) in zip(lines, story):
        if said is None:
            break
        reply = json.loads(line)
        if isinstance(said, str):
            right = said in str(reply.get("error"))
        else:
            right = reply.get("tokens") == said and not reply.get("error")
        if not right:
            raise Wrong(f"the answer to {command} is {line}\nand what the shard said is {said!r}.")


def rank(trial: Trial) -> str:
    """Judges `layer` and `loop`."""
    trial.forbid(LAYER.library)
    for group in trial.groups(LAYER.sizes, HANG):
        LAYER.kept_by(trial, group)
        story = a_story(trial.draw, gone=group.size == 2)
        group.run(group.case(f"{len(story)} commands"), obey, story)
    from labs.support.deploy_to_triton import served

    return (
        "attention and MLP are added up on 2 and 3 ranks, in fp32 or fp64, also when messages\n"
        "come late: two all-reduces of x a layer, no more; rank 0 alone answers, each command\n"
        "once, in order, bad requests too; the loop ends with its pipe, or when a rank has gone;\n"
        f"{served.right_ranks(trial.path)}"
    )


# ---- d: continuous batching


@dataclass(frozen=True)
class Visit:
    """A request: how many tokens it wants; the step in which it comes, and after how many more its
    client goes (None: never); bad: its prompt is refused."""

    wants: int
    after: int = 0
    goes: int | None = None
    bad: bool = False


class Guest(leader.Request):
    """A request with a name; it is its own client."""

    def __init__(self, number: int, visit: Visit):
        super().__init__([number], visit.wants, self)
        self.number, self.visit, self.slot = number, visit, None

    def __repr__(self):
        return f"request {self.number}{' (over)' * self.over}"

    def send(self, token):
        """It looks at `out`."""


class Table:
    """Requests that come and go at the slots of a model, which this object plays as well."""

    def __init__(self, slots: int, come: list[Visit]):
        self.slots, self.waiting, self.running, self.now = slots, deque(), {}, 0
        self.guests = [Guest(number, visit) for number, visit in enumerate(come)]
        self.begun, self.decodes = [], 0
        self.told = f"slots {slots}, {come}"

    def expect(self, *wrong: tuple[Any, str]) -> None:
        """The first that is true is told."""
        for what, words in wrong:
            if what:
                raise Wrong(f"{self.told}, step {self.now}: {words}")

    def prefill(self, slot, tokens):
        guest = self.guests[tokens[0]]
        self.expect(
            (guest.slot is not None, f"{guest} is begun again: its prompt was read already."),
            (guest.over, f"{guest} had gone while it waited, and is begun all the same."),
        )
        guest.slot = slot
        self.begun.append(guest)
        if guest.visit.bad:
            raise ValueError(f"token {tokens[0]} is not in the vocabulary")
        return self.tokens(guest, 1)[0]

    def tokens(self, guest: Guest, count: int) -> list[int]:
        """Its first tokens."""
        return [1 + 100 * guest.number + number for number in range(count)]

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
        return [self.tokens(guest, len(guest.out) + 1)[-1] for guest in guests]

    def play(self, answer) -> None:
        """Steps of the answer, and some more when everybody is over."""
        idle = 0
        while idle < 4:
            self.step(answer)
            idle += all(guest.over for guest in self.guests)
        self.expect((self.waiting or self.running, "everybody is over, and somebody is still in "
                     "the queue or holds a slot."))

    def step(self, answer) -> None:
        """Who has come, and who has gone; then one step of the answer, and what it has done."""
        self.waiting.extend(guest for guest in self.guests if guest.visit.after == self.now)
        for guest in [*self.waiting, *self.running.values()]:
            goes = guest.visit.goes
            guest.cancelled = goes is not None and self.now >= guest.visit.after + goes
        ran = {guest: len(guest.out) for guest in self.running.values() if not guest.over}
        there = [guest for guest in self.waiting if not guest.over]
        self.decodes, self.begun = 0, []
        self.leaves_and_joins(answer, there)
        answer.step(self.waiting, self.running, self.slots, self)
        mixed = [guest for guest in self.guests if guest.out != self.tokens(guest, len(guest.out))]
        unfed = [guest for guest, count in ran.items() if len(guest.out) != count + 1]
        free = min(self.slots - len(ran), len(there)) - len(self.begun)
        wait = [guest for guest in self.waiting if not guest.over]
        held = {guest.slot: guest for guest in [*ran, *self.begun] if not guest.over}
        holds = {slot: guest for slot, guest in self.running.items() if not guest.over}
        self.expect(
            (mixed, f"{mixed[:1]} has got the tokens {[guest.out for guest in mixed][:1]}, not "
             "its own.\nDo the tokens go to the slots that they came from, each once?"),
            (unfed, f"{unfed[:1]} runs and does not get one token: everybody who runs takes part "
             "in each step."),
            (free > 0, f"{free} of {self.slots} slots stay free, and as many of those who wait "
             "could run: who waits joins\nas soon as there is a slot."),
            (wait != there[len(self.begun) :], f"{wait} wait then, and of {there} the oldest "
             f"{len(self.begun)} should have joined."),
            (holds != held, f"`running` is {holds}, and {held} is right."),
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
        free = [slot for slot in range(self.slots) if slot not in running][: len(there)]
        right |= dict(zip(free, there))
        taken = sorted(answer.join(waiting, running, self.slots))
        rest = [guest for guest in waiting if not guest.over]
        before = f"join of {there}"
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
    """In a process: drawn tables."""
    few, seldom = st.integers(1, 6), st.none() | st.integers(0, 4)
    bad = st.sampled_from([False] * 4 + [True])
    visit = st.builds(Visit, few, st.integers(0, 8), seldom, bad)
    tables = st.tuples(st.integers(1, 12), st.lists(visit, min_size=1, max_size=20))
    for_all(seed, tables, lambda drawn: Table(*drawn).play(answer))


def batch(trial: Trial) -> str:
    """Judges `leave`, `join` and `step`."""
    trial.forbid(("utils", "leader", "vllm"))
    trial.alone("in one process", play, trial.new_seed(), seconds=SECONDS)
    from labs.support.deploy_to_triton import served

    return (
        "drawn tables of 1 to 12 slots: the oldest join as soon as a slot is free, the lowest;\n"
        "everybody who runs gets a token in each step, in one decode; who is over, complete,\n"
        f"refused or gone, leaves;\n{served.right_streams(trial.path)}"
    )
