"""Given: the model that the clients of exercise b ask. What it does stands in its numbers, (B, n).

A column whose first number is 0 or more is sent as a total. -1: an error, and the end; -2: nothing
more comes until the request is cancelled, which is noted in `cancelled`; -3: a pause; -4: a
response without a total; -5: the final flag goes with the last total; -6: nothing more comes until
another request says so, too, or after `LIMIT` seconds an error. `asked` gets a line for each of
them.
"""

import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PAUSE, LIMIT = 0.7, 3.0
FOLDER = Path(__file__).resolve().parent
TWO = threading.Barrier(2)


class TritonPythonModel:
    def execute(self, requests):
        with (FOLDER / "asked").open("a") as asked:
            asked.write("a request\n" * len(requests))
        for request in requests:
            threading.Thread(target=play, args=(request,), daemon=True).start()


def play(request):
    sender = request.get_response_sender()
    numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
    columns = list(numbers.T.copy())
    for column in columns:  # (B,)
        if column[0] == -1:
            error = pb.TritonError(f"column of {abs(numbers).sum()}", pb.TritonError.INTERNAL)
            sender.send(pb.InferenceResponse(error=error), FINAL)
            return
        if column[0] == -2:
            while not request.is_cancelled():
                time.sleep(0.05)
            (FOLDER / "cancelled").write_text("yes")
            break
        if column[0] == -3:
            time.sleep(PAUSE)
            continue
        if column[0] == -4:
            sender.send(pb.InferenceResponse([]))
            continue
        if column[0] == -5:
            continue
        if column[0] == -6:
            try:
                TWO.wait(LIMIT)
            except threading.BrokenBarrierError:
                TWO.reset()
                text = f"the answer was to begin with another one's, and in {LIMIT:g} s none came"
                error = pb.TritonError(text, pb.TritonError.UNAVAILABLE)
                sender.send(pb.InferenceResponse(error=error), FINAL)
                return
            continue
        last = column is columns[-1] and (numbers == -5).any()
        response = pb.InferenceResponse([pb.Tensor("total", column[:, None])])
        sender.send(response, FINAL if last else 0)
    if not (numbers == -5).any():
        sender.send(flags=FINAL)
