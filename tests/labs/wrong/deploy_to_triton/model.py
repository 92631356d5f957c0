"""Lab 16, model: each body, written after the solution, is a wrong answer."""


def a_row_of_totals():
    """All totals in one response.

    kind: communication
    hint: has the shape
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any() or not numbers.size:
                    super().execute([request])
                    continue
                ends = list(range(self.size, numbers.shape[1], self.size)) + [0]
                total = numbers.cumsum(axis=1)[:, [end - 1 for end in ends]]
                sender = request.get_response_sender()
                sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def all_or_nothing():
    """A bad request is an exception: it fails all that came with it.

    kind: odd
    hint: What leaves execute is an error for all requests of the call
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    raise pb.TritonModelException(f"{numbers[numbers < 0][0]} is negative")
            super().execute(requests)


def as_double():
    """Another type than config.pbtxt says: Triton does not look.

    kind: types
    hint: not total, INT64
    """

    class Tensor(pb.Tensor):
        def __init__(self, name, values):
            super().__init__(name, values.astype("float64"))

    pb.Tensor = Tensor


def as_float32():
    """Numbers of 64 bits in 24.

    kind: types
    hint: total 1 is
    """

    class Tensor(pb.Tensor):
        def __init__(self, name, values):
            super().__init__(name, values.astype("float32").astype("int64"))

    pb.Tensor = Tensor


def as_float64():
    """A float64 has 53 bits.

    kind: types
    hint: is [
    """

    class Tensor(pb.Tensor):
        def __init__(self, name, values):
            super().__init__(name, values.astype("float64").astype("int64"))

    pb.Tensor = Tensor


def at_most_64():
    """Nobody wants more totals than these.

    kind: constants
    hint: 64 totals come, and 300 are right
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                ends = range(self.size, numbers.shape[1] + self.size, self.size)
                for end in ends[:64]:
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def column_by_column():
    """The first negative number is looked for in the first column first.

    kind: odd
    hint: the error does not name it
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy().T
                if not (numbers < 0).any():
                    super().execute([request])
                    continue
                text = f"{numbers[numbers < 0][0]} is negative"
                error = pb.TritonError(text, pb.TritonError.INVALID_ARG)
                request.get_response_sender().send(pb.InferenceResponse(error=error), FINAL)


def each_part_alone():
    """The sum of the last numbers only.

    kind: values
    hint: total 2 is
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for begin in range(0, numbers.shape[1], self.size):
                    total = numbers[:, begin : begin + self.size].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def endless_execute():
    """It waits for a request to come that came long ago.

    kind: end
    hint: execute does not come to an end within
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            while requests:
                pass


def endless_initialize():
    """The parameter is read again and again.

    kind: end
    hint: initialize does not come to an end within
    """

    class TritonPythonModel(TritonPythonModel):
        def initialize(self, args):
            while not hasattr(self, "size"):
                parameters = json.loads(args["model_config"])["parameters"]


def everything_summed():
    """The rows of a request are added up, too.

    kind: part
    hint: has the shape (1, 1), and
    """

    class Tensor(pb.Tensor):
        def __init__(self, name, values):
            super().__init__(name, values.sum(axis=0, keepdims=True))

    pb.Tensor = Tensor


def first_digit():
    """The parameter's first digit.

    kind: constants
    hint: total 1 is
    """

    class TritonPythonModel(TritonPythonModel):
        def initialize(self, args):
            parameters = json.loads(args["model_config"])["parameters"]
            self.size = int(parameters["size"]["string_value"][0])


def first_request_only():
    """Triton hands over a list, and one of it is answered.

    kind: part
    hint: totals come, and | no error comes | no end: the client waits
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            super().execute(requests[:1])
            self.rest = requests[1:]


def first_row_only():
    """Most clients send one.

    kind: part
    hint: has the shape (1, 1), and
    """

    class Tensor(pb.Tensor):
        def __init__(self, name, values):
            super().__init__(name, values[:1])

    pb.Tensor = Tensor


def flag_before_the_last():
    """The end is sent when the last total is still to come.

    kind: end
    hint: Unable to send response
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for end in range(self.size, numbers.shape[1] + self.size, self.size):
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    if end >= numbers.shape[1]:
                        sender.send(flags=FINAL)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                if not numbers.size:
                    sender.send(flags=FINAL)


def flag_with_the_last():
    """The end comes with the last total.

    kind: end
    hint: the final flag comes with a total
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any() or not numbers.size:
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for end in range(self.size, numbers.shape[1] + self.size, self.size):
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    response = pb.InferenceResponse([pb.Tensor("total", total)])
                    sender.send(response, FINAL if end >= numbers.shape[1] else 0)


def flat():
    """A total for each row, without the batch dimension's companion.

    kind: sizes
    hint: has the shape (1,), and (1, 1) is right
    """

    class Tensor(pb.Tensor):
        def __init__(self, name, values):
            super().__init__(name, values.ravel())

    pb.Tensor = Tensor


def from_the_last():
    """The longest sum first.

    kind: values
    hint: total 1 is
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for end in reversed(range(self.size, numbers.shape[1] + self.size, self.size)):
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def internal():
    """The client's mistake is called the server's.

    kind: values
    hint: gets INTERNAL
    """

    import types

    right, pb = pb, types.SimpleNamespace(**vars(pb))
    pb.TritonError = lambda message, code: right.TritonError(message, right.TritonError.INTERNAL)
    pb.TritonError.INVALID_ARG = None


