"""Given: what runs on the checks' ranks and in their processes: the served parts, watched.

Exercise c: a layer whose two parts are drawn, and the loop of a rank at a pipe as the leader's,
with a shard of a drawn model or with one that computes nothing. Exercise d: the tables of
schedulers, with requests and a model that notice what is done with them, and a clock that counts
steps.
"""

import gc
import json
import random
import select
import socket
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.support.deploy_to_triton.triton_model.leader import END, Request
from utils.course.assertions import Wrong, described
from utils.course.observe import Look
from utils.course.runner import fractions


def collect_for(*held: weakref.ref) -> None:
    """Lets go of circles, if one of these objects is still there: it takes a fifth of a second."""
    if any(one() is not None for one in held):
        gc.collect()


def short(value) -> str:
    """A text, or another value as JSON, that may be long."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 70 else text[:67] + "…"


# ---- exercise c: a layer

ANSWER = 6.0  # seconds in which a command must have been obeyed


@dataclass(frozen=True)
class Parts:
    """x, and what the ranks add to it. odd: the rank whose parts are all `odd_value`."""

    shape: tuple[int, int, int]  # B, T, C
    dtype: torch.dtype
    seed: int
    turned: bool = False  # x is not contiguous
    odd: int | None = None
    odd_value: float = 0.0

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        odd = f", and parts of {self.odd_value} on rank {self.odd}" if self.odd is not None else ""
        turned = " that is not contiguous" * self.turned
        return f"x of shape {self.shape} in {kind}{turned}{odd}"

    @property
    def bytes(self) -> int:
        """Of x."""
        B, T, C = self.shape
        return B * T * C * torch.finfo(self.dtype).bits // 8

    def x(self) -> torch.Tensor:
        x = fractions(self.seed, *self.shape, dtype=self.dtype)
        return x.transpose(0, 1).contiguous().transpose(0, 1) if self.turned else x

    def part(self, which: int, rank: int, x: torch.Tensor) -> torch.Tensor:
        """What a rank's attention (0) or MLP (1) adds to x: no linear function of it."""
        weight = fractions(self.seed + 10 * rank + which + 1, self.shape[-1]).to(x)
        part = torch.tanh(weight * x.roll(1, -1)).contiguous()
        return torch.full_like(part, self.odd_value) if rank == self.odd else part


def put_together(answer, cases: list[Parts]) -> list[dict]:
    """On a rank: `layer` for each case, one after the other."""
    rank, looks, found = dist.get_rank(), [], []
    everybody = dist.group.WORLD.group_name
    for case in cases:
        x, called = case.x(), []

        def attend(x, case=case, called=called):
            called.append("attend")
            return case.part(0, rank, x)

        def mlp(x, case=case, called=called):
            called.append("mlp")
            return case.part(1, rank, x)

        with torch.inference_mode(), Look(x=x) as look:
            y = answer.layer(x, attend, mlp)
        if called != ["attend", "mlp"]:
            raise Wrong(
                f"{case}: a layer calls {', '.join(called) or 'nothing'}; attend once, then mlp "
                "once.\n(Each call of attend writes keys and values into the cache.)"
            )
        y = y.clone() if isinstance(y, torch.Tensor) else y
        found.append({"y": y, "events": look.events, "changed": look.changed()})
        found[-1]["groups"] = {event.group for event in look.events} - {everybody}
        looks.append(look)
        del x, y, attend, mlp
    for result, look in zip(found, looks):
        result["kept"] = look.kept()
    return found


# ---- exercise c: a loop


@dataclass(frozen=True)
class Served:
    """A model in a folder, and the commands of a leader: {"do": …}, and whether a step comes of it.

    at_once: the commands lie in the pipe from the beginning; else each comes when the one before
    was obeyed. late: the rank that gets each of them a moment later than the others.
    """

    folder: str
    what: str  # in words
    dtype: torch.dtype
    slots: int
    commands: tuple[tuple[dict, bool], ...]
    at_once: bool = False
    late: int = 0

    def __str__(self):
        return self.what


