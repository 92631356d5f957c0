"""Lab 16, client: each body, written after the solution, is a wrong answer."""


def all_in_all():
    """The seconds are those of the whole answer.

    kind: luck
    hint: pauses of less than a second, one of 5 requests at once, seconds=3: TimeoutError
    """

    import time

    def ask(url, model, numbers, seconds=30.0):
        tensor = grpc.InferInput("numbers", numbers.shape, "INT64")
        tensor.set_data_from_numpy(numbers)
        until = time.monotonic() + seconds
        responses, totals, ended = queue.Queue(), [], False
        with grpc.InferenceServerClient(url) as client:
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            try:
                while not ended:
                    result, error = responses.get(timeout=max(0.0, until - time.monotonic()))
                    if error:
                        ended = True
                        raise error
                    total = result.as_numpy("total")
                    ended = result.get_response().parameters["triton_final_response"].bool_param
                    if total is not None:
                        totals.append(total)
            except queue.Empty:
                raise TimeoutError("it is silent") from None
            finally:
                client.stop_stream(cancel_requests=not ended)
        return totals


def as_int32():
    """The totals in 32 bits.

    kind: types
    hint: total 1 is int32
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return [total.astype("int32") for total in right(url, model, numbers, seconds)]


def asked_again():
    """Where nothing comes, it is sent a second time.

    kind: communication
    hint: requests came to the server: each call sends one
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        try:
            return right(url, model, numbers, seconds)
        except TimeoutError:
            return right(url, model, numbers, seconds)


def changed():
    """The numbers are sorted where they stand, after they were sent.

    kind: inputs
    hint: ask changes the numbers, which are its caller's
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        totals = right(url, model, numbers, seconds)
        numbers[:] = 0
        return totals


def connection_kept():
    """A connection for each thread, for the next call.

    kind: memory
    hint: a connection to the server is kept
    """

    import threading

    kept = {}

    def ask(url, model, numbers, seconds=30.0):
        tensor = grpc.InferInput("numbers", numbers.shape, "INT64")
        tensor.set_data_from_numpy(numbers)
        responses, totals, ended = queue.Queue(), [], False
        place = threading.get_ident(), url
        client = kept.setdefault(place, grpc.InferenceServerClient(url))
        if client:
            client.start_stream(lambda result, error: responses.put((result, error)))
            client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            try:
                while not ended:
                    result, error = responses.get(timeout=seconds)
                    if error:
                        ended = True
                        raise error
                    total = result.as_numpy("total")
                    ended = result.get_response().parameters["triton_final_response"].bool_param
                    if total is not None:
                        totals.append(total)
            except queue.Empty:
                raise TimeoutError("it is silent") from None
            finally:
                client.stop_stream(cancel_requests=not ended)
        return totals


def end_counted():
    """The last response, which has no total, is one.

    kind: sizes
    hint: not a list of arrays
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return [*right(url, model, numbers, seconds), None]


def ends_without_a_total():
    """A response without a total is taken for the end.

    kind: end
    hint: ask returns 3 totals, and 6 were sent
    """

    def ask(url, model, numbers, seconds=30.0):
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
                    mark = result.get_response().parameters["triton_final_response"]
                    ended = total is None or mark.bool_param
                    if total is not None:
                        totals.append(total)
            except queue.Empty:
                raise TimeoutError("it is silent") from None
            finally:
                client.stop_stream(cancel_requests=not ended)
        return totals


def equal_ones_once():
    """A total that is that of before is taken for the same response.

    kind: values
    hint: ask returns 191 totals, and 200 were sent
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        totals = []
        for total in right(url, model, numbers, seconds):
            if not totals or (total != totals[-1]).any():
                totals.append(total)
        return totals


def error_is_the_end():
    """What came before the error is returned.

    kind: odd
    hint: an error after 3 totals: ask returns
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        try:
            return right(url, model, numbers, seconds)
        except grpc.InferenceServerException:
            return []


