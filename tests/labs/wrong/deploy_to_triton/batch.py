"""Lab 16, batch: each body, written after the solution, is a wrong answer."""


def all_leave_together():
    """Static batching: the slots are free when all of them are.

    hint: request
    """

    def leave(running):
        if all(request.over for request in running.values()):
            running.clear()


def begun_again():
    """The running ones are begun anew in every step.

    hint: request
    """

    def step(waiting, running, slots, model):
        leave(running)
        join(waiting, running, slots)
        for slot, request in running.items():
            request.begin(model, slot)


def client_has_gone():
    """Whoever waits gets a slot, also if the client has gone.

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

    hint: decodes of one row each
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

    hint: the lowest first
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

    hint: decode steps; 39 will do
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

    hint: when the long one is over. Slots were free
    """

    rest = join

    def join(waiting, running, slots):
        return rest(waiting, running, slots) if not running else []


def last_first():
    """Who came last joins first.

    hint: who came later got a slot earlier
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

    hint: dictionary changed size during iteration
    """

    def leave(running):
        for slot, request in running.items():
            if request.over:
                del running[slot]


def more_than_there_are():
    """As many join as wait.

    hint: slot 3 of 3
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

    hint: must leave before the next decode
    """

    def leave(running):
        pass


def one_after_the_other():
    """One request at a time, the others wait.

    hint: decodes of one row each
    """

    rest = join

    def join(waiting, running, slots):
        return rest(waiting, running, 1)


def one_slot_unused():
    """A slot is left free.

    hint: at most 2 of 3 slots take part
    """

    rest = join

    def join(waiting, running, slots):
        return rest(waiting, running, slots - 1)


def only_the_complete_leave():
    """Who is cancelled goes on to the last token.

    hint: decode steps were made in its slot
    """

    def leave(running):
        for slot in [s for s, request in running.items() if request.complete]:
            del running[slot]


def slots_from_one():
    """Slots are counted from 1.

    hint: slot 3 of 3
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

    hint: at most 2 of 3 slots
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