class Pipe(threading.Thread):
    """The leader's end of a rank's pipe: it writes the commands, and reads what comes back.

    obeyed(n): whether this rank has done with n commands, as far as the rank itself knows; None
    where the answers are counted.
    """

    def __init__(self, commands: list[str], at_once: bool, late: float, obeyed=None):
        super().__init__(daemon=True)
        self.lines, self.at_once, self.late, self.obeyed = commands, at_once, late, obeyed
        self.ours, self.theirs = socket.socketpair()
        self.commands = self.theirs.makefile("r", encoding="utf-8")
        self.answers = self.theirs.makefile("w", encoding="utf-8")
        self.said, self.missing = b"", None  # the number of a command that was not obeyed

    def run(self):
        with suppress(OSError):  # the rank's end is closed
            for number, line in enumerate(self.lines, start=1):
                time.sleep(self.late)
                self.ours.sendall(line.encode() + b"\n")
                if not self.at_once and not self.wait(number):
                    self.missing = number - 1
                    break
            self.ours.shutdown(socket.SHUT_WR)
            while self.read(ANSWER):
                pass

    def wait(self, number: int) -> bool:
        """Whether `number` commands were obeyed in time."""
        if self.obeyed:
            return self.obeyed(number)
        while self.said.count(b"\n") < number:
            if not self.read(ANSWER):
                return False
        return True

    def read(self, seconds: float) -> bool:
        """What has come; False: nothing, or the end."""
        if not select.select([self.ours], [], [], seconds)[0]:
            return False
        said = self.ours.recv(1 << 16)
        self.said += said
        return bool(said)

    def end(self):
        """The loop is over: its end of the pipe is closed, with whatever was not pushed out yet."""
        self.answers.close()
        self.theirs.shutdown(socket.SHUT_RDWR)  # whoever still reads is at the end
        self.theirs.close()
        self.join(ANSWER)
        self.ours.close()


class Obeyed:
    """What a shard was asked for and what came of it, in order."""

    def __init__(self):
        self.calls, self.changed = [], threading.Condition()

    def note(self, what, *given, **came):
        with self.changed:
            self.calls.append({"asked": (what, *given), **came})
            self.changed.notify()

    def there(self, number: int) -> bool:
        """Waits until so many calls were made."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.calls) >= number, ANSWER)


def watched(Shard, obeyed: Obeyed, look: Look):
    """A class of shards that write into `obeyed` what they do."""

    class Watched(Shard):
        def prefill(self, slot, tokens):
            return self.asked(super().prefill, "prefill", slot, tokens)

        def decode(self, slots, tokens):
            return self.asked(super().decode, "decode", slots, tokens)

        def asked(self, function, what, slots, tokens):
            first, self.made = len(look.events), None
            try:
                tokens_out = function(slots, tokens)
            except ValueError as error:
                obeyed.note(what, slots, tokens, error=str(error), events=(first, first))
                raise
            came = [tokens_out] if what == "prefill" else list(tokens_out)
            events = first, len(look.events)
            obeyed.note(what, slots, tokens, tokens=came, logits=self.made, events=events)
            return tokens_out

        def run(self, *step):
            logits = super().run(*step)
            self.made = logits.detach().clone()
            return logits

    return Watched


def obey(answer, cases: list[Served]) -> list[dict]:
    """On a rank: `loop` with a shard of each model, as start_rank.py calls it."""
    from labs.support.deploy_to_triton.triton_model.model_shard import Shard

    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for case in cases:
        obeyed, look = Obeyed(), Look()
        kind = watched(Shard, obeyed, look)
        shard = kind(case.folder, rank, size, case.slots, answer.layer, dtype=case.dtype)
        weights = sum(p.nbytes for p in shard.decoder.parameters())
        lines = [json.dumps(command) for command, _ in case.commands]
        result = at_pipe(answer, shard, lines, obeyed, look, case)
        held = weakref.ref(shard)
        del shard, kind
        collect_for(held)
        logits = [call.get("logits") for call in result["calls"]]  # kept by Watched
        result |= {"weights": weights, "peak": look.peak, "held": held() is not None}
        result["kept"] = look.kept(logits)
        for call in result["calls"]:
            first, last = call.pop("events")
            call["events"] = look.events[first:last]
        inside = sum(len(call["events"]) for call in result["calls"])
        result["outside"] = len(look.events) - inside
        found.append(result)
    return found


def at_pipe(answer, shard, lines: list[str], obeyed: Obeyed, look: Look, case) -> dict:
    """One loop, from its first command to its end."""
    rank = dist.get_rank()
    late = 0.002 if rank == case.late else 0.0
    pipe = Pipe(lines, case.at_once, late, obeyed.there if rank else None)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as nobody:
        pipe.start()
        try:
            with look:
                answer.loop(shard, pipe.commands, nobody if rank else pipe.answers, rank)
        except Gone:
            pass
        finally:
            pipe.end()
        nobody.seek(0)
        said = nobody.read() if rank else pipe.said.decode()
    return {"calls": obeyed.calls, "said": said, "missing": pipe.missing}


# ---- exercise c: a loop of many commands


class Gone(RuntimeError):
    """What a shard raises when it is no client's fault."""


