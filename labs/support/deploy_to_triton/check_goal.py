"""Given: what the check cell of exercise e looks at: your settings, served, under a real load.

The checkpoint is exported, loaded into the running server with your settings, and asked by many
clients at the same moment. Times would tell more of the machine than of the settings, so what
decides is counted: bytes, steps, tokens, refusals.
"""

import functools
import json
import numbers
import queue
import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors import safe_open

from labs.support.deploy_to_triton import lab_server
from utils.course.assertions import Wrong
from utils.course.runner import Trial
from utils.serving import load
from utils.serving.client import Client
from utils.serving.export import export
from utils.serving.metrics import scrape
from utils.serving.model_config import set_parameters
from utils.serving.server import ServerError

ENGINE = "gpt_engine"
MIB = 2**20
DEVICE = 12 * MIB  # bytes that a rank may use
TOKENS = 16  # of a request
FEW, MANY = 16, 32  # requests at the same moment
ROWS = 3.3  # tokens a step
REFUSED = 8  # of MANY
LEAST = {"tp": 1, "slots": 1, "queue": 0}


def goal(trial: Trial) -> str:
    """Judges `settings`."""
    chosen = settings(trial)
    try:
        version = exported(chosen["tp"])
    except ValueError as error:
        raise Wrong(f"the export refuses tp {chosen['tp']}: {error}") from None
    _right_memory(version, chosen)
    serve(version, chosen)
    try:
        _right_few(_best_of_few(), chosen)
        _right_many(_best_of_many(chosen), chosen)
        _nothing_lost()
    finally:
        lab_server.take(ENGINE)
    slots, waits = chosen["slots"], chosen["queue"]
    return (
        f"tp {chosen['tp']}, {slots} slots, a queue of {waits}: each has room for its rank;\n"
        f"{FEW} at once are all served, with {ROWS} tokens a step or more;\nof "
        f"{MANY} at once those who are too many hear it at once; and no request is lost."
    )


def settings(trial: Trial) -> dict:
    """What `settings` returns, in a process of its own."""
    return trial.alone("in one process", _settings)


def _settings(answer) -> dict:
    chosen = answer.settings()
    if not isinstance(chosen, dict) or set(chosen) != set(LEAST):
        raise Wrong(f"settings returns {chosen!r}, not a dictionary of {', '.join(LEAST)}.")
    found = {}
    for name, value in chosen.items():
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if not whole or value < LEAST[name]:
            raise Wrong(f"{name} is {value!r}, not a whole number of at least {LEAST[name]}.")
        found[name] = int(value)
    return found


# ---- memory


@functools.cache
def exported(tp: int) -> Path:
    """The checkpoint as a version folder for `tp` ranks."""
    return export(lab_server.CHECKPOINT, lab_server.folder() / f"export-{tp}", tp)


def memory(version: Path, slots: int) -> dict:
    """Bytes of the rank that needs most: its weights as they are computed with, its KV cache."""
    manifest = json.loads((version / "manifest.json").read_text())
    config = json.loads((version / "config.json").read_text())
    weights = []
    for rank in range(manifest["tp"]):
        with safe_open(str(version / f"rank-{rank}-of-{manifest['tp']}.safetensors"), "np") as file:
            names = file.keys()
            shapes = [file.get_slice(name).get_shape() for name in names]
            weights.append(4 * sum(int(np.prod(shape)) for shape in shapes))
    heads = config["num_key_value_heads"] // manifest["tp"]
    position = 2 * config["num_hidden_layers"] * heads * config["head_dim"] * 4
    return {"weights": max(weights), "slot": config["max_position_embeddings"] * position}


def _right_memory(version: Path, chosen: dict) -> None:
    need = memory(version, chosen["slots"])
    total = need["weights"] + chosen["slots"] * need["slot"]
    if total > DEVICE:
        raise Wrong(
            f"a rank needs {total / MIB:.2f} MiB and a device has {DEVICE / MIB:.0f}: "
            f"{need['weights'] / MIB:.2f} MiB of weights and {chosen['slots']} slots of "
            f"{need['slot'] / MIB:.2f} MiB.\nMore ranks have less of both each, fewer slots less "
            "of the second."
        )


# ---- the server


def serve(version: Path, chosen: dict) -> None:
    """Loads the engine with these settings in its config.pbtxt."""
    lab_server.server()
    lab_server.take()
    model = lab_server.repository() / ENGINE
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(version.parent, model)
    options = {"max_num_seqs": chosen["slots"], "queue": chosen["queue"]}
    set_parameters(model / "config.pbtxt", options)
    try:
        lab_server.load(ENGINE)
    except ServerError as error:
        raise Wrong(f"the engine does not start with these settings.\n{error}") from None


