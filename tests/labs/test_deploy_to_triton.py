"""Lab 16: the answers that its checks must accept and reject, against a real server."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from labs.support.deploy_to_triton.triton_model.leader import Leader, Request, alone
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience
from tests.serving.processes import until
from utils.course.trial import Trial
from utils.paths import ROOT
from utils.serving.server import ServerError, server_available
from utils.workshop import labs

pytestmark = [
    pytest.mark.timeout(patience(600)),  # of the wrong answers some take all their time
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
]

LAB = Lab(
    "16_deploy_to_triton",
    {
        "config": ("check_config", "config", "config.py"),
        "model": ("check_model", "model", "model.py"),
        "client": ("check_model", "client", "client.py"),
        "rank": ("check_rank", "rank", "rank.py"),
        "batch": ("check_batch", "batch", "scheduler.py"),
        "goal": ("check_goal", "goal", "settings.py"),
    },
    {
        "labs.support.deploy_to_triton.check_model.SECONDS": patience(2),
        "labs.support.deploy_to_triton.check_model.SILENCE": patience(4),
        "labs.support.deploy_to_triton.check_model.CLIENT": patience(20),
    },
)

OTHERS = {
    "config: the other way around, a name, other spelling, comments, harmless words": r"""
def config(model):
    def tensor(kind, t):
        dims = "".join(f" dims: {size}" for size in t.dims)
        dtype = {"string": "STRING", "bool": "BOOL", "bfloat16": "BF16"}.get(t.dtype)
        dtype = dtype or t.dtype.replace("float", "fp").upper()
        optional = f", optional: {int(t.optional)}" if kind == "input" else ""
        return f"{kind}: <{dims}; data_type: TYPE_{dtype}{optional} name: {t.name!r}>"

    lines = [f"# {model.name}", f"name: {model.name!r}"]
    lines.append("version_policy { latest { num_versions: 1 } }")
    for key, value in reversed([*model.parameters.items(), ("comment", "mine")]):
        text = str(value).replace("\\", "\\134").replace("'", "\\'")
        lines.append(f"parameters: {{ value: {{ string_value: '{text}' }} key: '{key}' }}")
    group = f"{{ count: 1 kind: KIND_{model.device.upper()} name: 'g' }}"
    lines.append("instance_group: [ " + ", ".join([group] * model.instances) + " ]")
    lines.append("model_transaction_policy { decoupled: %s }" % ("t" if model.streams else "f"))
    lines += [tensor("output", t) for t in reversed(model.outputs)]
    lines += [tensor("input", t) for t in model.inputs]
    if model.delay is not None:
        lines.append(f"dynamic_batching < max_queue_delay_microseconds: {hex(model.delay)} >")
    if model.max_batch:
        lines.append(f"max_batch_size: {model.max_batch}")
    lines.append("backend: 'py' \"thon\"")
    return "\n".join(lines)
""",
    "config: Triton's message, written by protobuf": """
def config(model):
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2 as pb

    made = pb.ModelConfig(backend="python", max_batch_size=model.max_batch)
    for tensor in model.inputs:
        made.input.add(name=tensor.name, dims=tensor.dims, optional=tensor.optional,
                       data_type=getattr(pb, triton(tensor.dtype)))
    for tensor in model.outputs:
        made.output.add(name=tensor.name, dims=tensor.dims,
                        data_type=getattr(pb, triton(tensor.dtype)))
    made.model_transaction_policy.decoupled = model.streams
    kind = getattr(pb.ModelInstanceGroup, "KIND_" + model.device.upper())
    made.instance_group.add(kind=kind, count=model.instances)
    if model.delay is not None:
        made.dynamic_batching.max_queue_delay_microseconds = model.delay
        made.dynamic_batching.SetInParent()
    for name, value in model.parameters.items():
        made.parameters[name].string_value = str(value)
    return text_format.MessageToString(made)


def triton(dtype):
    for theirs, ours in (("BFLOAT", "BF"), ("FLOAT", "FP")):
        dtype = dtype.upper().replace(theirs, ours)
    return "TYPE_" + dtype
""",
    "config: one line, numbers for types, lists": r"""
TYPES = ["bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
         "float16", "float32", "float64", "string", "bfloat16"]