@dataclass(frozen=True)
class Many:
    """Hundreds of commands for a shard that computes nothing. gone: the number of the one in which
    another rank has gone."""

    commands: tuple[tuple[dict, str], ...]  # with what a bad one is refused with, or ""
    gone: int
    at_once: bool = False
    late: int = 0

    def __str__(self):
        return f"{len(self.commands)} commands"


class Told:
    """A shard that says what it is told to say."""

    def __init__(self, case: Many, obeyed: Obeyed):
        self.case, self.obeyed = case, obeyed

    def prefill(self, slot, tokens):
        return self.answer("prefill", slot, tokens)[0]

    def decode(self, slots, tokens):
        return self.answer("decode", slots, tokens)

    def answer(self, what, slots, tokens):
        number = len(self.obeyed.calls)
        if number == self.case.gone:
            self.obeyed.note(what, slots, tokens, gone=True)
            raise Gone("the other ranks have gone")
        refused = self.case.commands[number][1] if number < len(self.case.commands) else ""
        if refused:
            self.obeyed.note(what, slots, tokens, error=refused)
            raise ValueError(refused)
        draw = random.Random(number)
        came = [draw.randrange(10**6) for _ in ([slots] if what == "prefill" else slots)]
        self.obeyed.note(what, slots, tokens, tokens=came)
        return list(came)


def obey_many(answer, case: Many) -> dict:
    """On a rank: `loop` with hundreds of commands, until another rank has gone."""
    obeyed, look = Obeyed(), Look()
    lines = [json.dumps(command) for command, _ in case.commands]
    before = sys.getallocatedblocks()
    result = at_pipe(answer, Told(case, obeyed), lines, obeyed, look, case)
    calls = json.dumps(obeyed.calls)  # one piece of memory, which shares nothing with the answer
    obeyed.calls.clear()
    pieces = sys.getallocatedblocks() - before
    if pieces > len(lines):  # json.dump leaves circles, for one
        gc.collect()
        pieces = sys.getallocatedblocks() - before
    return result | {"calls": json.loads(calls), "outside": len(look.events), "pieces": pieces}


# ---- exercise d: tables


@dataclass(frozen=True)
class Visit:
    """A request: its prompt (see `token_after`), how many tokens it wants, the step in which it
    comes, the one before which its client has gone (None: it stays)."""

    prompt: tuple[int, ...]
    tokens: int
    after: int = 0
    gone: int | None = None


@dataclass(frozen=True)
class Table:
    """Requests that come and go at the slots of a model; `what`: in words."""

    what: str
    slots: int
    visits: tuple[Visit, ...]

    def __str__(self):
        return f"{self.what}: {len(self.visits)} requests, slots {self.slots}"


def token_after(prompt: list[int], count: int) -> int:
    """The token that comes after a prompt and `count` tokens. The second number of a prompt says
    after how many the text ends, 0: never; a first one below 0 is refused."""
    if prompt[1] and count == prompt[1]:
        return END
    return 1 + zlib.crc32(f"{prompt} {count}".encode()) % 50_000


