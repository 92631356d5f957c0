"""Lab 16, batch: each body, written after the solution, is a wrong answer."""


def all_leave_together():
    """Static batching: the slots are free when all of them are.

    kind: values
    hint: still holds a slot
    """

    def leave(running):
        if all(request.over for request in running.values()):
            running.clear()


def begun_again():
    """The running ones are begun anew in every step.

    kind: work
    hint: is begun again
    """

    def step(waiting, running, slots, model):
        leave(running)
        join(waiting, running, slots)
        for slot, request in running.items():
            request.begin(model, slot)


def client_has_gone():
    """Whoever waits gets a slot, also if the client has gone.

    kind: part
    hint: had gone while it waited
    """

    def join(waiting, running, slots):
        taken = []
        for slot in range(slots):
            if waiting and slot not in running:
                running[slot] = waiting.popleft()
                taken.append(slot)
        return taken


def decoded_one_by_one():
    """Each running request gets a decode of its own.

    kind: work
    hint: a second decode in the same step
    """

    def step(waiting, running, slots, model):
        leave(running)
        before = list(running)
        for slot in join(waiting, running, slots):
            running[slot].begin(model, slot)
        for slot in before:
            running[slot].add(model.decode([slot], [running[slot].last])[0])


def highest_first():
    """The highest free slot is taken: every decode goes over all rows up to it.

    kind: values
    hint: taken are the slots
    """

    def join(waiting, running, slots):
        taken = []
        for slot in reversed(range(slots)):
            while waiting and waiting[0].over:
                waiting.popleft()
            if waiting and slot not in running:
                running[slot] = waiting.popleft()
                taken.append(slot)
        return taken


def in_turns():
    """The running ones get their tokens in turns, everybody in every second step.

    kind: step
    hint: slots stay | slots stays | could run | takes part in each step
    """

    turn = [0]

    def step(waiting, running, slots, model):
        leave(running)
        before = list(running)
        turn[0] += 1
        if len(before) < slots and turn[0] % 2:
            return
        for slot in join(waiting, running, slots):
            running[slot].begin(model, slot)
        if len(before) == slots and turn[0] % 2:
            before = before[1:]
        if before:
            tokens = model.decode(before, [running[slot].last for slot in before])
            for slot, token in zip(before, tokens):
                running[slot].add(token)


def joins_when_empty():
    """Static batching: a batch begins when the one before is over.

    kind: values
    hint: taken are the slots []
    """

    rest = join

    def join(waiting, running, slots):
        return rest(waiting, running, slots) if not running else []


def last_first():
    """Who came last joins first.

    kind: values
    hint: had gone while it waited | who came later got a slot earlier
    """

    def join(waiting, running, slots):
        taken = []
        for slot in range(slots):
            while waiting and waiting[0].over:
                waiting.popleft()
            if waiting and slot not in running:
                running[slot] = waiting.pop()
                taken.append(slot)
        return taken


def leaves_while_looking():
    """A dict must not change while one goes through it.

    kind: values
    hint: dictionary changed size during iteration
    """

    def leave(running):
        for slot, request in running.items():
            if request.over:
                del running[slot]


def more_than_there_are():
    """As many join as wait.

    kind: sizes
    hint: had gone while it waited | taken are the slots
    """

    def join(waiting, running, slots):
        taken = []
        while waiting:
            slot = min(set(range(100)) - set(running))
            running[slot] = waiting.popleft()
            taken.append(slot)
        return taken


def new_ones_not_begun():
    """Who joins is decoded, without ever having been read.

    kind: part
    hint: IndexError
    """

    def step(waiting, running, slots, model):
        leave(running)
        join(waiting, running, slots)
        if running:
            tokens = model.decode(list(running), [request.last for request in running.values()])
            for request, token in zip(running.values(), tokens):
                request.add(token)


def nobody_leaves():
    """Who is over keeps the slot.

    kind: values
    hint: still holds a slot
    """

    def leave(running):
        pass


def one_after_the_other():
    """One request at a time, the others wait.

    kind: sizes
    hint: taken are the slots
    """

    rest = join

    def join(waiting, running, slots):
        return rest(waiting, running, 1)


def one_slot_unused():
    """A slot is left free.

    kind: sizes
    hint: taken are the slots
    """

    rest = join

    def join(waiting, running, slots):
        return rest(waiting, running, slots - 1)


def only_the_complete_leave():
    """Who is cancelled goes on to the last token.

    kind: part
    hint: (cancelled) still holds a slot | (failed) still holds a slot
    """

    def leave(running):
        for slot in [s for s, request in running.items() if request.complete]:
            del running[slot]


def slots_from_one():
    """Slots are counted from 1.

    kind: sizes
    hint: had gone while it waited | taken are the slots
    """

    def join(waiting, running, slots):
        taken = []
        for slot in range(1, slots + 1):
            if waiting and slot not in running:
                running[slot] = waiting.popleft()
                taken.append(slot)
        return taken


def tokens_mixed_up():
    """The tokens go to the slots in another order than they came.

    kind: values
    hint: Do the tokens go to the slots that they came from
    """

    def step(waiting, running, slots, model):
        leave(running)
        before = list(running)
        for slot in join(waiting, running, slots):
            running[slot].begin(model, slot)
        if before:
            tokens = model.decode(before, [running[slot].last for slot in before])
            for slot, token in zip(reversed(before), tokens):
                running[slot].add(token)