def config(model):
    def text(value):
        return '"' + "".join(f"\\{ord(c):03o}" for c in str(value)) + '"'

    def one(t):
        more = ["optional: true"] * t.optional
        return " ".join([f"{{name:{text(t.name)}", f"data_type:{TYPES.index(t.dtype) + 1}",
                         f"dims:{list(t.dims)}", *more, "}"])

    parts = [f"max_batch_size:{model.max_batch}", 'backend:"python"']
    parts.append(f"input:[{','.join(map(one, model.inputs))}]")
    parts.append(f"output:[{','.join(map(one, model.outputs))}]")
    if model.delay is not None:
        parts.append(f"dynamic_batching:{{max_queue_delay_microseconds:{model.delay}}}")
    parts.append(f"model_transaction_policy:{{decoupled:{str(bool(model.streams)).lower()}}}")
    parts.append(f"instance_group:{{kind:KIND_{model.device.upper()},count:{model.instances}}}")
    given = model.parameters.items()
    given = [f"{{key:{text(k)},value:{{string_value:{text(v)}}}}}" for k, v in given]
    parts.append(f"parameters:[{','.join(given)}]")
    return " ".join(parts)
""",
    "config: a generator of lines, a template": r"""
def config(model):
    return "\n".join(lines(model))


def lines(model):
    yield 'backend: "python"'
    yield "max_batch_size: " + str(model.max_batch)
    if model.delay is not None:
        yield "dynamic_batching {"
        yield f"  max_queue_delay_microseconds: {model.delay}"
        yield "}"
    kinds = dict(bool="BOOL", string="STRING", bfloat16="BF16")
    for bits in (8, 16, 32, 64):
        kinds |= {f"int{bits}": f"INT{bits}", f"uint{bits}": f"UINT{bits}"}
        kinds[f"float{bits}"] = f"FP{bits}"
    for kind in "input", "output":
        yield kind + " ["
        yield ",\n".join(
            '  {\n    name: "%s"\n    data_type: TYPE_%s\n    dims: [ %s ]%s\n  }'
            % (t.name, kinds[t.dtype], str(t.dims)[1:-1], "\n    optional: true" * t.optional)
            for t in getattr(model, kind + "s")
        )
        yield "]"
    if model.streams:
        yield "model_transaction_policy {\n  decoupled: True\n}"
    yield "instance_group [ {"
    yield f"  count: {model.instances}\n  kind: KIND_{model.device.upper()}"
    yield "} ]"
    for name, value in model.parameters.items():
        value = str(value).replace("\\", "\\\\").replace('"', '\\"')
        yield f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}'
""",
    "model: answers come from threads, the sums from one cumsum": """
import threading

import numpy as np


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config["parameters"].items()}
        self.size = int(given["size"])

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=answer, args=(request, self.size)).start()


def answer(request, size):
    (numbers,) = [tensor.as_numpy() for tensor in request.inputs()]
    sender = request.get_response_sender()
    if numbers.min(initial=0) < 0:
        first = next(int(number) for row in numbers for number in row if number < 0)
        error = pb.TritonError(f"no {first}, please", pb.TritonError.INVALID_ARG)
        sender.send(pb.InferenceResponse([], error), flags=FINAL)
        return
    sums = np.cumsum(numbers, axis=1)
    for end in [*range(size, numbers.shape[1], size), numbers.shape[1]] * bool(numbers.shape[1]):
        sender.send(pb.InferenceResponse([pb.Tensor("total", sums[:, end - 1 : end].copy())]))
    sender.send(flags=FINAL)
""",
    "model: all requests take turns, a total each": """
