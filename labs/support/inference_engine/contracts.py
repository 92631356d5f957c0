"""Given: what the exercises of lab 16 ask for, and how their check cells judge it.

Functions and classes run in processes of their own, for what is drawn. Then a and b are part of a
real engine (streams.py), in processes of this machine.
"""

import json
import os
import random
import select
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.inference_engine import leader, streams
from labs.support.inference_engine.model_shard import Shard
from utils.course.assertions import Wrong, alike, communication
from utils.course.contract import BOTH, Call, Case, Contract
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions

SECONDS = 10.0  # until an answer in one process counts as an endless loop
CLOCK = 150.0  # seconds by the clock, for one that waits for real streams

# ---- a: a layer of a rank


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

# ---- a: the loop of a rank

ANSWER = 5.0  # seconds in which a command must have been answered
TOKENS = 12  # that ranks of models/small say
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


def the_small_models_story() -> Story:
    """A prompt, and token after token of what the whole model says."""
    said = streams.right(0, TOKENS)
    decodes = [({"do": "decode", "slots": [0], "tokens": [one]}, [n]) for one, n in pairwise(said)]
    prompt = {"do": "prefill", "slot": 0, "tokens": list(streams.prompt(0))}
    return [(prompt, [said[0]]), *decodes]


def serve(answer, story: Story) -> None:
    """On a rank: `loop` with its shard of models/small, `layer` in it. Raises Wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    obey(answer, story, Shard(streams.CHECKPOINT, rank, size, layer=answer.layer))


def obey(answer, story: Story, model: Shard | None = None) -> None:
    """On a rank: `loop` with a story, at pipes whose other ends a thread has. Raises Wrong.
    model: what the commands are for; None: it says what the story says."""
    rank, asked, lines, unanswered = dist.get_rank(), [], [], []
    (commands, to), (of, answers) = os.pipe(), os.pipe()

    def says(**command):
        _, said = story[min(len(asked), len(story) - 1)]
        asked.append(command)
        if model and "slot" in command:
            return [model.prefill(command["slot"], command["tokens"])]
        if model:
            return model.decode(command["slots"], command["tokens"])
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
            raise Wrong(f"the answer to {command} is {line}\nand {said!r} is right.")


def rank(trial: Trial) -> str:
    """Judges `layer` and `loop`."""
    trial.forbid(LAYER.library)
    for group in trial.groups(LAYER.sizes, HANG):
        LAYER.kept_by(trial, group)
        story = a_story(trial.draw, gone=group.size == 2)
        group.run(group.case(f"{len(story)} commands"), obey, story)
        if group.size == 2:
            group.run(group.case("models/small"), serve, the_small_models_story())
    return (
        "attention and MLP are summed over 2 and 3 ranks, in fp32 or fp64, also when messages\n"
        "are late: two all-reduces of x per layer, no more; rank 0 alone answers, each command\n"
        "once, in order, bad requests included; the loop ends with its pipe, or when a rank dies;\n"
        "two ranks have the whole model's tokens."
    )


# ---- b: continuous batching


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
    tokens, steps = trial.alone("six real streams", six, clock=CLOCK)
    streams.right_streams(tokens)
    slots, rows = streams.SLOTS, [len(step["slots"]) for step in steps]
    longest = max(count for _, count, _ in streams.STREAMS) - 1  # its first token: the prefill's
    if max(rows) < slots or len(rows) > longest + 2:
        raise Wrong(
            f"{len(tokens)} streams in {slots} slots take {len(rows)} decode steps of at most "
            f"{max(rows)} rows; {longest} will do, as many as the longest needs alone."
        )
    return (
        "of drawn requests the oldest joins 1 to 12 slots as soon as one is free, the lowest;\n"
        "every running request gets a token in each step, in one decode; requests that are over,\n"
        f"complete, refused or cancelled, leave; {len(tokens)} real streams in {slots} slots take "
        f"{len(rows)} decode steps, as\nmany as the longest alone, and each has the tokens that it "
        "has alone."
    )


def six(answer) -> tuple[list[list[int]], list[dict]]:
    """In a process: the six streams."""
    return streams.streamed(answer.step)
