"""A raised hand: the instructor's board of the class shows who asks for help (`make class`).

    from utils.course import ask_for_help, helped

    ask_for_help("my ring hangs in its last step")
    helped()                                            # takes it back

It is a line in the ledger (`utils/course/ledger.py`); only a lab that has joined a class
(`make lab CLASS=…`) reports it.
"""

import time

from utils.course import ledger

LONGEST = 200  # characters of a question


def ask_for_help(question: str = "") -> None:
    """Asks the instructor to come; the question, if there is one, is shown beside your alias.

    Raises TypeError for anything but a text.
    """
    if not isinstance(question, str):
        raise TypeError(f"the question {question!r} is not a text: ask_for_help('my ring hangs')")
    question = " ".join(question.split())
    cut = question if len(question) <= LONGEST else question[: LONGEST - 1] + "…"
    alias = ledger.alias()
    if not alias:
        print("This lab reports to no class (make lab CLASS=… joins one), so nobody sees this.")
    elif _note({"at": time.time(), "question": cut}):
        print(f"The instructor sees that {alias} asks for help. Take it back with helped().")


def helped() -> None:
    """Takes the question back."""
    if _note({"at": time.time(), "question": None}):
        print("You ask for no help any more.")


def _note(entry: dict) -> bool:
    try:
        ledger.change(lambda content: content.update(help=entry))
    except ledger.LedgerError as error:
        print(f"Not noted: {error}.")
        return False
    return True