class TritonPythonModel:
    def initialize(self, args):
        self.config = args["model_config"]

    def execute(self, requests):
        size = int(json.loads(self.config)["parameters"]["size"]["string_value"])
        turns = [self.answers(request, size) for request in requests]
        while turns:
            turns = [turn for turn in turns if next(turn, False)]

    def answers(self, request, size):
        sender = request.get_response_sender()
        numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy().copy()
        rows = [[int(number) for number in row] for row in numbers]
        bad = [number for row in rows for number in row if number < 0]
        if bad:
            error = pb.TritonError(message=str(bad[0]), code=pb.TritonError.INVALID_ARG)
            sender.send(pb.InferenceResponse(output_tensors=[], error=error), flags=FINAL)
            return
        total = numbers[:, :0].sum(axis=1, keepdims=True)
        while numbers.shape[1]:
            total = total + numbers[:, :size].sum(axis=1, keepdims=True)
            numbers = numbers[:, size:]
            sender.send(pb.InferenceResponse(output_tensors=[pb.Tensor("total", total)]))
            yield True
        sender.send(flags=FINAL)
""",
    "model: bad ones first, one after the other, an object for each": """
import numpy as np


class Adder:
    def __init__(self, request):
        self.sender = request.get_response_sender()
        self.numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()

    def refused(self):
        places = np.argwhere(self.numbers < 0)
        if len(places) == 0:
            return False
        text = f"numbers{places[0].tolist()} is {self.numbers[tuple(places[0])]}"
        error = pb.TritonError(text, pb.TritonError.INVALID_ARG)
        self.sender.send(pb.InferenceResponse(error=error), FINAL)
        return True

    def add(self, size):
        parts = -(-self.numbers.shape[1] // size)
        total = np.zeros((len(self.numbers), 1), np.int64)
        for part in range(parts):
            total += self.numbers[:, part * size : (part + 1) * size].sum(axis=1, keepdims=True)
            self.sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
        self.sender.send(flags=FINAL)


class TritonPythonModel:
    def initialize(self, args):
        self.args = json.loads(args["model_config"])["parameters"]["size"]

    def execute(self, requests):
        for adder in [adder for adder in map(Adder, requests) if not adder.refused()]:
            adder.add(int(self.args["string_value"]))
        return None
""",
    "model: the size is the class's, the last requests are kept until the next call": """
class TritonPythonModel:
    @classmethod
    def initialize(cls, args):
        cls.size = int(json.loads(args["model_config"])["parameters"]["size"]["string_value"])

    def execute(self, requests):
        self.requests = requests
        for request in self.requests:
            self.sender = request.get_response_sender()
            self.numbers = pb.get_input_tensor_by_name(request, "numbers").as_numpy()
            for number in self.numbers.reshape(-1).tolist():
                if number < 0:
                    error = pb.TritonError(f"{number} < 0", pb.TritonError.INVALID_ARG)
                    self.sender.send(pb.InferenceResponse(error=error), FINAL)
                    break
            else:
                self.add()
                self.sender.send(flags=FINAL)

    def add(self):
        n, end = self.numbers.shape[1], 0
        while end < n:
            end = min(end + self.size, n)
            total = self.numbers[:, :end].sum(axis=1)[:, None]
            self.sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
""",
    "model: one worker for all calls, which ends with the model; one total, added to": """
import queue
import threading

import numpy as np


class TritonPythonModel:
    def initialize(self, args):
        self.size = int(json.loads(args["model_config"])["parameters"]["size"]["string_value"])
        self.work = queue.SimpleQueue()
        self.worker = threading.Thread(target=self.loop)
        self.worker.start()

    def loop(self):
        while (job := self.work.get()) is not None:
            self.one(*job)
            del job

    def one(self, x, sender):
        flat = x.reshape(-1)
        where = np.flatnonzero(flat < 0)
        if len(where):
            message = f"numbers must not be negative, got {flat[where[0]]}"
            sender.send(
                pb.InferenceResponse(error=pb.TritonError(message, pb.TritonError.INVALID_ARG)),
                FINAL,
            )
            return
        total = np.zeros((len(x), 1), np.int64)
        pieces = np.split(x, range(self.size, x.shape[1], self.size), axis=1) if x.shape[1] else []
        for piece in pieces:
            total += piece.sum(axis=1, keepdims=True)
            sender.send(pb.InferenceResponse([pb.Tensor("total", total)]))
        sender.send(flags=FINAL)

    def execute(self, requests):
        for request in requests:
            self.work.put(
                (
                    pb.get_input_tensor_by_name(request, "numbers").as_numpy().copy(),
                    request.get_response_sender(),
                )
            )

    def finalize(self):
        self.work.put(None)
        self.worker.join()
""",
    "model: the last request first, Python's numbers": """
import numpy as np


class TritonPythonModel:
    def initialize(self, args):
        for key, value in json.loads(args["model_config"])["parameters"].items():
            if key == "size":
                self.size = int(value["string_value"])

    def execute(self, requests):
        senders = [request.get_response_sender() for request in requests]
        for request, sender in reversed(list(zip(requests, senders))):
            rows = pb.get_input_tensor_by_name(request, "numbers").as_numpy().tolist()
            wrong = [value for row in rows for value in row if value < 0]
            if wrong:
                sender.send(
                    pb.InferenceResponse(
                        [],
                        pb.TritonError(
                            f"The number {wrong[0]} is below zero", pb.TritonError.INVALID_ARG
                        ),
                    ),
                    FINAL,
                )
            else:
                totals = [0] * len(rows)
                done, n = 0, len(rows[0]) if rows else 0
                while done < n:
                    totals = [t + sum(row[done : done + self.size]) for t, row in zip(totals, rows)]
                    done += self.size
                    sender.send(
                        pb.InferenceResponse(
                            [pb.Tensor("total", np.array([[t] for t in totals], dtype=np.int64))]
                        )
                    )
                sender.send(flags=FINAL)
        return None
""",
    "client: asyncio": """
import asyncio

from tritonclient.grpc import aio


def ask(url, model, numbers, seconds=30.0):
    return asyncio.run(collected(url, model, numbers, seconds))


async def collected(url, model, numbers, seconds):
    tensor = grpc.InferInput("numbers", list(numbers.shape), "INT64")
    tensor.set_data_from_numpy(numbers)
    totals = []

    async def requests():
        yield {"model_name": model, "inputs": [tensor], "enable_empty_final_response": True}

    async with aio.InferenceServerClient(url) as client:
        answers = client.stream_infer(requests())
        coming = aiter(answers)
        failure = None
        while True:
            try:
                result, error = await asyncio.wait_for(anext(coming), seconds)
            except StopAsyncIteration:
                break
            except asyncio.TimeoutError:
                answers.cancel()
                raise TimeoutError("it is silent") from None
            failure = failure or error
            if not failure and (total := result.as_numpy("total")) is not None:
                totals.append(total)
    if failure:
        raise failure
    return totals
""",
    "client: an event, a list, a callback of its own": """
import threading


class Call:
    def __init__(self):
        self.totals, self.error, self.changed = [], None, threading.Condition()
        self.count, self.over = 0, False

    def __call__(self, result, error):
        with self.changed:
            self.count += 1
            self.error = self.error or error
            self.over = self.over or error is not None
            if result is not None:
                response = result.get_response()
                if len(response.outputs):
                    self.totals += [result.as_numpy("total")]
                self.over = response.parameters["triton_final_response"].bool_param
            self.changed.notify()


def ask(url, model, numbers, seconds=30.0):
    call = Call()
    client = grpc.InferenceServerClient(url=url)
    try:
        client.start_stream(callback=call)
        tensor = grpc.InferInput("numbers", numbers.shape, "INT64")
        client.async_stream_infer(
            model_name=model, inputs=[tensor.set_data_from_numpy(numbers.copy())],
            enable_empty_final_response=True,
        )
        seen = 0
        with call.changed:
            while not call.over:
                if not call.changed.wait_for(lambda: call.count > seen or call.over, seconds):
                    raise TimeoutError(f"{seconds} s without a response")
                seen = call.count
        if call.error:
            raise call.error
        return call.totals
    finally:
        client.stop_stream(cancel_requests=not call.over)
        client.close()
""",
    "client: a generator of results, an id for the request": """
def results_of(client, model, tensor, seconds):
    said = queue.SimpleQueue()
    client.start_stream(callback=lambda result, error: said.put(error or result))
    client.async_stream_infer(
        model_name=model, inputs=[tensor], request_id="mine", enable_empty_final_response=True
    )
    last = False
    while not last:
        try:
            one = said.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError("the model is silent") from None
        if isinstance(one, Exception):
            raise one
        yield one
        last = one.get_response().parameters["triton_final_response"].bool_param


def ask(url, model, numbers, seconds=30.0):
    tensor = grpc.InferInput("numbers", list(numbers.shape), "INT64")
    tensor.set_data_from_numpy(numbers)
    client, breaks_off = grpc.InferenceServerClient(url), True
    try:
        found = [one.as_numpy("total") for one in results_of(client, model, tensor, seconds)]
        breaks_off = False
    finally:
        client.stop_stream(cancel_requests=breaks_off)
        client.close()
    return [total for total in found if total is not None]
""",
    "client: the call beneath tritonclient's stream": """
import threading

import grpc as rpc
from tritonclient.grpc import InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException


def ask(url, model, numbers, seconds=30.0):
    tensor = grpc.InferInput("numbers", list(numbers.shape), "INT64")
    tensor.set_data_from_numpy(numbers)
    request = service_pb2.ModelInferRequest(model_name=model)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    request.inputs.append(tensor._get_tensor())
    request.raw_input_contents.append(tensor._get_content())
    coming, totals = queue.SimpleQueue(), []
    with rpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([request]))

        def read():
            try:
                for answer in answers:
                    coming.put(answer)
            except rpc.RpcError as error:
                coming.put(error)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while True:
                answer = coming.get(timeout=seconds)
                if isinstance(answer, rpc.RpcError):
                    raise InferenceServerException(answer.details())
                if answer.error_message:
                    raise InferenceServerException(answer.error_message)
                total = InferResult(answer.infer_response).as_numpy("total")
                if total is not None:
                    totals.append(total)
                if answer.infer_response.parameters["triton_final_response"].bool_param:
                    return totals
        except queue.Empty:
            raise TimeoutError(f"nothing for {seconds} s") from None
        finally:
            answers.cancel()
            reader.join()
