"""Who is cancelled goes on to the last token.

hint: decode steps were made in its slot
"""


def leave(running):
    for slot in [s for s, request in running.items() if request.complete]:
        del running[slot]