class Nobody:
    """Who reads the tokens of a simulated request."""

    def send(self, token):
        pass


class Guest(Request):
    """A request that notices what is done with it."""

    def __init__(self, room: "Room", number: int, visit: Visit):
        super().__init__(list(visit.prompt), visit.tokens, Nobody())
        self.room, self.number, self.visit, self.slot, self.added = room, number, visit, None, 0

    def __repr__(self):
        return f"request {self.number}"

    def begin(self, model, slot):
        self.room.begins(self, model, slot)
        super().begin(model, slot)

    def add(self, token):
        room, right = self.room, token_after(self.tokens, len(self.out))
        if self.over:
            room.fail(f"{self} is over and gets one more token.")
        if token != right:
            room.fail(
                f"{self} in slot {self.slot} gets the token {described(token)}, and {right} is its "
                "own.\nDo the tokens go to the slots that they came from, each once?"
            )
        self.added += 1
        super().add(token)


class Model:
    """Its next token follows from what was read into the slot and how many came since."""

    def __repr__(self):
        return "the model"

    def __init__(self, room: "Room"):
        self.room, self.held = room, {}

    def prefill(self, slot, tokens):
        if self.room.now < 2:
            time.sleep(0.002)  # whoever does not wait for the step is early
        if tokens[0] < 0:
            raise ValueError(f"token {tokens[0]} is not in the vocabulary")
        self.held[slot] = [list(tokens), 0]
        return self.next(slot)

    def decode(self, slots, tokens):
        room, slots, tokens = self.room, list(slots), list(tokens)
        room.decodes += 1
        if room.decodes > 1:
            room.fail(
                "a second decode in the same step. Give all running slots to one call: the weights "
                "are read once for all."
            )
        if not slots:
            room.fail("a decode of no slots. Where nobody runs, nothing is to be called.")
        if len(slots) != len(tokens) or len(set(slots)) < len(slots):
            room.fail(f"a decode of the slots {slots} with {len(tokens)} tokens: one for each.")
        for slot, token in zip(slots, tokens):
            who = room.running.get(slot)
            if who is None or slot not in self.held:
                room.fail(f"a decode of slot {slot}, and nobody was begun there.")
            if who.over:
                room.fail(f"a decode for {who}, which is over: it leaves before the next decode.")
            if token != who.last:
                room.fail(
                    f"slot {slot} is decoded after the token {described(token)}, and the last one "
                    f"of {who} there is {who.last}."
                )
        return [self.next(slot) for slot in slots]

    def next(self, slot):
        held = self.held[slot]
        held[1] += 1
        return token_after(held[0], held[1] - 1)