def two_at_most():
    """Of those who run, two get a token; the third waits until one is over.

    kind: part
    hint: everybody who runs takes part in each step
    """

    def step(waiting, running, slots, model):
        leave(running)
        before = list(running)[:2]
        for slot in join(waiting, running, slots):
            running[slot].begin(model, slot)
        if before:
            tokens = model.decode(before, [running[slot].last for slot in before])
            for slot, token in zip(before, tokens):
                running[slot].add(token)


def a_few_slots():
    """A table of slots that is long enough for the server's model.

    kind: sizes
    hint: taken are the slots
    """

    def join(waiting, running, slots):
        taken = []
        for slot in (0, 1, 2, 3, 4, 5, 6, 7)[:slots]:
            while waiting and waiting[0].over:
                waiting.popleft()
            if waiting and slot not in running:
                running[slot] = waiting.popleft()
                taken.append(slot)
        return taken


def begun_are_remembered():
    """Which slots were begun stands in the module: a second table finds those of the first.

    kind: step
    hint: is begun again
    """

    begun = set()

    def step(waiting, running, slots, model):
        leave(running)
        begun.intersection_update(running)
        join(waiting, running, slots)
        before = [slot for slot in running if slot in begun]
        for slot in set(running) - begun:
            running[slot].begin(model, slot)
            begun.add(slot)
        if before:
            tokens = model.decode(before, [running[slot].last for slot in before])
            for slot, token in zip(before, tokens):
                running[slot].add(token)


def finds_no_end():
    """It waits for a free slot inside of a step.

    kind: end
    hint: an endless loop?
    """

    rest = join

    def join(waiting, running, slots):
        taken = []
        while waiting:
            taken += rest(waiting, running, slots)
        return taken


def history():
    """All requests are kept, for statistics.

    kind: memory
    hint: all is over, and somebody still holds
    """

    rest, seen = join, []

    def join(waiting, running, slots):
        taken = rest(waiting, running, slots)
        seen.extend(running[slot] for slot in taken)
        return taken


def joins_before_others_leave():
    """Who waits joins first, then others leave: a slot is free for a step.

    kind: values
    hint: who waits joins as soon as there is a slot
    """

    def step(waiting, running, slots, model):
        before = [slot for slot, request in running.items() if not request.over]
        taken = join(waiting, running, slots)
        for slot in taken:
            running[slot].begin(model, slot)
        leave(running)
        if before:
            tokens = model.decode(before, [running[slot].last for slot in before])
            for slot, token in zip(before, tokens):
                running[slot].add(token)


def lengths_are_cut():
    """Nobody may hold a slot for longer than eight tokens.

    kind: inputs
    hint: asked for was changed
    """

    rest = join

    def join(waiting, running, slots):
        taken = rest(waiting, running, slots)
        for slot in taken:
            running[slot].max_tokens = min(running[slot].max_tokens, 8)
        return taken


def one_that_fails_ends_the_step():
    """A prompt that is refused ends the step: nobody decodes.

    kind: odd
    hint: gets 0 tokens | slots stay free
    """

    def step(waiting, running, slots, model):
        leave(running)
        before = list(running)
        for slot in join(waiting, running, slots):
            running[slot].begin(model, slot)
            if running[slot].error:
                return
        if before:
            tokens = model.decode(before, [running[slot].last for slot in before])
            for slot, token in zip(before, tokens):
                running[slot].add(token)


def short_ones_first():
    """The shortest job first: the mean wait is shorter, and a long request may wait for ever.

    kind: values
    hint: The oldest who wait join first | has waited longer | not the ones who waited
    """

    rest = join

    def join(waiting, running, slots):
        there = sorted(waiting, key=lambda request: request.max_tokens)
        waiting.clear()
        waiting.extend(there)
        return rest(waiting, running, slots)


def slots_of_the_first_call():
    """How many slots there are is remembered.

    kind: constants
    hint: taken are the slots
    """

    rest, known = join, []

    def join(waiting, running, slots):
        known.append(slots)
        return rest(waiting, running, known[0])


def the_engines_scheduler():
    """The workshop's own engine has a scheduler.

    kind: library
    hint: that is the library
    """

    import importlib

    theirs = importlib.import_module("utils.serving.engine.scheduler")


def the_queue_is_a_set():
    """Those who are over are sorted out by a set, which has no order.

    kind: step
    hint: The oldest who wait join first | in their order
    """

    rest = join

    def join(waiting, running, slots):
        there = {request for request in waiting if not request.over}
        waiting.clear()
        waiting.extend(there)
        return rest(waiting, running, slots)


def three_decodes_of_equal_age():
    """Rows of one decode have the same number of tokens.

    kind: work
    hint: a second decode in the same step
    """

    def step(waiting, running, slots, model):
        leave(running)
        before = list(running)
        for slot in join(waiting, running, slots):
            running[slot].begin(model, slot)
        for age in {len(running[slot].out) for slot in before}:
            same = [slot for slot in before if len(running[slot].out) == age]
            tokens = model.decode(same, [running[slot].last for slot in same])
            for slot, token in zip(same, tokens):
                running[slot].add(token)