""",
    "client: a stream that is called and gone through": """
import threading


class Stream:
    def __init__(self, seconds):
        self.seconds, self.come, self.news = seconds, [], threading.Condition()

    def __call__(self, result, error):
        with self.news:
            self.come.append(error if error is not None else result)
            self.news.notify()

    def __iter__(self):
        number = 0
        while True:
            with self.news:
                if not self.news.wait_for(lambda: len(self.come) > number, self.seconds):
                    raise TimeoutError(f"no response {number} within {self.seconds} s")
                one = self.come[number]
            if isinstance(one, Exception):
                raise one
            yield one
            if one.get_response().parameters["triton_final_response"].bool_param:
                return
            number += 1


def ask(url, model, numbers, seconds=30.0):
    stream = Stream(seconds)
    client = grpc.InferenceServerClient(url=url)
    try:
        client.start_stream(callback=stream)
        given = grpc.InferInput("numbers", list(numbers.shape), "INT64").set_data_from_numpy(
            numbers
        )
        client.async_stream_infer(
            model_name=model, inputs=[given], enable_empty_final_response=True
        )
        every = [one.as_numpy("total") for one in stream]
    except TimeoutError:
        client.stop_stream(cancel_requests=True)
        raise
    finally:
        client.close()
    return [one for one in every if one is not None]
