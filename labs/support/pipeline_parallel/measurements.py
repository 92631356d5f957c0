"""Given: your lists timed on four real ranks, and the memory that your executor keeps."""

import torch
import torch.distributed as dist

from labs.support.pipeline_parallel.contracts import actions
from utils.course.runner import attempted
from utils.drawing import pipeline as pictures
from utils.measure.memory import Memory
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.parallel.mesh import make_mesh
from utils.parallel.pipeline import Pipeline
from utils.parallel.schedules import schedule, simulate
from utils.parallel.stages import SleepingStage, make_stages, sleeping_micro_batches
from utils.ranks import Ranks

RANKS, MICRO_BATCHES, UNIT = 4, 8, 0.015  # UNIT: seconds per forward pass
MANY, LENGTH = 12, 32  # micro-batches of one row for your executor, and tokens in each
CONFIG = GPTConfig(vocab_size=64, hidden_size=16, layers=4, heads=2)


def your_lists(file: str, micro_batches: int = MICRO_BATCHES) -> list | None:
    """The lists of all ranks; None if the answer is not written or does not run."""
    found = attempted(file, 1, actions, RANKS, micro_batches)
    return found and found[0]


def compared() -> dict | None:
    """{name: lists} of GPipe and of your answers; None if one is not written or does not run."""
    memory, bubble = your_lists("less_memory.py"), your_lists("less_bubble.py")
    if memory is None or bubble is None:
        return None
    gpipe = schedule("gpipe", RANKS, MICRO_BATCHES)
    return {"GPipe": gpipe, "yours, less memory": memory, "yours, less bubble": bubble}


def simulated(lists: dict) -> dict:
    """{name: rows for the figure}, in units of a forward pass."""
    return {name: pictures.of_simulation(simulate(orders)) for name, orders in lists.items()}


def real_clocks(lists: dict) -> dict:
    """As `simulated`, but measured on real ranks."""
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


def by_your_executor() -> dict | None:
    """{name: (peak bytes of activations on rank 0, loss)} of GPipe's lists and yours, run by your
    executor on a small GPT. None if an answer is not written or does not run."""
    memory = your_lists("less_memory.py", MANY)
    if memory is None:
        return None
    lists, found = {"GPipe's list": schedule("gpipe", RANKS, MANY), "your list": memory}, {}
    for name, orders in lists.items():
        by_rank = attempted("executor.py", RANKS, _step, orders)
        if by_rank is None or by_rank[-1][1] is None:
            return None
        found[name] = by_rank[0][0], by_rank[-1][1]
    return found


def loss_of_one_rank() -> float:
    """The loss of the same batch on one rank, without a pipeline."""
    return sum(_loss(_model()(x), y).item() for x, y in _micro_batches())


def _step(answer, orders) -> tuple[int, float | None]:
    mesh = make_mesh(pp=RANKS)
    [stage] = make_stages(_model(), mesh.pp)
    own = [tuple(action[:2]) for action in orders[mesh.pp.index]]
    with Memory(model=stage) as memory:
        total = answer.run(own, stage, _micro_batches(), _loss, _boundary)
    most = max(held["activations"] for _, held in memory.timeline)
    return most, None if total is None else float(total)


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def _micro_batches() -> list:
    tokens = torch.randint(64, (MANY, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return [(row[:, :-1], row[:, 1:]) for row in tokens.split(1)]


def _loss(logits, y):
    return cross_entropy(logits, y, reduction="sum") / (MANY * LENGTH)


def _boundary(x):
    return (*x.shape, CONFIG.hidden_size), torch.float32
