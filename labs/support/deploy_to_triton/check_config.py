"""Given: what the check cell of exercise a looks at: what Triton makes of your config.pbtxt.

Your function is given drawn models, in a process of its own. Each text is read by the parser of
Triton's format, protobuf's, and what it has understood is compared, so any order and spelling will
do. Then the server loads a drawn model, and the lab's own one, which is asked for tokens.
"""

import copy
import random
from dataclasses import dataclass, field, replace
from typing import Any

from labs.support.deploy_to_triton import lab_server
from utils.course.assertions import Wrong, described
from utils.course.runner import Trial
from utils.serving.server import ServerError, server_available

TOKENS = 12
SECONDS = 8.0  # until a text counts as an endless loop
BLANK = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
           "float16", "bfloat16", "float32", "float64")
DTYPES = (*NUMBERS, "bool", "string")
DEVICES = ("model", "cpu", "gpu")
KEYS = ("tp", "slots", "seconds", "stop", "path", "a key", "device", "k/v")
TEXTS = ('a "quoted" word', "C:\\models\\new", 'it\'s \\"both\\"', '"')
PLACES = {
    "KIND_CPU": "The server would place it itself, and give it no device.",
    "KIND_GPU": "The server would make one for each GPU, and every one would start all ranks.",
    "KIND_AUTO": "The server would make one for each GPU that it finds.",
    "KIND_MODEL": "The server would leave all devices to the model.",
}
# what a file may say besides, because it is so anyway
HARMLESS = 'version_policy { latest { num_versions: 1 } } default_model_filename: "model.py"'


@dataclass(frozen=True)
class Tensor:
    """See config.py."""

    name: str
    dtype: str
    dims: list[int]
    optional: bool = False


@dataclass(frozen=True)
class Model:
    """See config.py."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    max_batch: int = 0
    delay: int | None = None
    streams: bool = False
    instances: int = 1
    device: str = "model"
    parameters: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        batch = f", batches of {self.max_batch}" if self.max_batch else ""
        return f"model “{self.name}” ({len(self.inputs)} in, {len(self.outputs)} out{batch})"


def the_labs(tp: int, slots: int = 4) -> Model:
    """The model of this lab on so many ranks."""
    tensors = {
        kind: [
            Tensor(name, "int32", list(dims), optional) for name, (dims, optional) in all.items()
        ]
        for kind, all in lab_server.CONTRACT.items()
    }
    return Model(
        lab_server.NAME,
        tensors["input"],
        tensors["output"],
        streams=True,
        parameters={"tp": tp, "slots": slots},
    )


def config(trial: Trial) -> str:
    """Judges `config`."""
    trial.forbid(("utils", "utils.serving"))
    models = _models(trial)
    for model, text in zip(models, texts(trial, models)):
        _right(str(model), _parsed(str(model), text), model)
    seen = (
        f"of {len(models)} drawn models the parser reads names, types, dims, batches, instances,\n"
        "responses and parameters as they are, from the first to the last; no model was changed;\n"
    )
    if server_available():
        return f"{seen}there is no Triton server on this machine to load them."
    _loaded(trial)
    return f"{seen}the server loads one more, and the lab's own, which streams the model's tokens."


def texts(trial: Trial, models: list[Model]) -> list[str]:
    """What `config` returns for each model."""
    return trial.alone("in one process", _texts, models, seconds=SECONDS)


def _texts(answer, models: list[Model]) -> list[str]:
    """In a process of its own."""
    found = []
    for model in models:
        before = copy.deepcopy(model)
        text = answer.config(model)
        if not isinstance(text, str):
            raise Wrong(f"config returns {described(text)}, not the text of the file.")
        if model != before:
            name = next(n for n in vars(model) if getattr(model, n) != getattr(before, n))
            raise Wrong(f"{before}: config changes model.{name}, and its owner still needs it.")
        found.append(text)
    return found


# ---- drawn models


def _models(trial: Trial) -> list[Model]:
    """The lab's; small ones; a large one; one with one field changed at a time; the first again."""
    draw = trial.draw
    lab = the_labs(draw.randrange(1, 9), draw.randrange(1, 99))
    models = [lab, the_labs(lab.parameters["tp"] + 1, lab.parameters["slots"])]
    some = [replace(drawn(draw), device=device) for device in draw.sample(DEVICES, 3)]
    batch = draw.randrange(2, 500)
    some[0] = replace(some[0], max_batch=0, delay=None, instances=1, streams=False)
    some[1] = replace(some[1], max_batch=batch, delay=None, instances=2, streams=True)
    some[2] = replace(some[2], max_batch=1, delay=draw.randrange(1, 10_000), streams=True)
    some[2].parameters.update(zip(KEYS, TEXTS))
    draw.shuffle(some)
    every = [Tensor(f"t{n}", dtype, [10**8 * (n + 1)]) for n, dtype in enumerate(3 * DTYPES)]
    draw.shuffle(every)
    models += some
    large = replace(drawn(draw), inputs=every, outputs=list(reversed(every)))
    models.append(replace(large, parameters={f"p{n}": draw.random() for n in range(40)}))
    models += _one_field_changed(draw, models[2])
    models.append(models[0])
    return models


