"""Given: one rank of a run in which ranks are killed, for exercise b's check and figure."""

import datetime
import os
import signal
import traceback

import torch.distributed as dist

from labs.support.fault_tolerance.crew import Crew, Settings, weights_of
from labs.support.fault_tolerance.fates import Fate, Fates
from utils.course.assertions import Wrong
from utils.private_api import set_default_timeout

NEVER = datetime.timedelta(hours=1)  # a group without a time limit: longer than any check


def train(answer, settings: Settings, fates: dict[int, tuple[Fate, ...]], pids: list[int]) -> dict:
    """On a rank: one run of the answer's `train`: what it returns, the weights in the end, and the
    notes and events of `Fates`. fates, pids: by rank."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    set_default_timeout(NEVER)
    # TCPStore looks up the name of the store's address, in the DNS if /etc/hosts has it not. Where
    # 30 ranks ask at once, answers are lost, and a rank is 5 s late: glibc asks nobody now.
    os.environ["RES_OPTIONS"] = "attempts:0"

    def wake(step):
        for other, theirs in fates.items():
            if other != rank and any(f.act == "stops" and f.step <= step for f in theirs):
                os.kill(pids[other], signal.SIGCONT)

    model = settings.network()
    watched = Fates(fates.get(rank, ()), settings.patience, wake)
    crew = Crew(settings, rank, watched.told)
    with watched:
        try:
            stayed = answer.train(crew, model, settings.steps)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            lines = traceback.extract_tb(error.__traceback__)
            last = [line for line in lines if line.filename == answer.__file__][-1]
            raise Wrong(
                f"line {last.lineno} fails (`{last.line}`), and train ends with it.\n"
                "Whatever fails in a group, in making one or in a store leads to the next meeting; "
                f"here it was a\n{type(error).__name__}: {str(error).splitlines()[0][-90:]}"
            ) from None
        finally:
            wake(settings.steps)
    return {
        "stayed": stayed,
        "weights": weights_of(model),
        "notes": watched.notes,
        "events": watched.events,
    }