""",
    "client: the callback does all, one waits for its news": """
import threading
import time
from functools import partial

import tritonclient.grpc as triton


def collect(box, result, error):
    box["last"] = time.monotonic()
    if error is not None:
        box["error"] = error
        box["end"].set()
        return
    values = result.as_numpy("total")
    if values is not None:
        box["totals"].append(values)
    mark = result.get_response().parameters.get("triton_final_response")
    if mark is not None and mark.bool_param:
        box["end"].set()


def ask(url, model, numbers, seconds=30.0):
    box = {"totals": [], "end": threading.Event(), "last": time.monotonic(), "error": None}
    with triton.InferenceServerClient(url) as client:
        one = triton.InferInput("numbers", [*numbers.shape], "INT64")
        one.set_data_from_numpy(numbers.copy())
        client.start_stream(partial(collect, box))
        client.async_stream_infer(model, [one], request_id="1", enable_empty_final_response=True)
        while not box["end"].wait(max(0.01, box["last"] + seconds - time.monotonic())):
            if time.monotonic() >= box["last"] + seconds:
                client.stop_stream(cancel_requests=True)
                raise TimeoutError(f"no response came for {seconds:g} seconds")
    if box["error"] is not None:
        raise box["error"]
    return box["totals"]
""",
    "rank: a loop over readline, the sum by a function": """