def kept():
    """Every request is remembered.

    kind: memory
    hint: all over, are still kept somewhere
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            super().execute(requests)
            seen.extend(requests)

    seen = []


def known_ones():
    """The totals are remembered by the numbers that they are of.

    kind: memory
    hint: bytes or more in the model's memory when it is over
    """

    known = {}

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for end in range(self.size, numbers.shape[1] + self.size, self.size):
                    part = numbers[:, :end]
                    if part.tobytes() not in known:
                        known[part.tobytes()] = part.sum(axis=1, keepdims=True)
                    total = known[part.tobytes()]
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def last_sender():
    """The senders are collected under one name, and the last is left.

    kind: step
    hint: Unable to send response | totals come, and | no end
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                for end in range(self.size, numbers.shape[1] + self.size, self.size):
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def leaves_the_program():
    """One whose numbers are empty has no business here.

    kind: end
    hint: SystemExit in model.py line
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                if not pb.get_input_tensor_by_name(request, "numbers").as_numpy().size:
                    raise SystemExit(1)
            super().execute(requests)


def nameless_error():
    """The error does not say which number.

    kind: values
    hint: the error does not name it
    """

    import types

    right, pb = pb, types.SimpleNamespace(**vars(pb))
    pb.TritonError = lambda message, code: right.TritonError("a number is negative", code)
    pb.TritonError.INVALID_ARG = right.TritonError.INVALID_ARG


def names_the_first():
    """The first number of the request is named, negative or not.

    kind: odd
    hint: the error does not name it
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if not (numbers < 0).any():
                    super().execute([request])
                    continue
                text = f"{numbers.ravel()[0]} is the first number"
                error = pb.TritonError(text, pb.TritonError.INVALID_ARG)
                request.get_response_sender().send(pb.InferenceResponse(error=error), FINAL)


def no_end():
    """The final flag is forgotten.

    kind: end
    hint: the client waits for the final flag
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            self.senders = []
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for end in range(self.size, numbers.shape[1] + self.size, self.size):
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                self.senders.append(sender)


def no_end_of_an_error():
    """An error is the end, one would think.

    kind: end
    hint: no final flag with it
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                negative = numbers[numbers < 0]
                if not negative.size:
                    super().execute([request])
                    continue
                error = pb.TritonError(f"{negative[0]} is negative", pb.TritonError.INVALID_ARG)
                request.get_response_sender().send(pb.InferenceResponse(error=error))


def numbers_kept():
    """The numbers are kept, and not their requests.

    kind: memory
    hint: all over, are still kept somewhere
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            super().execute(requests)
            for request in requests:
                seen.append(pb.get_input_tensor_by_name(request, "numbers").as_numpy()[:1])

    seen = []


def only_whole_parts():
    """What is left at the end of a row gets no total.

    kind: sizes
    hint: totals come, and
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for end in range(self.size, numbers.shape[1] + 1, self.size):
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def returned():
    """A list of responses, as a model that is not decoupled has it.

    kind: communication
    hint: an error comes | totals come, and | no error comes
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            found = []
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                total = numbers.sum(axis=1, keepdims=True)
                found.append(pb.InferenceResponse([pb.Tensor("total", total)]))
            return found


def runs_on():
    """The sum goes on from the request before.

    kind: step
    hint: total 1 is | total 2 is
    """

    class Tensor(pb.Tensor):
        sum = 0

        def __init__(self, name, values):
            Tensor.sum = Tensor.sum + int(values[0, 0])
            super().__init__(name, values * 0 + Tensor.sum)

    pb.Tensor = Tensor


def size_three():
    """The parameter is that of the example.

    kind: constants
    hint: total 1 is | totals come, and
    """

    class TritonPythonModel(TritonPythonModel):
        def initialize(self, args):
            self.size = 3


def spare_total():
    """One total more where the numbers divide.

    kind: sizes
    hint: totals come, and
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any():
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                for part in range(numbers.shape[1] // self.size + 1):
                    total = numbers[:, : (part + 1) * self.size].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def summed_in_place():
    """The sums are written over the numbers.

    kind: inputs
    hint: execute changes the numbers of a request
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                if (numbers < 0).any() or not numbers.size:
                    super().execute([request])
                    continue
                sender = request.get_response_sender()
                numbers.cumsum(axis=1, out=numbers)
                ends = [*range(self.size - 1, numbers.shape[1] - 1, self.size), -1]
                for end in ends:
                    total = numbers[:, end][:, None].copy()
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                sender.send(flags=FINAL)


def totals_before_the_error():
    """It is added up until the negative number comes.

    kind: odd
    hint: totals come beside the error
    """

    class TritonPythonModel(TritonPythonModel):
        def execute(self, requests):
            for request in requests:
                numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
                sender, error = request.get_response_sender(), None
                for end in range(self.size, numbers.shape[1] + self.size, self.size):
                    negative = numbers[numbers < 0]
                    if negative.size and (end >= numbers.shape[1]):
                        code = pb.TritonError.INVALID_ARG
                        error = pb.TritonError(f"{negative[0]} is negative", code)
                        break
                    total = numbers[:, :end].sum(axis=1, keepdims=True)
                    sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
                if error:
                    sender.send(pb.InferenceResponse(error=error), FINAL)
                else:
                    sender.send(flags=FINAL)
