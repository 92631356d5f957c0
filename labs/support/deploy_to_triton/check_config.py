"""Given: what the check cell of exercise a looks at: what the server makes of your config.pbtxt.

The model is loaded with it into a running server, whole, on one rank. Then the server is asked what
it knows of the model, and the model is asked for tokens.
"""

from pathlib import Path

from labs.support.deploy_to_triton import lab_server
from utils.course.checks import Wrong, load_answer
from utils.serving.server import ServerError

TOKENS = 12
BLANK = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
KINDS = {
    "KIND_CPU": "The server would place it itself, and make one for each CPU or GPU that it chose.",
    "KIND_GPU": "The server would make one for each GPU, and every one would start all ranks.",
    "KIND_AUTO": "The server would make one for each GPU, and every one would start all ranks.",
}


def config(path: Path) -> str:
    """Judges `config`."""
    lab_server.not_started(path)
    answer = load_answer(path)
    text, other = answer.config(2), answer.config(1)
    for given in (text, other):
        if not isinstance(given, str):
            raise Wrong(f"config returns {type(given).__name__}, not the text of the file.")
    if text == other:
        raise Wrong("config(1) and config(2) are the same text: what of it says how many ranks?")
    _load([], text, {"model.py": BLANK})  # what is to be looked at first needs no weights
    _right_tensors("input")
    _right_tensors("output")
    _right_instances()
    _right_parameters()
    _load(lab_server.LEADER, text)
    _right_answers()
    return (
        "the server has loaded the model; its tensors, its one instance and its parameters are\n"
        "what they should be; and the tokens come one response at a time, the whole model's."
    )


def _load(files: list[str], text: str, texts: dict | None = None) -> None:
    try:
        lab_server.put(files, text, texts)
    except ServerError as error:
        raise Wrong(f"the server refuses the model:\n{error}") from None


def _right_tensors(kind: str) -> None:
    known = lab_server.told("/config")
    if known["max_batch_size"] != 0:
        raise Wrong(
            f"max_batch_size is {known['max_batch_size']}: the server adds a dimension in front of "
            "all shapes,\nand the model must take batches. It makes its own, step by step: 0."
        )
    if "dynamic_batching" in known:
        raise Wrong(
            "dynamic_batching is on: the server would hold requests back to make batches of them.\n"
            "Here the leader makes the batches, anew in every step."
        )
    found = {tensor["name"]: tensor for tensor in known[kind]}
    wanted = lab_server.CONTRACT[kind]
    for name in wanted:
        if name not in found:
            raise Wrong(f"there is no {kind} {name}. The server knows: {', '.join(found)}.")
    for name, tensor in found.items():
        if name not in wanted:
            raise Wrong(f"the {kind} {name} is one too many.")
        dims, optional = wanted[name]
        got = tensor["data_type"].removeprefix("TYPE_")
        if got != "INT32":
            raise Wrong(f"the {kind} {name} has the type {got}, and clients send INT32.")
        if [int(dim) for dim in tensor["dims"]] != dims:
            raise Wrong(
                f"the {kind} {name} has the dims {tensor['dims']}, not {dims}.\n"
                "-1 stands for any number, 1 for exactly one."
            )
        if kind == "input" and tensor["optional"] != optional:
            may = "may be left out: optional: true" if optional else "must not be left out"
            raise Wrong(f"the input {name} {may}.")


def _right_instances() -> None:
    known = lab_server.told("/config")
    kinds = [group["kind"] for group in known["instance_group"]]
    if kinds != ["KIND_MODEL"]:
        raise Wrong(
            f"the kind of the instance group is {', '.join(kinds)}, not KIND_MODEL: the ranks' "
            f"leader chooses devices.\n{KINDS.get(kinds[0], 'One group will do.')}"
        )
    if not known.get("model_transaction_policy", {}).get("decoupled"):
        raise Wrong(
            "the model is not decoupled: the server expects one response for each request, and a "
            "stream has one for each token.\nSay it in its transaction policy."
        )
    if known["instance_group"][0]["count"] != 1:
        count = known["instance_group"][0]["count"]
        raise Wrong(
            f"there are {count} instances: {count} leaders, each with ranks and weights of its own."
            "\nOne process group is one instance."
        )


def _right_parameters() -> None:
    found = lab_server.told("/config")["parameters"]
    found = {key: value["string_value"] for key, value in found.items()}
    for key, value in {"tp": "2", "slots": "4"}.items():
        if key not in found:
            raise Wrong(f"there is no parameter {key}. The server knows: {', '.join(found)}.")
        if found[key] != value:
            raise Wrong(f"config(2): the parameter {key} is “{found[key]}”, not “{value}”.")


def _right_answers() -> None:
    for number in range(len(lab_server.PROMPTS)):
        for inputs in ({"max_tokens": [TOKENS]}, {}):
            try:
                with lab_server.Stream(input_ids=lab_server.prompt(number), **inputs) as answer:
                    tokens = answer.all()
            except lab_server.Failed as error:
                raise Wrong(f"a request with {['input_ids', *inputs]} fails: {error}") from None
            if tuple(tokens) != lab_server.right(number, len(tokens)) or len(tokens) < TOKENS:
                raise Wrong("the tokens that come are not those of the whole model.")
            if set(answer.counts) != {1}:
                raise Wrong(f"the responses have {answer.counts} tokens, not one each.")
