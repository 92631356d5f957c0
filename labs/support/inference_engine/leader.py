"""Given: the leader, which takes requests, runs the steps, and distributes the tokens.

    leader = Leader(model, step, slots=4, positions=512)  # `step`: yours (scheduler.py), or `alone`
    leader.submit(Request(tokens, max_tokens, answer))

It runs in a thread of the model's process. Before each step it checks which requests were cancelled
and which have arrived; afterwards it ends the answers of requests that are over and hold no slot.
"""

import threading
import traceback
from collections import deque

END = 0  # the token that ends a text


class Request:
    """One request, its tokens so far, and their receiver.

    tokens      the prompt
    over        nothing is left to compute for it: it is complete, failed or cancelled
    """

    def __init__(self, tokens, max_tokens, answer, arrival=(1, 0)):
        """answer: send(token), end(error), cancelled(). arrival: see Leader.arrive."""
        self.tokens, self.max_tokens, self.answer = tokens, max_tokens, answer
        self.company, self.after = arrival
        self.out, self.error, self.cancelled, self.complete = [], None, False, False

    @property
    def over(self):
        return self.complete or self.cancelled or self.error is not None

    @property
    def last(self):
        """The latest token, from which the next is computed."""
        return self.out[-1]

    def begin(self, model, slot):
        """Read the prompt into the slot, which gives the first token. An invalid prompt ends the
        request."""
        try:
            self.add(model.prefill(slot, self.tokens))
        except ValueError as error:
            self.error = error

    def add(self, token):
        """Add a token and send it at once."""
        if token != END:
            self.out.append(token)
            self.answer.send(token)
        self.complete = token == END or len(self.out) == self.max_tokens


def alone(waiting, running, slots, model):
    """A step without batching: the oldest request occupies the model until it is over."""
    if 0 in running and running[0].over:
        del running[0]
    if not running and waiting:
        running[0] = waiting.popleft()
        running[0].begin(model, 0)
    elif running:
        (token,) = model.decode([0], [running[0].last])
        running[0].add(token)


class Leader:
    """model: has prefill and decode (a Shard or Ranks). step(waiting, running, slots, model).
    positions: how many the model has."""

    def __init__(self, model, step, slots, positions):
        self.model, self.step, self.slots, self.positions = model, step, slots, positions
        self.changed, self.closed = threading.Condition(), False
        self.come, self.open = [], []  # not yet examined; all whose answer has not ended
        self.waiting, self.running, self.steps = deque(), {}, 0
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def submit(self, request):
        """Raise ValueError for a request that does not fit a slot: it would make a step fail for
        all requests in it."""
        count = len(request.tokens)
        if count + request.max_tokens - 1 > self.positions:  # the last token is not read
            raise ValueError(
                f"{count} tokens and {request.max_tokens} new ones do not fit the model's "
                f"{self.positions} positions"
            )
        with self.changed:
            self.come.append(request)
            self.changed.notify()

    def close(self):
        """End the thread; answers that are still open end with an error."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        self.thread.join(10)

    def run(self):
        while not self.closed:
            try:
                if self.arrive():
                    self.step(self.waiting, self.running, self.slots, self.model)
                    self.steps += 1
                    self.finish()
                    continue
            except Exception as error:
                self.fail(error)
            with self.changed:
                if not self.come:
                    self.changed.wait(0.02)
        self.fail(RuntimeError("the model is being unloaded"))

    def arrive(self):
        """Add new requests to the queue. Return whether there is something to do.

        An arrival (company, after) makes a run repeatable even on a slow machine, because its clock
        counts steps: the first step waits until `company` requests have arrived, and this one joins
        the queue once `after` steps have been taken.
        """
        with self.changed:
            self.open += self.come
            self.come = []
        for request in self.open:
            request.cancelled = request.cancelled or request.answer.cancelled()
        if self.steps == 0 and self.open and len(self.open) < self.open[0].company:
            return False
        for request in [r for r in self.open if r.after is not None and r.after <= self.steps]:
            request.after = None
            self.waiting.append(request)
        return bool(self.open)

    def finish(self):
        """End the answers of requests that are over, hold no slot and are not waiting for one."""
        here = [*self.running.values(), *self.waiting]
        for request in [r for r in self.open if r.over and r.after is None and r not in here]:
            self.open.remove(request)
            request.answer.end(request.error)
        if not self.open:
            self.waiting.clear()
            self.running.clear()
            self.steps = 0

    def fail(self, error):
        """End all requests with the error of a failed step."""
        frames = traceback.extract_tb(error.__traceback__)
        place = "".join(f" in {at.filename.split('/')[-1]} line {at.lineno}" for at in frames[-1:])
        with self.changed:  # later requests are not affected
            gone = self.open + self.come
            self.open, self.come, self.steps = [], [], 0
        self.waiting.clear()
        self.running.clear()
        for request in gone:
            request.answer.end(RuntimeError(f"{type(error).__name__}{place}: {error}"))