def summed(x):
    dist.all_reduce(x)
    return x


def layer(x, attend, mlp):
    x = summed(attend(x)).add(x)
    return x.add(summed(mlp(x)))


def loop(shard, commands, answers, rank):
    while line := commands.readline():
        command = json.loads(line)
        what = command.pop("do")
        try:
            tokens = getattr(shard, what)(*command.values())
            answer = {"tokens": tokens if what == "decode" else [tokens]}
        except ValueError as error:
            answer = {"error": f"refused: {error}"}
        if not rank:
            answers.write(json.dumps(answer) + "\\n")
            answers.flush()
""",
    "rank: asynchronous sums that are waited for, any answer in one line": """
from torch.distributed import all_reduce

import torch


def layer(x, attend, mlp):
    for part_of in attend, mlp:
        part = part_of(x)
        work = all_reduce(part, async_op=True)
        work.wait()
        x = torch.add(part, x)
    return x


def loop(shard, commands, answers, rank):
    obey = {
        "prefill": lambda slot, tokens: [shard.prefill(slot, tokens)],
        "decode": lambda slots, tokens: list(shard.decode(slots, tokens)),
    }
    for command in map(json.loads, iter(commands.readline, "")):
        answer = {"error": None}
        try:
            answer = {"tokens": obey[command.pop("do")](**command)}
        except ValueError as error:
            answer = {"error": repr(error) + " " + str(error), "command": command}
        if dist.get_rank() == 0:
            json.dump(answer, answers)
            answers.write(chr(10))
            answers.flush()
""",
    "rank: nothing is said where one rank is all, a generator of answers": """
def summed(part):
    if dist.get_world_size() > 1:
        dist.all_reduce(part, op=dist.ReduceOp.SUM)
    return part


def layer(x, attend, mlp):
    middle = x + summed(attend(x))
    return summed(mlp(middle)) + middle


def obeyed(shard, commands):
    for line in commands:
        command = json.loads(line)
        slots = command.get("slots")
        try:
            if slots is None:
                yield {"tokens": (shard.prefill(command["slot"], command["tokens"]),)}
            else:
                yield {"tokens": tuple(shard.decode(slots, command["tokens"]))}
        except ValueError as error:
            yield {"error": f"{error}"}


def loop(shard, commands, answers, rank):
    for answer in obeyed(shard, commands):
        if rank:
            continue
        print(json.dumps(answer, ensure_ascii=False), file=answers, flush=True)
""",
    "rank: commands from a thread that reads ahead, other exceptions end it with words": """
import queue
import threading


def layer(x, attend, mlp):
    part = attend(x)
    dist.all_reduce(part)
    part += x
    more = mlp(part)
    dist.all_reduce(more)
    return more.add_(part)


def loop(shard, commands, answers, rank):
    lines = queue.Queue()

    def read():
        for line in commands:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (line := lines.get()) is not None:
        command = json.loads(line)
        try:
            if command["do"] == "prefill":
                answer = {"tokens": [shard.prefill(command["slot"], command["tokens"])]}
            else:
                answer = {"tokens": shard.decode(command["slots"], command["tokens"])}
        except ValueError as error:
            answer = {"error": str(error)}
        except Exception as error:
            if rank == 0:
                print(json.dumps({"error": f"it is over: {error}"}), file=answers, flush=True)
            return
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
""",
    "goal: as few slots as will do, as long a queue": """
def settings():
    return dict(queue=20, slots=4, tp=2)
""",
    "goal: NumPy's whole numbers, as few ranks and as many slots as fit": """
def settings():
    import numpy as np

    return dict(zip(("tp", "slots", "queue"), np.array([2, 7, 17])))
""",
    "batch: all decode first, then leave, then join; and the new ones decode at once": """
def join(waiting, running, slots):
    free = [slot for slot in range(slots) if slot not in running]
    there = [request for request in waiting if not request.over]
    waiting.clear()
    waiting.extend(there[len(free) :])
    running.update(zip(free, there))
    return free[: len(there)]