def kept_open():
    """One stream for every request, never stopped.

    kind: memory
    hint: its stream is still open: a thread of it reads on | in client.py line
    """

    class InferenceServerClient(grpc.InferenceServerClient):
        def stop_stream(self, cancel_requests=False):
            pass

        def close(self):
            pass

        def __del__(self):
            pass

    class grpc:
        InferInput = grpc.InferInput
        InferenceServerClient = InferenceServerClient


def last_one_empty():
    """The last response is taken for empty.

    kind: part
    hint: ask returns 2 totals, and 3 were sent
    """

    def ask(url, model, numbers, seconds=30.0):
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
                    ended = result.get_response().parameters["triton_final_response"].bool_param
                    if total is not None and not ended:
                        totals.append(total)
            except queue.Empty:
                raise TimeoutError("it is silent") from None
            finally:
                client.stop_stream(cancel_requests=not ended)
        return totals


def most_at_most():
    """More than a hundred never come.

    kind: constants
    hint: ask returns 100 totals, and 200 were sent
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return right(url, model, numbers, seconds)[:100]


def never_gives_up():
    """It waits for the next response however long.

    kind: end
    hint: no end after
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return right(url, model, numbers, 1e6)


def not_cancelled():
    """Who does not wait any more leaves the request where it is.

    kind: end
    hint: silence: ask raises | still open
    """

    def ask(url, model, numbers, seconds=30.0):
        tensor = grpc.InferInput("numbers", numbers.shape, "INT64")
        tensor.set_data_from_numpy(numbers)
        responses, totals = queue.Queue(), []
        client = grpc.InferenceServerClient(url)
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        while True:
            try:
                result, error = responses.get(timeout=seconds)
            except queue.Empty:
                kept.append(client)
                raise TimeoutError("nothing has come") from None
            if error or result.get_response().parameters["triton_final_response"].bool_param:
                client.close()
                if error:
                    raise error
                return totals
            totals.append(result.as_numpy("total"))

    kept = []


def one_at_a_time():
    """Who asks waits until nobody else does.

    kind: work
    hint: was to begin with another one's
    """

    import threading

    right, lock = ask, threading.Lock()

    def ask(url, model, numbers, seconds=30.0):
        with lock:
            return right(url, model, numbers, seconds)


def one_queue():
    """All calls have one queue.

    kind: step
    hint: one of 5 requests at once | an error after 3 totals | silence | totals, and
    """

    class queue:
        Empty = queue.Empty
        one = queue.Queue()

        def Queue():
            return queue.one


def own_words():
    """The server's words are lost.

    kind: values
    hint: is right, with the server's words
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        try:
            return right(url, model, numbers, seconds)
        except TimeoutError:
            raise
        except Exception:
            raise RuntimeError("the request has failed") from None


def soon_enough():
    """What has come after a third of a second is all.

    kind: luck
    hint: silence: ask returns | totals, and 200 were sent
    """

    import time

    def ask(url, model, numbers, seconds=30.0):
        tensor = grpc.InferInput("numbers", numbers.shape, "INT64")
        tensor.set_data_from_numpy(numbers)
        totals, errors = [], []

        def callback(result, error):
            if error:
                errors.append(error)
            elif (total := result.as_numpy("total")) is not None:
                totals.append(total)

        with grpc.InferenceServerClient(url) as client:
            client.start_stream(callback)
            client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
            time.sleep(0.35)
            found, failed = list(totals), list(errors)
            client.stop_stream(cancel_requests=True)
        if failed:
            raise failed[0]
        return found


def sorted_totals():
    """Sums grow: so sorted they are right.

    kind: values
    hint: and the server sent
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        totals = right(url, model, numbers, seconds)
        return sorted(totals, key=lambda total: total.sum())


def the_last_alone():
    """Who wants to see how a sum grows?

    kind: part
    hint: ask returns 1 totals, and 7 were sent
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return right(url, model, numbers, seconds)[-1:]