def burst(count: int) -> dict:
    """Sends `count` requests at the same moment, over one connection, and waits for all answers.

    Returns how many were `served` and `refused`, how many refusals came `before` anybody's end,
    and the `rows`: tokens for each step that the model made. Raises Wrong where the tokens of one
    are not those of the whole model.
    """
    import tritonclient.grpc as grpc

    before = _counted()
    responses, client = queue.Queue(), grpc.InferenceServerClient(lab_server.server().grpc)
    client.start_stream(lambda result, error: responses.put((result, error)))
    for number in range(count):
        tensors = []
        prompt = lab_server.prompt(number % 2)
        for name, values in {"input_ids": prompt, "max_tokens": [TOKENS]}.items():
            tensor = grpc.InferInput(name, [len(values)], "INT32")
            tensor.set_data_from_numpy(np.array(values, np.int32))
            tensors.append(tensor)
        client.async_stream_infer(
            ENGINE, tensors, request_id=str(number), enable_empty_final_response=True
        )
    seen = {"served": 0, "refused": 0, "before": 0, "others": []}
    tokens = {}  # of each request that was not refused
    try:
        while seen["served"] + seen["refused"] + len(seen["others"]) < count:
            _count(seen, tokens, *responses.get(timeout=lab_server.SECONDS))
    except queue.Empty:
        ended = seen["served"] + seen["refused"] + len(seen["others"])
        raise Wrong(f"{count - ended} of {count} requests have no answer: they are lost.") from None
    finally:
        client.stop_stream(cancel_requests=sys.exc_info()[0] is not None)
        client.close()
    for number, mine in tokens.items():
        if not seen["others"] and tuple(mine) != lab_server.right(number % 2, TOKENS):
            raise Wrong("the engine's tokens are not those of the whole model.")
    made = sum(map(len, tokens.values()))
    after = _counted(before["tokens_total"] + made)
    steps = after["steps_total"] - before["steps_total"]
    return seen | {"rows": made / steps if steps else 0.0, "steps": int(steps)}


def _best_of_few() -> dict:
    """Of up to three bursts of FEW the one with the fullest steps: on a busy machine requests do
    not come at the same moment."""
    best = burst(FEW)
    for _ in range(2):
        if not best["refused"] and not best["others"] and best["rows"] < ROWS:
            best = max(best, burst(FEW), key=lambda seen: seen["rows"])
    return best


def _best_of_many(chosen: dict) -> dict:
    """The same of MANY, by refusals, where so few may be in the server that some are due."""
    best = burst(MANY)
    for _ in range(4):
        expected = chosen["slots"] + chosen["queue"] + REFUSED <= MANY
        if expected and not best["others"] and best["refused"] < REFUSED:
            best = max(best, burst(MANY), key=lambda seen: seen["refused"])
    return best


def _count(seen: dict, tokens: dict, result, error) -> None:
    if error is None:
        response, ids = result.get_response(), result.as_numpy("output_ids")
        mine = tokens.setdefault(int(response.id), [])
        mine += [] if ids is None else ids.tolist()
        seen["served"] += response.parameters["triton_final_response"].bool_param
    elif "UNAVAILABLE" in str(error):
        seen["refused"] += 1
        seen["before"] += not seen["served"]
    else:
        seen["others"].append(str(error))


def _counted(tokens: float = 0) -> dict:
    """The engine's counters, when they have come to so many tokens: it tells them once a second."""
    found = {}

    def there():
        found.update(scrape(lab_server.server()))
        return found.get("tokens_total", 0) >= tokens and "steps_total" in found

    if not lab_server.wait_for(there, lab_server.SECONDS):
        raise Wrong(f"the engine counts {found.get('tokens_total', 0):.0f} tokens of {tokens:.0f}.")
    return found


# ---- the goal


def _right_few(seen: dict, chosen: dict) -> None:
    if seen["refused"]:
        raise Wrong(
            f"of {FEW} requests at the same moment {seen['refused']} are refused: "
            f"{chosen['slots']} can run and {chosen['queue']} wait."
        )
    if seen["others"]:
        raise Wrong(f"of {FEW} requests at the same moment one fails: {seen['others'][0]}")
    if seen["rows"] < ROWS:
        raise Wrong(
            f"{FEW} requests of {TOKENS} tokens take {seen['steps']} steps: {seen['rows']:.1f} "
            f"tokens a step, and {ROWS} is the goal.\nThey come in groups of {chosen['slots']}, "
            "one after the other."
        )


def _right_many(seen: dict, chosen: dict) -> None:
    if seen["others"]:
        raise Wrong(f"of {MANY} requests at the same moment one fails: {seen['others'][0]}")
    if seen["refused"] < REFUSED:
        turns = -(-seen["served"] // chosen["slots"])
        raise Wrong(
            f"of {MANY} requests at the same moment {seen['refused']} are refused, {REFUSED} is "
            f"the least: the last waits {turns - 1} turns of\nthe others, and its client may have "
            "gone by then. A queue that is too long only hides that there are too many."
        )
    if not seen["before"]:
        raise Wrong(f"the {seen['refused']} refusals came after the first answers had ended.")


def _nothing_lost() -> None:
    """Clients that come again and again, as in the lesson's load."""
    client = Client(lab_server.server())
    done = load.run(
        lambda i: client.tokens(list(lab_server.prompt(i % 2)), max_tokens=8),
        clients=8,
        requests=16,
    )
    if done.errors:
        raise Wrong(f"8 clients, one request after the other: {done.errors}")