def step(waiting, running, slots, model):
    leave(running)
    for slot in join(waiting, running, slots):
        running[slot].begin(model, slot)
    leave(running)
    order = sorted(running, reverse=True)
    if order:
        for slot, token in zip(order, model.decode(order, [running[s].last for s in order])):
            running[slot].add(token)
    leave(running)
""",
    "batch: one decode, then leave, and the new ones at the end": """
def leave(running):
    for slot in [slot for slot in running if running[slot].over]:
        running.pop(slot)


def join(waiting, running, slots):
    taken = set()
    free = iter(sorted(set(range(slots)) - running.keys()))
    slot = next(free, None)
    while waiting and slot is not None:
        request = waiting.popleft()
        if not request.over:
            running[slot] = request
            taken.add(slot)
            slot = next(free, None)
    return taken


def step(waiting, running, slots, model):
    leave(running)
    if running:
        who = tuple(running.values())
        for request, token in zip(who, model.decode(tuple(running), [r.last for r in who])):
            request.add(token)
    leave(running)
    for slot in sorted(join(waiting, running, slots), reverse=True):
        running[slot].begin(model, slot)
""",
    "batch: one after the other is begun and joins, a class for the table": """
class Table:
    def __init__(self, waiting, running, slots):
        self.waiting, self.running, self.slots = waiting, running, slots

    def lowest(self):
        return min(set(range(self.slots)) - set(self.running), default=None)

    def oldest(self):
        while self.waiting:
            if not (request := self.waiting.popleft()).over:
                return request

    def seats(self):
        while (slot := self.lowest()) is not None and (request := self.oldest()):
            self.running[slot] = request
            yield slot


def leave(running):
    kept = {slot: request for slot, request in running.items() if not request.over}
    running.clear()
    running.update(kept)


def join(waiting, running, slots):
    return tuple(Table(waiting, running, slots).seats())


def step(waiting, running, slots, model):
    leave(running)
    before = sorted(running.items())
    for slot in Table(waiting, running, slots).seats():
        running[slot].begin(model, slot)
    if before:
        slots, requests = zip(*before)
        tokens = model.decode(list(slots), [request.last for request in requests])
        _ = [request.add(token) for request, token in zip(requests, tokens)]
""",
    "batch: who is over is taken out of the queue at once, and who ends in its first token": """
def join(waiting, running, slots):
    for request in [request for request in waiting if request.over]:
        waiting.remove(request)
    taken = [slot for slot in range(slots) if slot not in running][: len(waiting)]
    for slot in taken:
        running[slot] = waiting.popleft()
    return taken


def step(waiting, running, slots, model):
    leave(running)
    before = dict(running)
    while new := join(waiting, running, slots):
        for slot in new:
            running[slot].begin(model, slot)
        leave(running)  # a slot whose request has ended at once is free at once
    if before:
        tokens = model.decode(list(before), [before[slot].last for slot in before])
        for slot, token in zip(before, tokens):
            before[slot].add(token)
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 140
    many = (25, 8, 4)
    each = {  # noqa: RUF012
        "config": many, "model": many, "client": (12, 8, 4), "rank": many, "batch": many,
        "goal": (13, 4, 2),
    }  # fmt: skip


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_prompts_leave_no_doubt():
    """What the answers are compared with does not hang on the last digits of a logit."""
    from labs.support.deploy_to_triton import lab_server

    for number, count in ((0, 48), (1, 48), (2, 16)):
        tokens = [*lab_server.prompt(number), *lab_server.right(number, count)]
        with torch.no_grad():
            logits = lab_server.model()(torch.tensor([tokens]))[
                0, len(lab_server.prompt(number)) - 1 : -1
            ]
        first, second = logits.topk(2).values.T
        assert (first - second).min() > 0.003


