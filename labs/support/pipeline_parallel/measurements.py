"""Given: your lists on four real ranks whose stages wait instead of computing."""

from pathlib import Path

import torch.distributed as dist

from labs.support.pipeline_parallel.check_schedules import actions
from utils.course.checks import load_answer
from utils.drawing import pipeline as pictures
from utils.parallel.mesh import make_mesh
from utils.parallel.pipeline import Pipeline
from utils.parallel.schedules import schedule, simulate
from utils.parallel.stages import SleepingStage, sleeping_micro_batches
from utils.ranks import Ranks

RANKS, MICRO_BATCHES, UNIT = 4, 8, 0.015  # UNIT: seconds of a forward pass


def your_lists(file: str) -> list | None:
    """The lists of all ranks; None where the answer is not written."""
    try:
        return actions(load_answer(Path(file).resolve()), RANKS, MICRO_BATCHES)
    except NotImplementedError:
        return None


def compared() -> dict | None:
    """{name: lists} of GPipe and yours; None where one is not written."""
    memory, bubble = your_lists("less_memory.py"), your_lists("less_bubble.py")
    if memory is None or bubble is None:
        return None
    gpipe = schedule("gpipe", RANKS, MICRO_BATCHES)
    return {"GPipe": gpipe, "yours, less memory": memory, "yours, less bubble": bubble}


def simulated(lists: dict) -> dict:
    """{name: rows for the picture}, in forward passes."""
    return {name: pictures.of_simulation(simulate(orders)) for name, orders in lists.items()}


def real_clocks(lists: dict) -> dict:
    """The same from the clocks of real ranks."""
    with Ranks(RANKS, device="cpu") as ranks:
        logs = {name: ranks.run(_events, orders) for name, orders in lists.items()}
    return {name: pictures.of_events(log, UNIT) for name, log in logs.items()}


def _events(orders) -> list:
    mesh = make_mesh(pp=dist.get_world_size())
    stage = SleepingStage(UNIT, 2 * UNIT)
    pipeline = Pipeline([stage], mesh.pp, orders, stage.loss, boundary=stage.boundary)
    for _ in range(2):
        dist.barrier()
        pipeline.run(sleeping_micro_batches(MICRO_BATCHES))
    return pipeline.events
