"""A raised hand: the instructor's board of the class shows requests for help (`make class`).

    from utils.course import ask_for_help, helped

    ask_for_help("my ring hangs in its last step")
    helped()                                            # lowers the hand

It is an entry in the ledger (`utils/course/ledger.py`); only a lab that has joined a class
(`make lab CLASS=…`) reports it.
"""

import time

from utils.course import ledger

LONGEST = 200  # characters of a question


def ask_for_help(question: str = "") -> None:
    """Ask the instructor to come; the question, if any, is shown next to your alias.

    Raises TypeError for anything but a string.
    """
    if not isinstance(question, str):
        raise TypeError(f"the question {question!r} is not a string: ask_for_help('my ring hangs')")
    question = " ".join(question.split())
    cut = question if len(question) <= LONGEST else question[: LONGEST - 1] + "…"
    alias = ledger.alias()
    if not alias:
        print("This lab is not in a class (make lab CLASS=… joins one): no one will see this.")
    elif _note({"at": time.time(), "question": cut}):
        print(f"The instructor sees that {alias} asks for help. To withdraw: helped().")


def helped() -> None:
    """Withdraw the request for help."""
    if _note({"at": time.time(), "question": None}):
        print("Your request for help is withdrawn.")


def _note(entry: dict) -> bool:
    try:
        ledger.change(lambda content: content.update(help=entry))
    except ledger.LedgerError as error:
        print(f"Not saved: {error}.")
        return False
    return True
