"""Lab 16, client: each body, written after the solution, is a wrong answer."""


def as_int32():
    """The totals in 32 bits.

    kind: types
    hint: total 1 is int32
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return [total.astype("int32") for total in right(url, model, numbers, seconds)]


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


def end_counted():
    """The last response, which has no total, is one.

    kind: sizes
    hint: not a list of arrays
    """

    right = ask

    def ask(url, model, numbers, seconds=30.0):
        return [*right(url, model, numbers, seconds), None]


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
    hint: no end after 8 s in client.py line
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


def one_queue():
    """All calls have one queue.

    kind: step
    hint: one of 5 requests at the same time | an error after 3 totals | silence | totals, and
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
    hint: totals, and 14 were sent
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
