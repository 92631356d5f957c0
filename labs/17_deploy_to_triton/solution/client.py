"""Lab 17, exercise b: the client of a model that sends any number of responses.

Such a model is asked over a gRPC stream: a callback gets what comes, in another thread, each time a
result or an error. The last result is marked, if the request asks for it:

    client.start_stream(callback)                  # callback(result=…, error=None), or the reverse
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    result.as_numpy("total")                       # None: this response has no such output
    result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream(cancel_requests=…)          # False: waits for the end; True: breaks off

Write it with `tritonclient` (and not with the workshop's `utils`).
"""

import queue

import tritonclient.grpc as grpc


def ask(url, model, numbers, seconds=30.0):
    """The totals of one request, in the order in which they come: a list of arrays (B, 1), int64.

    url: "host:port" of the server's gRPC; model: its name; numbers: (B, n), int64, which stay as
    they are; seconds: within which the next response must have come.

    Any response may be without a total, and the last one may have one; an error may come after
    some. Raises that error, tritonclient's InferenceServerException, and TimeoutError where nothing
    comes for so many seconds: then the request is cancelled, or the model would work on for nobody.
    It is sent once. Afterwards no stream and no connection is open, and nothing is kept: several
    threads may ask at the same time, and none waits for another.
    """
    ### BEGIN SOLUTION: open a stream, send the request, collect its totals until the last response
    tensor = grpc.InferInput("numbers", numbers.shape, "INT64")
    tensor.set_data_from_numpy(numbers)
    responses, totals, ended = queue.Queue(), [], False
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        try:
            while not ended:
                result, error = responses.get(timeout=seconds)
                if error:
                    ended = True
                    raise error
                total = result.as_numpy("total")
                if total is not None:
                    totals.append(total)
                ended = result.get_response().parameters["triton_final_response"].bool_param
        except queue.Empty:
            raise TimeoutError(f"nothing has come for {seconds:g} s") from None
        finally:
            client.stop_stream(cancel_requests=not ended)
    return totals
    ### END SOLUTION
