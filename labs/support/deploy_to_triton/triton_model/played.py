"""Given: the model that the clients of exercise b ask. What it does stands in its numbers, (B, n).

A column whose first number is 0 or more is sent as a total. -1: an error, and the end; -2: nothing
more comes until the request is cancelled, which is noted in `cancelled`; -3: a pause.
"""

import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PAUSE = 0.7
CANCELLED = Path(__file__).resolve().parent / "cancelled"


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=play, args=(request,), daemon=True).start()


def play(request):
    sender = request.get_response_sender()
    numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
    for column in numbers.T.copy():  # (B,)
        if column[0] == -1:
            error = pb.TritonError(f"column of {abs(numbers).sum()}", pb.TritonError.INTERNAL)
            sender.send(pb.InferenceResponse(error=error), FINAL)
            return
        if column[0] == -2:
            while not request.is_cancelled():
                time.sleep(0.05)
            CANCELLED.write_text("yes")
            break
        if column[0] == -3:
            time.sleep(PAUSE)
            continue
        sender.send(pb.InferenceResponse([pb.Tensor("total", column[:, None])]))
    sender.send(flags=FINAL)