class Room:
    """A table, and what is looked at in each of its steps."""

    def __init__(self, table: Table):
        self.table, self.slots, self.waiting, self.running = table, table.slots, deque(), {}
        self.model = Model(self)
        self.guests = [Guest(self, number, visit) for number, visit in enumerate(table.visits)]
        self.coming = deque(sorted(self.guests, key=lambda guest: guest.visit.after))
        self.now, self.idle, self.decodes, self.begun, self.wrong = 0, 0, 0, [], None

    def fail(self, words: str) -> None:
        """Notes what is wrong, so that it does not help to catch the exception."""
        self.wrong = self.wrong or f"{self.table}, step {self.now}: {words}"
        raise Wrong(self.wrong)

    @property
    def done(self) -> bool:
        left = self.waiting or self.running
        return not self.coming and not left and all(guest.over for guest in self.guests)

    def step(self, answer) -> None:
        """Who has come, and who has gone; then one step of the answer, and what it has done."""
        while self.coming and self.coming[0].visit.after <= self.now:
            self.waiting.append(self.coming.popleft())
        for guest in self.guests:
            guest.added = 0
            if guest.visit.gone is not None and guest.visit.gone <= self.now and not guest.complete:
                guest.cancelled = True
        over = [guest for guest in self.running.values() if guest.over]
        before = [guest for guest in self.running.values() if not guest.over]
        there = [guest for guest in self.waiting if not guest.over]
        self.decodes, self.begun = 0, []
        answer.step(self.waiting, self.running, self.slots, self.model)
        if self.wrong:
            raise Wrong(self.wrong)
        self.look(over, before, there)
        self.now += 1

    def begins(self, guest: Guest, model, slot) -> None:
        """One more is given a slot."""
        if model is not self.model:
            self.fail(
                f"{guest} is begun with {described(model)}, and this table has another model."
            )
        if guest.slot is not None:
            self.fail(f"{guest} is begun again: its prompt was read already.")
        if slot not in range(self.slots):
            self.fail(f"{guest} gets slot {slot} of {self.slots}: they are counted from 0.")
        if guest.over:
            self.fail(
                f"{guest} had gone while it waited, and is begun all the same: nobody reads its "
                "tokens.\nLook at request.over before you give it a slot."
            )
        holder = self.running.get(slot, guest)
        if holder is not guest and not holder.over:
            self.fail(f"{guest} is begun in slot {slot}, which {holder} holds.")
        lower = [other for other in range(slot) if other not in self.running]
        if lower:
            self.fail(
                f"slot {slot} was taken while slot {lower[0]} was free: the lowest first.\nAn "
                "engine that decodes all rows up to the highest in use has less to do then."
            )
        guest.slot = slot
        self.begun.append(guest)

    def look(self, over: list, before: list, there: list) -> None:
        for guest in before:
            if guest.added != 1:
                self.fail(
                    f"{guest} runs in slot {guest.slot} and gets {guest.added} tokens: everybody "
                    "who runs takes part in each step."
                )
        held = list(self.running.values())
        for guest in over:
            if guest in held:
                self.fail(f"{guest} was over before this step, and still holds its slot.")
        room = min(self.slots - len(before), len(there)) - len(self.begun)
        if room > 0:
            self.fail(
                f"{room} of {self.slots} slots stay{'s' * (room == 1)} free, and "
                f"{len(there) - len(self.begun)} of those who wait could run: who waits joins "
                "as soon as there is a slot."
            )
        first = there[: len(self.begun)]
        early = [guest for guest in self.begun if guest not in first]
        if early:
            self.fail(
                f"{early[0]} was begun and {next(g for g in first if g not in self.begun)} has "
                "waited longer: the oldest of those who wait is the first to join."
            )
        rest = [guest for guest in self.waiting if not guest.over]
        if rest != there[len(self.begun) :]:
            self.fail(
                "those who wait are not the ones who waited, less those who joined, in order."
            )
        for guest in [*before, *self.begun]:
            if not guest.over and held.count(guest) != 1:
                self.fail(f"{guest} runs, and holds {held.count(guest)} slots in `running`.")
        for slot, guest in self.running.items():
            if guest not in before and guest not in self.begun:
                self.fail(f"slot {slot} is held by {guest}, which was not begun.")
            if not guest.over and guest.slot != slot:
                self.fail(f"{guest} was begun in slot {guest.slot} and stands at slot {slot}.")
        self.idle += not self.coming and all(guest.over for guest in self.guests)
        if self.idle > 3 and not self.done:
            left = [*self.running.values(), *self.waiting][0]
            self.fail(f"everybody is over, and {left} is still in the queue or holds a slot.")


def simulate(answer, tables: list[Table]) -> dict:
    """In a process: all tables, a step of each in turn. Returns {"steps": of each, "held": what is
    held by somebody when all is over}."""
    rooms = [Room(table) for table in tables]
    while not all(room.done for room in rooms):
        for room in rooms:
            if not room.done:
                room.step(answer)
    steps = [room.now for room in rooms]
    for room in rooms:
        for guest in room.guests:
            if (guest.tokens, guest.max_tokens) != (list(guest.visit.prompt), guest.visit.tokens):
                room.fail(f"what {guest} asked for was changed.")
            guest.room = room.model.room = None  # no circle
    held = [weakref.ref(one) for room in rooms for one in (*room.guests, room.model, room.waiting)]
    del rooms, room, guest
    collect_for(*held)
    return {"steps": steps, "held": [repr(one()) for one in held if one() is not None]}


