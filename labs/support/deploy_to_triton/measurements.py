"""Given: what the notebook shows of your answers, beside the checks."""

from pathlib import Path

import numpy as np

from labs.support.deploy_to_triton import (
    check_batch,
    check_config,
    check_goal,
    check_model,
    lab_server,
)
from labs.support.deploy_to_triton.check_batch import COMPANY
from utils.course.assertions import NotHere, Wrong
from utils.course.runner import Trial
from utils.serving import load
from utils.serving.client import Client
from utils.serving.server import ServerError

NOT_YET = (NotImplementedError, NotHere, Wrong, ServerError, lab_server.Failed)


def _why(error: Exception) -> None:
    """A task that is not done needs no word here; anything else does."""
    if not isinstance(error, (NotImplementedError, NotHere)):
        print(error)


def _ready(*files: str) -> list[Path]:
    paths = [Path(file).resolve() for file in files]
    for path in paths:
        lab_server.not_started(path)
    return paths


def own(model: str, client: str) -> dict | None:
    """Your client asks your model, of size 3: the "totals" of 1 to 7, and the words with which
    numbers are "refused"; None if something is missing."""
    try:
        paths = _ready(model, client)
        check_model.load(paths[0], 3)
        numbers = np.arange(1, 8)[None]
        visits = [[(given, check_model.SILENCE)] for given in (numbers, 4 - numbers)]
        url = lab_server.server().grpc
        asked, _ = Trial(paths[1]).alone("in one process", check_model.asked, url, visits)
        (totals,), (refused,) = asked
        return {"totals": [int(total.item()) for total in totals], "refused": refused.text}
    except NOT_YET as error:
        return _why(error)


def batches(file: str) -> dict | None:
    """Rows of each decode step for the requests of the check d: with your scheduler, and `alone`;
    None if it is not written yet."""
    try:
        (path,) = _ready(file)
        found = {}
        for name, scheduler in (("yours", path), ("alone", None)):
            check_batch.load(scheduler)
            found[name] = check_batch.decoded(check_batch.visit(COMPANY))
        return found
    except NOT_YET as error:
        return _why(error)


def together(config: str, rank: str, scheduler: str) -> dict | None:
    """Your three files in one model on two ranks: its decode steps, and what rank 0 handed over in
    them. None if something is missing."""
    try:
        paths = _ready(config, rank, scheduler)
        (text,) = check_config.texts(Trial(paths[0]), [check_config.the_labs(2)])
        version = lab_server.put(lab_server.RANKS, text, rank=paths[1], scheduler=paths[2])
        check_batch.visit(COMPANY)  # every stream is compared with the whole model
        steps = [line for line in lab_server.diary(version) if line["do"] == "decode"]
        by_rows = {len(line["slots"]): line["bytes"] for line in steps}
        lab_server.take()
        return {"steps": len(steps), "bytes": dict(sorted(by_rows.items()))}
    except NOT_YET as error:
        return _why(error)


def loads(file: str, clients=(1, 8)) -> dict | None:
    """{clients: summary of a closed loop of the engine with your settings}, and those "slots"; None
    if they are not written."""
    try:
        (path,) = _ready(file)
        chosen = check_goal.settings(Trial(path))
        check_goal.serve(check_goal.exported(chosen["tp"]), chosen)
        client = Client(lab_server.server())

        def send(i):
            return client.tokens(list(lab_server.prompt(i % 2)), max_tokens=32)

        load.run(send, 1, requests=1)  # the first one warms up
        found = {many: load.run(send, many, requests=max(6, 3 * many)).summary for many in clients}
        lab_server.take(check_goal.ENGINE)
        return found | {"slots": chosen["slots"]}
    except NOT_YET as error:
        return _why(error)
