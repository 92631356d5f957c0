"""Given: what the ranks do for a check: train with your class, and weigh what it keeps."""

import gc
import itertools

import torch
import torch.distributed as dist

from utils.measure.traffic import Traffic

WIDTHS = [7, 11, 13, 5, 3]  # odd sizes, so that nothing is divisible by chance
ROWS, BACKWARDS = 12, (1, 1, 2)  # rows of a global batch; backward passes before each step


def _network(widths, dtype=torch.float64) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
    """A small network and its units: a linear layer and a tanh each."""
    torch.manual_seed(0)
    units = [
        torch.nn.Sequential(torch.nn.Linear(inputs, outputs, dtype=dtype), torch.nn.Tanh())
        for inputs, outputs in itertools.pairwise(widths)
    ]
    return torch.nn.Sequential(*units), units


def _rows(step: int, part: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(10 * step + part)
    return torch.randn(ROWS, WIDTHS[0], generator=seed, dtype=torch.float64)


def _momentum(parameters):
    """Unlike Adam's, its steps grow with the gradient: a forgotten division shows."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def _alone() -> list[list[list[torch.Tensor]]]:
    """On one rank: the parameters of each unit at the start and after each step."""
    model, units = _network(WIDTHS)
    optimizer = _momentum(model.parameters())
    states = [[[p.detach().clone() for p in unit.parameters()] for unit in units]]
    for step, backwards in enumerate(BACKWARDS):
        for part in range(backwards):
            (model(_rows(step, part)).square().mean() / backwards).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append([[p.detach().clone() for p in unit.parameters()] for unit in units])
    return states


def train(answer, stage: str) -> dict:
    """On a rank: three steps with the answer, and the same steps of one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, units = _network(WIDTHS)
    zero = getattr(answer, stage)(units, _momentum)
    result = {
        "lengths": [unit.length for unit in zero.units],
        "shards": [tuple(unit.shard.shape) for unit in zero.units],
        "copies": [not _same_memory(unit.shard, unit.flat) for unit in zero.units],
        "alone": _alone(),
        "steps": [],
    }
    if not _usable(result, stage):
        return result
    for step, backwards in enumerate(BACKWARDS):
        with Traffic() as traffic:
            for part in range(backwards):
                mine = _rows(step, part).chunk(size)[rank]
                (model(mine).square().mean() / backwards).backward()
            after_backward = traffic.calls()
            zero.step()
        result["steps"].append(
            {
                "now": [_parameters(unit, stage) for unit in zero.units],
                "sent": traffic.sent(),
                "calls": traffic.calls(),
                "in_step": traffic.calls() - after_backward,
                "ops": sorted({event.op for event in traffic.events}),
            }
        )
    return result


def _same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    there = tensor.untyped_storage()
    if there.nbytes() == 0:  # released together with the other
        return True
    return there.data_ptr() == other.untyped_storage().data_ptr()


def _usable(result: dict, stage: str) -> bool:
    """Whether it can be run at all: a shard on released memory would end the process."""
    right = all(shape == (length,) for shape, length in zip(result["shards"], result["lengths"]))
    return right and (all(result["copies"]) or stage != "Zero3")


def _parameters(unit, stage: str) -> list[torch.Tensor]:
    """The unit's parameters as the forward pass would see them."""
    flat = unit.flat
    if stage == "Zero3":
        flat = torch.cat(_all_gathered(unit.shard.data))
    return [view.detach().clone() for view in unit.views(flat)]


def _all_gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def weigh(answer, stage: str) -> dict:
    """On a rank: bytes of tensors at several moments of the second step, with AdamW in fp32."""
    gc.collect()
    gc.freeze()  # what is there already does not count
    model, units = _network([64] * 5, torch.float32)
    zero = getattr(answer, stage)(units, torch.optim.AdamW)
    x = torch.randn(2, 64)
    gradients, flats = [0], []

    def look(moment):
        gradients.append(sum(_bytes(p.grad) for p in model.parameters()))
        flats.append((moment, sum(u.flat.untyped_storage().nbytes() for u in zero.units)))

    for unit in units:  # registered after the answer's own hooks, so called after them
        unit.register_forward_pre_hook(lambda *_: look("forward"))
        unit.register_forward_hook(lambda *_: look("between"))
        for parameter in unit.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: look("backward"))
    for _ in range(2):  # in the first step there is no optimizer state yet
        model(x).square().mean().backward()
        after_backward = _live(model)
        zero.step()
    return {
        "sizes": [sum(p.numel() for p in u.parameters) * 4 for u in zero.units],
        "padded": [unit.bytes for unit in zero.units],
        "after the backward pass": after_backward,
        "after the step": _live(model),
        "stale": sum(_bytes(unit.shard.grad) for unit in zero.units),
        "gradients": max(gradients),
        "flats": flats,
    }


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def _live(model: torch.nn.Module) -> int:
    """Bytes of all tensors made since `gc.freeze`, each storage once."""
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
