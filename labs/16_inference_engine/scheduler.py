"""Lab 16, exercise b: continuous batching: requests join the running batch, and leave it.

The leader (leader.py, given) calls `step` repeatedly, as long as there are requests.

    waiting   a deque of requests, the oldest first
    running   {slot: request}: which request holds each slot, 0 … slots-1, of the model's memory
    request   request.over      nothing is left to compute: complete, failed or cancelled
              request.last      the token that the next one follows
              request.begin(model, slot)   reads its prompt into the slot and gets the first token
              request.add(token)           one more token, which is sent to the client at once
    model     model.decode(slots, last_tokens) -> tokens: one more token for each of these slots

These objects are the whole state: a process may have several schedules, each with its own waiting,
running, slots and model. What a request asks for stays as it is.
"""


def leave(running):
    """Remove the requests that are over from `running`."""
    raise NotImplementedError("free the slots of the requests that are over")


def join(waiting, running, slots):
    """Give the free slots, lowest first, to the oldest waiting requests; return the slots taken.

    A request that is already over (it was cancelled while it waited) gets none and leaves the
    queue, at the latest when all before it have left.
    """
    raise NotImplementedError("move requests from waiting to running while a slot is free")


def step(waiting, running, slots, model):
    """Take one step: requests that are over leave, waiting ones join, running ones get one more
    token.

    At most one decode, for all that take part; none if there are none. A request that has just
    begun has a token from its prompt, and may take part or wait for the next step.
    """
    raise NotImplementedError(
        "leave, join, begin the new ones, then one decode for those already running"
    )
