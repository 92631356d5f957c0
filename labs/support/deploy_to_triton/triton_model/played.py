"""Given: the model that the clients of exercise b ask. What it does is told by its numbers, (B, n).

A column whose first number is 0 or more is sent as a total; for others see MARKS. `asked` gets a
line for each request, `cancelled` is written when one was.
"""

import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PAUSE, LIMIT = 1.0, 8.0
FOLDER = Path(__file__).resolve().parent
TWO = threading.Barrier(2)
# an error, and the end; nothing more until the request is cancelled; a pause; a response without a
# total; the final flag goes with the last total; nothing more until another request says so, too,
# or after LIMIT seconds an error
MARKS = ERROR, SILENT, SLOW, EMPTY, LAST, BOTH = -1, -2, -3, -4, -5, -6


class TritonPythonModel:
    def execute(self, requests):
        with (FOLDER / "asked").open("a") as asked:
            asked.write("a request\n" * len(requests))
        for request in requests:
            threading.Thread(target=play, args=(request,), daemon=True).start()


def play(request):
    sender = request.get_response_sender()
    numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
    with_last, columns = (numbers == LAST).any(), list(numbers.T.copy())
    for column in columns:  # (B,)
        mark = column[0]
        if mark == ERROR:
            return fail(sender, f"column of {abs(numbers).sum()}")
        if mark == SILENT:
            while not request.is_cancelled():
                time.sleep(0.05)
            (FOLDER / "cancelled").write_text("yes")
            break
        if mark == SLOW:
            time.sleep(PAUSE)
        elif mark == EMPTY:
            sender.send(pb.InferenceResponse([]))
        elif mark == BOTH:
            try:
                TWO.wait(LIMIT)
            except threading.BrokenBarrierError:
                TWO.reset()
                return fail(sender, f"the other of two requests at once was late: {LIMIT:g} s")
        elif mark >= 0:
            total = pb.InferenceResponse([pb.Tensor("total", column[:, None])])
            sender.send(total, FINAL if with_last and column is columns[-1] else 0)
    if not with_last:
        sender.send(flags=FINAL)


def fail(sender, words):
    error = pb.TritonError(words, pb.TritonError.INTERNAL)
    sender.send(pb.InferenceResponse(error=error), FINAL)