def drawn(draw: random.Random, name: str = "", device: str = "") -> Model:
    """Any model."""

    def size():
        return draw.choice([-1, draw.randrange(1, 5000)])

    def tensors(count, optional):
        names = draw.sample(range(100), count)
        return [
            Tensor(
                name=draw.choice(["x", "ids", "logits", "key.value", "mask:0"]) + f"_{number}",
                dtype=draw.choice(DTYPES),
                dims=[size() for _ in range(draw.choice([1, 1, 2, 3, 5]))],
                optional=optional and draw.random() < 0.4,
            )
            for number in names
        ]

    max_batch = draw.choice([0, 1, draw.randrange(2, 500)])
    values = [draw.randrange(10**6), draw.uniform(0, 1), f"{draw.randrange(99)} words", ""]
    values = draw.sample([*values, *TEXTS], draw.randrange(2, len(KEYS) + 1))
    keys = draw.sample(KEYS, len(values))
    return Model(
        name=name or f"model_{draw.randrange(1000)}",
        inputs=tensors(draw.randrange(1, 5), optional=True),
        outputs=tensors(draw.randrange(1, 4), optional=False),
        max_batch=max_batch,
        delay=draw.choice([None, draw.randrange(1, 10_000)]) if max_batch else None,
        streams=draw.random() < 0.5,
        instances=draw.randrange(1, 5),
        device=device or draw.choice(DEVICES),
        parameters=dict(zip(keys, values)),
    )


def _one_field_changed(draw: random.Random, model: Model) -> list[Model]:
    """Models of the same name."""
    first = model.inputs[0]
    dtype = draw.choice([dtype for dtype in DTYPES if dtype != first.dtype])
    inputs = [
        [replace(first, dtype=dtype), *model.inputs[1:]],
        [replace(first, dims=[*first.dims, 7]), *model.inputs[1:]],
        [replace(first, optional=not first.optional), *model.inputs[1:]],
    ]
    key = next(iter(model.parameters))
    return [
        *(replace(model, inputs=changed) for changed in inputs),
        replace(model, streams=not model.streams, instances=model.instances + 1),
        replace(model, max_batch=model.max_batch + 3, delay=0),
        replace(model, device=draw.choice([d for d in DEVICES if d != model.device])),
        replace(model, parameters={**model.parameters, key: draw.randrange(10**6), "last": 1}),
        replace(model, parameters={}),
    ]


# ---- what the parser understands