@pytest.mark.parametrize("seed", range(5))
def test_drawn_models_and_tables_have_everything_that_can_be_told(seed):
    from labs.support.deploy_to_triton import check_batch, check_config

    models = check_config._models(Trial("config.py", seed))
    for name, several in {
        "device": {"cpu", "gpu", "model"},
        "streams": {False, True},
        "delay": {None, 0},
        "max_batch": {0, 1},
        "instances": {1, 2},
    }.items():
        assert several <= {getattr(model, name) for model in models}
    tensors = [tensor for model in models for tensor in model.inputs]
    assert {tensor.dtype for tensor in tensors} == set(check_config.DTYPES)
    assert {tensor.optional for tensor in tensors} == {False, True}
    texts = "".join(str(value) for model in models for value in model.parameters.values())
    assert '"' in texts and "\\" in texts and max(len(model.inputs) for model in models) > 40
    tables = [t for several in check_batch._tables(Trial("x.py", seed).draw) for t in several]
    assert min(table.slots for table in tables) == 1 and max(table.slots for table in tables) >= 70
    visits = [visit for table in tables for visit in table.visits]
    assert max(len(table.visits) for table in tables) >= 250
    assert any(visit.gone is not None for visit in visits)
    assert any(visit.prompt[0] < 0 for visit in visits)
    assert any(visit.prompt[1] and visit.tokens > visit.prompt[1] for visit in visits)
    assert any(len(visit.prompt) > 400 for visit in visits)


def test_where_there_is_no_server_the_rest_is_checked(monkeypatch):
    from labs.support.deploy_to_triton import check_batch, check_config, lab_server

    for module, exercise in ((check_batch, "batch"), (check_config, "config")):
        monkeypatch.setattr(module, "server_available", lambda: "it is not installed")
        said = getattr(module, exercise)(Trial(LAB.solution / LAB.exercises[exercise][2]))
        assert "there is no Triton server on this machine" in said
    assert lab_server._here["server"] is None


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.deploy_to_triton import lab_server, measurements

    for name in ("config.py", "rank.py", "scheduler.py", "settings.py"):
        (tmp_path / name).write_text(labs.generated(LAB.solution / name, ROOT))
    config, rank, scheduler, settings = (str(path) for path in sorted(tmp_path.glob("*.py")))
    assert measurements.batches(scheduler) is None and measurements.loads(settings) is None
    assert measurements.together(config, rank, scheduler) is None
    assert lab_server._here["server"] is None, "a server was started for nothing"


def test_a_request_that_does_not_fit_harms_nobody_else():
    ended, sent = [], []
    answer = SimpleNamespace(send=sent.append, end=lambda *why: ended.append(why), cancelled=bool)
    model = SimpleNamespace(prefill=lambda slot, tokens: 7, decode=lambda slots, last: [8])
    leader = Leader(model, alone, slots=2, positions=10)
    try:
        leader.submit(Request([1] * 8, 3, answer))  # the third new token is not read any more
        with pytest.raises(ValueError, match=r"8 tokens and 4 new ones .* 10 positions"):
            leader.submit(Request([1] * 8, 4, answer))
        until(lambda: ended)
    finally:
        leader.close()
    assert sent == [7, 8, 8] and ended == [(None,)]


def test_a_load_that_does_not_come_to_an_end_is_ended_and_the_lab_goes_on(monkeypatch):
    """Within its time limit, with one sentence; and nothing of it stays."""
    from labs.support.deploy_to_triton import check_config, lab_server

    hangs = "class TritonPythonModel:\n    def initialize(self, args):\n        while True: pass\n"
    config = 'backend: "python"\ninstance_group { kind: KIND_CPU count: 1 }'
    monkeypatch.setattr(lab_server, "LOAD", 3.0)
    before = set(psutil.Process().children(recursive=True))
    try:
        lab_server.server()
        with pytest.raises(ServerError, match=r"^the model is not loaded after 3 s\. .*an end\?$"):
            lab_server.put([], config, {"model.py": hangs})
        until(lambda: not set(psutil.Process().children(recursive=True)) - before)
        monkeypatch.undo()
        lab_server.put([], config, {"model.py": check_config.BLANK})
        assert lab_server.server().versions(lab_server.NAME) == [1]
    finally:
        lab_server.close()


def test_the_server_and_the_ranks_forkserver_end_with_their_process():
    code = """
import psutil
from labs.support.deploy_to_triton import lab_server
print(lab_server.server().pid)
lab_server.forkserver()
for process in psutil.Process().children(recursive=True):
    print(process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(set(pids)) >= 4, "each has a supervisor"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
