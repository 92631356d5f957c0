"""Lab 17, exercise b: the client of a model that sends any number of responses.

Requests to such a model go over a gRPC stream: a callback, in another thread, gets each response, a
result or an error. The last result is marked if the request asks for it:

    client.start_stream(callback)                  # callback(result=…, error=None), or the reverse
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    result.as_numpy("total")                       # None: this response has no such output
    result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream(cancel_requests=…)          # False: waits for the end; True: cancels

Write it with `tritonclient` (not with the workshop's `utils`).
"""

import queue

import tritonclient.grpc as grpc


def ask(url, model, numbers, seconds=30.0):
    """The totals of one request, in the order in which they arrive: a list of int64 arrays (B, 1).

    url: "host:port" of the server's gRPC; model: its name; numbers: (B, n), int64, not changed;
    seconds: time within which the next response must arrive.

    Any response may be without a total, and the last one may have one; an error may come after some
    totals. Raises that error, tritonclient's InferenceServerException, or TimeoutError if nothing
    arrives for `seconds`: then the request is cancelled, or the model would keep working in vain.
    The request is sent once. Afterwards no stream and no connection is open, and nothing is kept:
    several threads may call it at the same time, and none waits for another.
    """
    raise NotImplementedError(
        "open a stream, send the request, collect its totals until the last response"
    )
