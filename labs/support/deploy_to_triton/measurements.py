"""Given: what the notebook shows of your answers, beside the checks; None if one is missing."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from labs.support.deploy_to_triton import contracts, lab_server, served
from utils.course.assertions import NotHere, Wrong
from utils.course.runner import Trial
from utils.serving.server import ServerError


def measured(function: Callable[..., dict]) -> Callable[..., dict | None]:
    """A function of learners' files, called once all are written. Prints what is wrong with one."""

    @functools.wraps(function)
    def tried(*files: str, **options) -> dict | None:
        try:
            paths = [Path(file).resolve() for file in files]
            for path in paths:
                lab_server.not_started(path)
            return function(*paths, **options)
        except (NotImplementedError, NotHere):  # needs no word here
            return None
        except (Wrong, ServerError) as error:
            return print(error)

    return tried


@measured
def own(model: Path, client: Path) -> dict:
    """Your client asks your model, of size 3: the "totals" of 1 to 7, and the words with which
    numbers are "refused"."""
    served.load_yours(model, 3)
    numbers, url = np.arange(1, 8)[None], lab_server.server().grpc
    asked = [(given, served.SILENCE) for given in (numbers, 4 - numbers)]
    (totals, refused), _ = Trial(client).alone("in one process", served.asked, url, asked)
    return {"totals": [int(total.item()) for total in totals], "refused": refused[1]}


@measured
def batches(scheduler: Path) -> dict:
    """Rows of each decode step for the requests of check d: with your scheduler, and `alone`."""
    found = {}
    for name, path in (("yours", scheduler), ("alone", None)):
        steps = served.decodes(served.load_scheduler(path))
        found[name] = [len(step["slots"]) for step in steps]
    return found


@measured
def together(config: Path, rank: Path, scheduler: Path) -> dict:
    """Your three files in one model on two ranks: its decode steps, and the bytes that rank 0
    handed over in them, by rows."""
    model = contracts.the_labs(2)
    text = Trial(config).alone("in one process", lambda answer: answer.config(model))
    steps = served.decodes(lab_server.put(lab_server.RANKS, text, rank=rank, scheduler=scheduler))
    lab_server.take(lab_server.NAME)
    by_rows = {len(step["slots"]): step["bytes"] for step in steps}
    return {"steps": len(steps), "bytes": dict(sorted(by_rows.items()))}


@measured
def loads(settings: Path, clients: Sequence[int] = (1, 8)) -> dict:
    """{clients: summary of a closed loop of the engine with your settings}, and those "slots"."""
    chosen = served.settings(Trial(settings))
    served.serve(chosen)
    served.requests(1, 1)  # the first one warms up
    found = {many: served.requests(many, max(6, 3 * many), 32).summary for many in clients}
    lab_server.take(served.ENGINE)
    return found | {"slots": chosen["slots"]}