def _parsed(case: str, text: str):
    """The text as the message that Triton reads from it. Raises Wrong with the parser's words."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        reason, number, lines = str(error).rpartition("': ")[2], error.GetLine(), text.splitlines()
        line = lines[number - 1].strip()[:90] if number and number <= len(lines) else ""
        raise Wrong(
            f"{case}: Triton cannot read the text: {reason}"
            + f"\nline {number}: {line}" * bool(line)
        ) from None


def _right(case: str, known, model: Model, served: bool = False) -> None:
    """known: the message; served: it comes from the server, which has filled in its defaults."""
    if known.name not in ("", model.name):
        raise Wrong(f"{case}: the name is “{known.name}”; it is that of the folder, or left out.")
    if known.backend != "python":
        raise Wrong(f"{case}: the backend is “{known.backend}”, not “python”.")
    _right_batches(case, known, model)
    for kind, wanted in (("input", model.inputs), ("output", model.outputs)):
        _right_tensors(case, kind, getattr(known, kind), wanted)
    _right_instances(case, known, model)
    _right_parameters(case, known, model)
    if not served:
        _nothing_else(case, known)


def _right_batches(case: str, known, model: Model) -> None:
    if known.max_batch_size != model.max_batch:
        why = "" if model.max_batch else (
            "\nWith more than 0 the server adds a dimension in front of all shapes, and the model "
            "must take batches."
        )
        raise Wrong(
            f"{case}: max_batch_size is {known.max_batch_size}, not {model.max_batch}.{why}"
        )
    on = known.HasField("dynamic_batching")
    if on and model.delay is None:
        raise Wrong(
            f"{case}: dynamic_batching is on: the server would hold requests back to make batches "
            "of them, and model.delay is None."
        )
    if model.delay is None:
        return
    delay = known.dynamic_batching.max_queue_delay_microseconds
    if not on or delay != model.delay:
        seen = f"a delay of {delay} µs" if on else "no dynamic_batching"
        raise Wrong(f"{case}: there is {seen}, and model.delay is {model.delay} µs.")


def _right_tensors(case: str, kind: str, found, wanted: list[Tensor]) -> None:
    names = [tensor.name for tensor in found]
    for name in names:
        if names.count(name) > 1:
            raise Wrong(f"{case}: the {kind} {name} stands there {names.count(name)} times.")
        if name not in [tensor.name for tensor in wanted]:
            raise Wrong(f"{case}: the {kind} {name} is one too many.")
    for tensor in wanted:
        if tensor.name not in names:
            raise Wrong(
                f"{case}: there is no {kind} {tensor.name}. The file has: "
                f"{', '.join(names) or 'none'}."
            )
        _right_tensor(f"{case}: the {kind} {tensor.name}", found[names.index(tensor.name)], tensor)


def _right_tensor(case: str, got, tensor: Tensor) -> None:
    from tritonclient.grpc.model_config_pb2 import DataType

    kind = DataType.Name(got.data_type)
    if kind != triton_type(tensor.dtype):
        raise Wrong(f"{case} has the type {kind}, and clients send {tensor.dtype}.")
    if list(got.dims) != tensor.dims:
        raise Wrong(
            f"{case} has the dims {list(got.dims)}, not {tensor.dims}.\n-1 stands for any number; "
            "the dimension of a batch is not among them."
        )
    if getattr(got, "optional", False) != tensor.optional:
        may = "may be left out: optional: true" if tensor.optional else "must not be left out"
        raise Wrong(f"{case} {may}.")
    known = {"name", "data_type", "dims", "optional"}
    others = [field.name for field, _ in got.ListFields() if field.name not in known]
    if others:
        raise Wrong(f"{case} has {others[0]}, which nobody asked for.")


def triton_type(dtype: str) -> str:
    """Triton's name of a NumPy type."""
    if dtype == "bfloat16":
        return "TYPE_BF16"
    return "TYPE_" + dtype.upper().replace("FLOAT", "FP")


