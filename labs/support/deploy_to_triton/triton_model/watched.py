"""Given: what Triton calls in exercise b: it hands all calls on to your model, and looks on.

Your file is yours.py in this folder. `notes` gets a line for each call of `execute`.
"""

import gc
import json
import threading
import time
import traceback
import weakref
from pathlib import Path

import triton_python_backend_utils as pb

FOLDER = Path(__file__).resolve().parent
LETS_GO = 2.0  # seconds until a request that is over must not be held any more


class TritonPythonModel:
    def initialize(self, args):
        self.before, self.last = [], []  # weak references to requests, and to their numbers
        threading.excepthook = lambda failed: note(raised=said(failed.exc_value))
        try:
            import yours

            self.yours = yours.TritonPythonModel()
            self.yours.initialize(args)
        except BaseException as error:
            raise pb.TritonModelException(said(error)) from None

    def execute(self, requests):
        numbers = [pb.get_input_tensor_by_name(one, "numbers").as_numpy() for one in requests]
        copies = [given.copy() for given in numbers]
        owners = [given if given.base is None else given.base for given in numbers]
        self.before += self.last
        self.last = [weakref.ref(one) for one in [*requests, *owners]]
        del owners
        try:
            answers = self.yours.execute(requests)
        except BaseException as error:
            note(raised=said(error))
            raise
        changed = any((mine != copy).any() for mine, copy in zip(numbers, copies))
        note(requests=len(requests), changed=changed, held=self.held())
        return answers

    def finalize(self):
        if hasattr(self.yours, "finalize"):
            self.yours.finalize()

    def held(self):
        """How many requests of earlier calls, or their numbers, are still somebody's."""
        until = time.monotonic() + LETS_GO
        while any(one() is not None for one in self.before) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.05)
        self.before = [one for one in self.before if one() is not None]
        return len(self.before)


def note(**line):
    with (FOLDER / "notes").open("a") as file:
        file.write(json.dumps(line) + "\n")


def said(error):
    """An exception, and the line of your file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename.endswith("yours.py")]
    place = f" in model.py line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{place}: {error}"
