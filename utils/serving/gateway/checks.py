"""Checks of request bodies before they reach Triton, which accepts more than is good for it.

The wheel's server (2.51) crashes on a body of about 4.2 MB and on a `shape` of 2**40, ignores a
misspelled field of `generate`, and keeps only the lowest 32 bits of a number that is too large.
"""

import difflib
import ipaddress
import json
import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from utils.serving.gateway.refusal import Refusal

WHOLE = {
    f"TYPE_{sign}INT{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "U")
    for bits in (8, 16, 32, 64)
}
LARGEST = {"TYPE_FP16": 65504.0, "TYPE_BF16": 3.38e38, "TYPE_FP32": 3.4e38, "TYPE_FP64": math.inf}
DEEPEST = 32  # levels of lists in the data of a tensor
GENERATE = {"id"}  # fields of generate that are not inputs
INFER = {"id", "parameters", "inputs", "outputs"}
TENSOR = {"name", "shape", "datatype", "parameters", "data"}


def check_caller(headers: Mapping[str, str], local: bool) -> None:
    """Refuse web pages of other sites: in a browser on this machine they reach addresses that are
    `local` to it, even under a name of their own (DNS rebinding)."""
    host, origin = headers.get("Host", ""), headers.get("Origin")
    foreign = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    if foreign or (origin is not None and origin.partition("://")[2] != host):
        raise Refusal("UNAUTHENTICATED: pages of other sites may not call this server", 403)
    if local and host and not is_loopback(urlsplit(f"//{host}").hostname or ""):
        why = f"Host {host:.80} is not this machine, the only one served"
        raise Refusal(f"UNAUTHENTICATED: {why}: call localhost, or start with --host", 403)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def object_of(body: bytes) -> dict:
    """The body as a JSON object. Raises Refusal."""
    try:
        found = json.loads(body, parse_constant=_no_number)
    except RecursionError:
        raise Refusal("INVALID_ARG: the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(f"INVALID_ARG: the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(f"INVALID_ARG: the body is a {type(found).__name__}: give a JSON object")
    return found


def check_generate(body: dict, config: dict, stream: bool) -> None:
    """Refuse a body of generate or generate_stream that does not fit the model's inputs."""
    inputs = {given["name"]: given for given in config["input"]}
    _known(body, set(inputs) | GENERATE, "field")
    if not isinstance(body.get("id", ""), str):
        raise Refusal(f"INVALID_ARG: id {_short(body['id'])} is not a string")
    for name, given in inputs.items():
        if name in body:
            _check_values(name, body[name], given)
        elif not given.get("optional"):
            raise Refusal(f"INVALID_ARG: {name} is missing")
    if body.get("stream") is True and not stream:
        raise Refusal(
            "INVALID_ARG: stream is true, but generate sends one response: use generate_stream"
        )


def _check_values(name, value, given):
    """Refuse values of the wrong number or type; a single one may also come without a list."""
    dims = [int(size) for size in given["dims"]]
    values = value if isinstance(value, list) else [value]
    if len(dims) != 1 or (dims[0] >= 0 and len(values) != dims[0]):
        raise Refusal(f"INVALID_ARG: {name} has {len(values)} values: give {math.prod(dims)}")
    for one in values:
        _check_value(name, one, given["data_type"])


def _check_value(name, value, kind):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "TYPE_STRING":
        right, wanted = isinstance(value, str), "a string"
    elif kind == "TYPE_BOOL":
        right, wanted = isinstance(value, bool), "true or false"
    elif kind in WHOLE:
        least, most = WHOLE[kind]
        right = number and isinstance(value, int) and least <= value <= most
        wanted = f"an integer from {least} to {most}"
    else:
        right = number and abs(value) <= LARGEST.get(kind, 0.0)
        wanted = "a finite number"
    if not right:
        raise Refusal(f"INVALID_ARG: {name} {_short(value)} is not {wanted}")


def check_infer(header: dict, size: int) -> None:
    """Refuse an infer request whose JSON part, in a body of `size` bytes, is invalid.

    However it is sent, each element takes at least one byte, so no tensor can have more elements
    than the body has bytes.
    """
    _known(header, INFER, "field")
    _check_parameters(header.get("parameters", {}))
    for name in ("inputs", "outputs"):
        tensors = header.get(name, [])
        if not isinstance(tensors, list) or not all(isinstance(one, dict) for one in tensors):
            raise Refusal(f"INVALID_ARG: {name} is not a list of objects")
        for tensor in tensors:
            _known(tensor, TENSOR, f"field of {name}")
            _check_parameters(tensor.get("parameters", {}))
    for tensor in header.get("inputs", []):
        _check_shape(tensor, size)
        if _depth(tensor.get("data")) > DEEPEST:
            raise Refusal("INVALID_ARG: the data of a tensor are nested too deeply")


def control_parameters(body: dict, action: str) -> dict:
    """The parameters of a request to load or unload a model; files and unknown ones are refused."""
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refusal(f"INVALID_ARG: parameters {_short(parameters)} are not an object")
    known = {"load": "config", "unload": "unload_dependents"}[action]
    for name in parameters:
        if name != known:
            raise Refusal(
                f"INVALID_ARG: the gateway does not pass on {_short(name)}: {action} takes {known}"
            )
    return parameters


def changed_config(config: Any, served: dict) -> str:
    """A model's configuration `served`, with new values for its parameters from `config`, a JSON
    text in which nothing else may differ. Raises Refusal."""
    if not isinstance(config, str):
        raise Refusal("INVALID_ARG: config is not a JSON text")
    given = object_of(config.encode(errors="replace"))
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Refusal("INVALID_ARG: the parameters of config are not an object")
    # Triton's backends use those in capitals themselves: EXECUTION_ENV_PATH names a file to run
    known = {name for name in served.get("parameters", {}) if not name.isupper()}
    for name, value in parameters.items():
        same = value == served.get("parameters", {}).get(name)
        text = isinstance(value, dict) and [type(one) for one in value.values()] == [str]
        if not same and (name not in known or not text or set(value) != {"string_value"}):
            raise Refusal(
                f"INVALID_ARG: the parameter {_short(name)} cannot be changed to {_short(value)}: "
                f'give {{"string_value": "…"}} for one of {", ".join(sorted(known)) or "none"}'
            )
    for name in given.keys() - {"parameters"}:
        if given[name] != served.get(name):
            raise Refusal(
                f"INVALID_ARG: {_short(name)} of config cannot be changed by request: only "
                "parameters can, the rest in config.pbtxt"
            )
    return json.dumps(served | {"parameters": served.get("parameters", {}) | parameters})


def _check_shape(tensor, size):
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise Refusal(f"INVALID_ARG: shape {_short(shape)} is not a list of integers of 0 or more")
    if max(shape, default=0) > size or math.prod(shape) > size:
        raise Refusal(
            f"INVALID_ARG: shape {_short(shape)} has more elements than the body has bytes, {size}"
        )


def _check_parameters(parameters):
    """Refuse shared memory, which clients of the gateway do not have with the server."""
    if not isinstance(parameters, dict):
        raise Refusal(f"INVALID_ARG: parameters {_short(parameters)} are not an object")
    for name in parameters:
        if name.startswith("shared_memory"):
            raise Refusal(f"INVALID_ARG: {name} does not work through the gateway")
    size = parameters.get("binary_data_size", 0)
    if type(size) is not int or size < 0:
        raise Refusal(f"INVALID_ARG: binary_data_size {_short(size)} is not a number of bytes")


def _depth(data) -> int:
    """The depth of nested lists, counted up to one level more than DEEPEST."""
    deep, level = 0, [data]
    while deep <= DEEPEST and (lists := [one for one in level if isinstance(one, list)]):
        deep, level = deep + 1, [one for some in lists for one in some]
    return deep


def _known(body: dict, names: set[str], what: str) -> None:
    for name in body:
        if name not in names:
            likely = difflib.get_close_matches(name, names, 1)
            fix = f"expected one of {', '.join(sorted(names))}"
            then = f"did you mean {likely[0]}?" if likely else fix
            raise Refusal(f"INVALID_ARG: the {what} {_short(name)} is not known: {then}")


def _no_number(name):
    raise Refusal(f"INVALID_ARG: {name} is not a number in JSON")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
