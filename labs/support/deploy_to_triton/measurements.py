"""Given: the notebook's measurements of your answers; None if one of the files is missing."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labs.support.deploy_to_triton import contracts, lab_server, served
from labs.support.inference_engine import streams
from utils.course.assertions import NotHere, Wrong
from utils.course.runner import Trial
from utils.serving.server import ServerError


def measured(function: Callable) -> Callable:
    """Make a function of the learner's files run only if all are written, and print what is wrong
    instead of raising it."""

    @functools.wraps(function)
    def tried(*files: str, **options) -> Any:
        try:
            paths = [Path(file).resolve() for file in files]
            for path in paths:
                streams.not_started(path)
            return function(*paths, **options)
        except (NotImplementedError, NotHere):  # needs no message here
            return None
        except (Wrong, ServerError) as error:
            return print(error)

    return tried


@measured
def own(model: Path, client: Path) -> dict:
    """Send requests from your client to your model, of size 3. Returns the "totals" of 1 to 7, and
    the error when values are "refused"."""
    served.load_yours(model, 3)
    numbers, url = np.arange(1, 8)[None], lab_server.server().grpc
    asked = [(given, served.SILENCE) for given in (numbers, 4 - numbers)]
    (totals, refused), _ = Trial(client).alone("in one process", served.asked, url, asked)
    return {"totals": [int(total.item()) for total in totals], "refused": refused[1]}


@measured
def together(config: Path) -> int:
    """Serve your rank.py and scheduler.py of lab 16 with your config.py; return the number of
    streams with the whole model's tokens, or None if one of the three files is not written."""
    engine = Path(str(config.parent).replace("17_deploy_to_triton", "16_inference_engine"))
    rank, scheduler = engine / "rank.py", engine / "scheduler.py"
    for path in (rank, scheduler):
        streams.not_started(path)
    model = contracts.the_labs(2)
    text = Trial(config).alone("in one process", lambda answer: answer.config(model))
    return served.right_engine(text, rank, scheduler)


@measured
def loads(settings: Path, clients: Sequence[int] = (1, 8)) -> dict:
    """{clients: summary of a closed loop on the engine with your settings}, and your "slots"."""
    chosen = served.settings(Trial(settings))
    served.serve(chosen["tp"], max_num_seqs=chosen["slots"], queue=chosen["queue"])
    served.requests(1, 1)  # a warm-up
    found = {many: served.requests(many, max(6, 3 * many), 32).summary for many in clients}
    lab_server.take(served.ENGINE)
    return found | {"slots": chosen["slots"]}