def join_and_leave(answer, seeds: list[int]) -> None:
    """In a process: `leave` and `join` alone, at tables as they come."""
    for function in (_leaves, _joins):
        for seed in seeds:
            function(answer, random.Random(seed))


def _guests(draw: random.Random, slots: int, count: int) -> tuple[Room, list[Guest]]:
    """Requests of which some are over, each for another reason."""
    room = Room(Table("", slots, (Visit((1, 0), 5),) * count))
    for guest in room.guests:
        guest.out = [draw.randrange(1, 100) for _ in range(draw.randrange(5))]
        over = draw.choice(["", "", "", "complete", "cancelled", "error"])
        if over:
            setattr(guest, over, ValueError("bad") if over == "error" else True)
    return room, room.guests


def _leaves(answer, draw: random.Random) -> None:
    slots = draw.randrange(1, draw.choice([6, 30, 300]))
    _, guests = _guests(draw, slots, draw.randrange(slots + 1))
    running = dict(zip(draw.sample(range(slots), len(guests)), guests))
    right = {slot: guest for slot, guest in running.items() if not guest.over}
    case = f"leave: of {len(running)} who run {len(running) - len(right)} are over"
    answer.leave(running)
    if running != right:
        stay = [f"{g} ({_why(g)})" for g in running.values() if g not in right.values()]
        gone = [guest for guest in right.values() if guest not in running.values()]
        words = (
            f"{stay[0]} still holds a slot." if stay else "somebody holds another slot than before."
        )
        raise Wrong(f"{case}. {f'{gone[0]} is not, and has lost its slot.' if gone else words}")


def _why(guest: Guest) -> str:
    return "complete" if guest.complete else "cancelled" if guest.cancelled else "failed"


def _joins(answer, draw: random.Random) -> None:
    slots = draw.randrange(1, draw.choice([6, 30, 300]))
    _, guests = _guests(draw, slots, draw.randrange(2 * slots + 2))
    for guest in guests[: draw.randrange(slots + 1)]:
        guest.complete = guest.cancelled = False
        guest.error = None
    run = [guest for guest in guests[: draw.randrange(slots + 1)] if not guest.over]
    running = dict(zip(draw.sample(range(slots), len(run)), run))
    waiting = deque(guest for guest in guests if guest not in run)
    there = [guest for guest in waiting if not guest.over]
    free = [slot for slot in range(slots) if slot not in running]
    before, count = dict(running), min(len(free), len(there))
    case = f"join: slots {slots}, {len(running)} taken, {len(waiting)} wait, {len(there)} not over"
    taken = answer.join(waiting, running, slots)
    new = {slot: guest for slot, guest in running.items() if before.get(slot) is not guest}
    if any(running.get(slot) is not guest for slot, guest in before.items()):
        raise Wrong(f"{case}: somebody who ran has lost the slot.")
    over = [guest for guest in new.values() if guest.over]
    if over:
        raise Wrong(
            f"{case}: {over[0]} had gone while it waited, and gets slot {_slot_of(new, over[0])}."
            "\nLook at request.over before you give it a slot."
        )
    if sorted(new) != free[:count]:
        seen, right = short(sorted(new)), short(free[:count])
        raise Wrong(f"{case}: taken are the slots {seen}, and {right} are right.")
    if set(new.values()) != set(there[:count]):
        raise Wrong(f"{case}: who came later got a slot earlier. The oldest who wait join first.")
    if [guest for guest in waiting if not guest.over] != there[count:]:
        raise Wrong(f"{case}: the queue does not hold those who go on waiting, in their order.")
    try:
        listed = sorted(int(slot) for slot in taken)
    except TypeError:
        listed = None
    if listed != free[:count]:
        raise Wrong(
            f"{case}: join returns {described(taken)}, and the slots just taken are "
            f"{short(free[:count])}."
        )


def _slot_of(running: dict, guest: Guest) -> int:
    return next(slot for slot, other in running.items() if other is guest)
