"""Lab 16, exercise b: continuous batching: who joins the running batch, and who leaves it.

The leader (leader.py, given) calls `step` again and again, as long as somebody is there.

    waiting   a deque of requests, the oldest first
    running   {slot: request}: who holds which slot, 0 … slots-1, of the model's memory
    request   request.over      nothing more is to be computed: complete, failed or cancelled
              request.last      the token that the next one follows
              request.begin(model, slot)   reads its prompt into the slot and gets the first token
              request.add(token)           one more token: it is sent to the client at once
    model     model.decode(slots, last_tokens) -> tokens: one more token for each of these slots

Everything that is known stands in these objects: a process may have several tables, each with
waiting, running, slots and model of its own. What a request has asked for stays as it is.
"""


def leave(running):
    """Takes everybody who is over out of `running`."""
    raise NotImplementedError("free the slots of the requests that are over")


def join(waiting, running, slots):
    """The oldest who wait get the free slots, the lowest first. Returns the slots just taken.

    Who is over already (it was cancelled while it waited) gets none and leaves the queue, at the
    latest when all before it have left.
    """
    raise NotImplementedError("move requests from waiting to running while a slot is free")


def step(waiting, running, slots, model):
    """One step: who is over leaves, who waits joins, everybody who runs gets one token more.

    One decode at most, of all who take part; none where nobody does. Who has just begun has a token
    from its prompt, and may take part or wait for the next step.
    """
    raise NotImplementedError(
        "leave, join, begin the new ones, then one decode for those who ran before"
    )
