"""Given: the model that the clients of exercise b query. Its input (B, n) says what it does.

A column whose first value is 0 or more is sent as a total; negative values are the commands below.
The file `cancelled` is written when a SILENT request is cancelled.
"""

import threading
import time
from pathlib import Path

import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# send an error and end; send nothing until the request is cancelled; pause; send a response without
# a total; send the final flag with the last total
ERROR, SILENT, SLOW, EMPTY, LAST = -1, -2, -3, -4, -5
PAUSE = 0.8  # seconds


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=play, args=(request,), daemon=True).start()


def play(request):
    sender = request.get_response_sender()
    numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
    with_last, columns = (numbers == LAST).any(), list(numbers.T.copy())
    for column in columns:  # (B,)
        mark = column[0]
        if mark == ERROR:
            error = pb.TritonError(f"column of {abs(numbers).sum()}", pb.TritonError.INTERNAL)
            return sender.send(pb.InferenceResponse(error=error), FINAL)
        if mark == SILENT:
            while not request.is_cancelled():
                time.sleep(0.05)
            Path(__file__).with_name("cancelled").write_text("yes")
        elif mark == SLOW:
            time.sleep(PAUSE)
        elif mark == EMPTY:
            sender.send(pb.InferenceResponse([]))
        elif mark >= 0:
            total = pb.InferenceResponse([pb.Tensor("total", column[:, None])])
            sender.send(total, FINAL if with_last and column is columns[-1] else 0)
    if not with_last:
        sender.send(flags=FINAL)