def _right_instances(case: str, known, model: Model) -> None:
    from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

    kinds = [ModelInstanceGroup.Kind.Name(group.kind) for group in known.instance_group]
    right = f"KIND_{model.device.upper()}"
    if not kinds or set(kinds) != {right}:
        seen = ", ".join(kinds) or "not said"
        why = PLACES[kinds[0] if kinds else "KIND_AUTO"]
        raise Wrong(f"{case}: the kind of the instance group is {seen}, not {right}.\n{why}")
    count = sum(max(1, group.count) for group in known.instance_group)
    if count != model.instances:
        why = ""
        if model.instances == 1:
            why = (
                f"\n{count} leaders, each with ranks and weights of its own: one process group is "
                "one instance."
            )
        raise Wrong(f"{case}: there are {count} instances, not {model.instances}.{why}")
    if known.model_transaction_policy.decoupled != model.streams:
        words = (
            "the model is not decoupled: the server expects one response for each request, and a "
            "stream has one for each token.\nSay it in its transaction policy."
            if model.streams
            else "the model is decoupled, and each of its requests has one response: clients that "
            "wait for it would be refused."
        )
        raise Wrong(f"{case}: {words}")


def _right_parameters(case: str, known, model: Model) -> None:
    found = {key: value.string_value for key, value in known.parameters.items()}
    for key, value in model.parameters.items():
        if key not in found:
            raise Wrong(
                f"{case}: there is no parameter “{key}”. The file has: "
                f"{', '.join(found) or 'none'}."
            )
        if found[key] != str(value):
            raise Wrong(f"{case}: the parameter “{key}” is “{found[key]}”, not “{value}”.")


def _nothing_else(case: str, known) -> None:
    """What else a file may say changes what the server does."""
    from google.protobuf import text_format

    harmless = text_format.Parse(HARMLESS, type(known)())
    asked = {"name", "backend", "max_batch_size", "dynamic_batching", "input", "output"}
    asked |= {"instance_group", "model_transaction_policy", "parameters"}
    for given, value in known.ListFields():
        if given.name not in asked and value != getattr(harmless, given.name):
            raise Wrong(f"{case}: the file says {given.name}, which nobody asked for.")
    more = {"dynamic_batching": {"max_queue_delay_microseconds"}}
    more["model_transaction_policy"] = {"decoupled"}
    for name, known_fields in more.items():
        for given, _ in getattr(known, name).ListFields():
            if given.name not in known_fields:
                raise Wrong(f"{case}: {name} has {given.name}, which nobody asked for.")
    for group in known.instance_group:
        for given, _ in group.ListFields():
            if given.name not in ("name", "kind", "count"):
                raise Wrong(f"{case}: the instance group has {given.name}, which nobody asked for.")


# ---- the server


def _loaded(trial: Trial) -> None:
    model = drawn(trial.draw, name=lab_server.NAME, device=trial.draw.choice(["cpu", "model"]))
    lab = the_labs(2, slots=trial.draw.randrange(2, 7))
    text, own = texts(trial, [model, lab])
    _load(str(model), [], text, {"model.py": BLANK})
    _right(f"the server, {model}", _known(), model, served=True)
    _load(str(lab), lab_server.LEADER, own)
    _right_answers()


def _load(case: str, files: list[str], text: str, texts: dict | None = None) -> None:
    try:
        lab_server.put(files, text, texts)
    except ServerError as error:
        raise Wrong(f"{case}: the server refuses the model:\n{error}") from None


def _known():
    """What the server knows of the model, as a message."""
    import tritonclient.grpc as grpc

    with grpc.InferenceServerClient(lab_server.server().grpc) as client:
        return client.get_model_config(lab_server.NAME).config


def _right_answers() -> None:
    for inputs in ({"max_tokens": [TOKENS]}, {}):
        try:
            with lab_server.Stream(input_ids=lab_server.prompt(0), **inputs) as answer:
                tokens = answer.all()
        except lab_server.Failed as error:
            raise Wrong(f"a request with {['input_ids', *inputs]} fails: {error}") from None
        if tuple(tokens) != lab_server.right(0, len(tokens)) or len(tokens) < TOKENS:
            raise Wrong("the tokens that come are not those of the whole model.")
        if set(answer.counts) != {1}:
            raise Wrong(f"the responses have {answer.counts} tokens, not one each.")
