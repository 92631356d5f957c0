"""Given: the contract of exercise 17a, and the judge behind its check cell.

The function runs in its own process, on drawn models. The real server gets the file in the last
section (served.py, which this process does not need).
"""

from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from utils.course.assertions import Wrong, described
from utils.course.properties import for_all
from utils.course.runner import Trial

SECONDS = 10.0  # until an answer in one process counts as an endless loop

# ---- a: the configuration

TYPES = {"bool": "TYPE_BOOL", "string": "TYPE_STRING", "bfloat16": "TYPE_BF16"}
for name, bits in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64))):
    TYPES |= {f"{name}{n}": f"TYPE_{name.upper().replace('FLOAT', 'FP')}{n}" for n in bits}
# what a file may say because it is the default
HARMLESS = {
    "version_policy.latest.num_versions": 1, "default_model_filename": "model.py",
    "model_transaction_policy": {},
}
HINTS = {
    "max_batch_size": "Above 0, the server adds a dimension in front of all shapes, and the model "
    "must take batches.",
    "dims": "-1 means any size; the batch dimension is not among them.",
    "dynamic_batching": "It is on as soon as the field is present, even with a delay of 0; if "
    "model.delay is None, the server\nmust not delay requests.",
    "model_transaction_policy": "A stream has one response per token: decoupled. Where each "
    "request has exactly one response, clients that\nwait for it could not use a decoupled model.",
    "instance_group": "If it is left out, or of KIND_GPU, there is one instance per GPU. Two "
    "instances are two leaders, each with\nall ranks: one process group is one instance.",
}


def tensor(name: str, dtype: str, dims: list[int], optional: bool = False) -> SimpleNamespace:
    """An input or an output of a model."""
    return SimpleNamespace(name=name, dtype=dtype, dims=dims, optional=optional)


def the_labs(tp: int, slots: int = 4) -> SimpleNamespace:
    """This lab's model on tp ranks; config.py describes its fields."""
    ids, arrival = tensor("input_ids", "int32", [-1]), tensor("arrival", "int32", [2], True)
    return SimpleNamespace(
        name="lab", inputs=[ids, tensor("max_tokens", "int32", [1], True), arrival],
        outputs=[tensor("output_ids", "int32", [-1])], max_batch=0, delay=None, streams=True,
        instances=1, device="model", parameters={"tp": tp, "slots": slots},
    )


def models() -> st.SearchStrategy:
    """Any model."""
    names = st.builds("{}_{}".format, st.sampled_from(["x", "key.value", "mask:0"]), st.integers(0))
    dims = st.lists(st.just(-1) | st.integers(1, 10**10), min_size=1)
    text = st.text("ab '\"\\")

    def tensors(optional: st.SearchStrategy) -> st.SearchStrategy:
        one = st.builds(tensor, names, st.sampled_from(sorted(TYPES)), dims, optional)
        return st.lists(one, min_size=1, max_size=5, unique_by=lambda tensor: tensor.name)

    def model(max_batch: int, delay: int | None, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(max_batch=max_batch, delay=delay if max_batch else None, **given)

    keys = st.sampled_from(["tp", "slots", "seconds", "stop", "a key", "k/v"])
    return st.builds(
        model, st.sampled_from([0, 1, 8, 500]), st.none() | st.sampled_from([0, 500]),
        name=st.sampled_from(["a_model", "another"]), inputs=tensors(st.booleans()),
        outputs=tensors(st.just(False)), streams=st.booleans(), instances=st.integers(1, 4),
        device=st.sampled_from(["model", "cpu", "gpu"]),
        parameters=st.dictionaries(keys, st.integers() | st.floats(0, 1) | text),
    )


def config(trial: Trial) -> str:
    """Judge `config`."""
    trial.forbid(("utils",))
    labs = the_labs(trial.draw.randrange(2, 9), trial.draw.randrange(5, 99))
    trial.alone("in one process", configs, labs, trial.new_seed(), seconds=SECONDS)
    return (
        "for drawn models the parser reads names, types, dims, batches, instances, responses\n"
        "and parameters as they are, and nothing else; no model was changed."
    )


def configs(answer, labs: SimpleNamespace, seed: int) -> None:
    """In one process: check the lab's model, then drawn ones."""

    def fits(model: SimpleNamespace) -> None:
        before = deepcopy(model)
        text = answer.config(model)
        if not isinstance(text, str):
            raise Wrong(f"config returns {described(text)}, not the text of the file.")
        if model != before:
            raise Wrong("config changes the model, which its owner still needs.")
        found, right = read(text), wanted(model)
        harmless = HARMLESS | {"name": model.name}
        for key in {**right, **found}:
            got, asked = found.get(key), right.get(key)
            spare = asked is None and (key.startswith("parameters") or got == harmless.get(key))
            if got != asked and not spare:
                words = ["none" if value is None else repr(value) for value in (got, asked)]
                hint = next((HINTS[part] for part in HINTS if part in key), "")
                raise Wrong(
                    f"model “{model.name}”: {key} is {words[0]}, and {words[1]} is right.\n{hint}"
                )

    fits(labs)
    for_all(seed, models(), fits, examples=60)


def wanted(model: SimpleNamespace) -> dict[str, Any]:
    """What a file must say, by field; fields left out have Triton's defaults."""
    from tritonclient.grpc import model_config_pb2 as pb

    right = pb.ModelConfig(backend="python", max_batch_size=model.max_batch)
    for field, tensors in ((right.input, model.inputs), (right.output, model.outputs)):
        for one in tensors:
            optional = {"optional": True} if one.optional else {}
            field.add(name=one.name, data_type=TYPES[one.dtype], dims=one.dims, **optional)
    if model.delay is not None:
        right.dynamic_batching.SetInParent()
        right.dynamic_batching.max_queue_delay_microseconds = model.delay
    if model.streams:
        right.model_transaction_policy.decoupled = True
    right.instance_group.add(kind=f"KIND_{model.device.upper()}", count=model.instances)
    for key, value in model.parameters.items():
        right.parameters[key].string_value = str(value)
    return fields(right)


def read(text: str) -> dict[str, Any]:
    """A text's fields, read by Triton's parser. Raises Wrong with the parser's error."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        return fields(text_format.Parse(text, ModelConfig()))
    except text_format.ParseError as error:
        raise Wrong(f"Triton cannot read the text: {error}\n{text[:400]}") from None


def fields(message: Any) -> dict[str, Any]:
    """{"input.ids.data_type": "TYPE_INT32", …}, regardless of order and grouping."""
    from google.protobuf.json_format import MessageToDict

    said = MessageToDict(message, preserving_proto_field_name=True)
    for kind in ("input", "output"):
        said[kind] = {one.pop("name", ""): one for one in said.get(kind, [])}
    groups = Counter()
    for group in said.pop("instance_group", []):
        groups[group.pop("kind", "KIND_AUTO")] += group.pop("count", 1)
        groups.update(group.keys() - {"name"})

    def flat(place: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {place: value}
        parts = [flat(f"{place}.{name}".lstrip("."), part) for name, part in value.items()]
        return {key: value for part in parts for key, value in part.items()}

    return flat("", said | {"instance_group": dict(groups)} if groups else said)
