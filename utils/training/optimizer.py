"""The optimizers of a training run, stepped together.

`adamw` is AdamW on everything. `muon` is Muon on the matrices inside the blocks, and AdamW on the
rest (embedding, lm_head, norms, biases). Muon makes every update of a matrix almost orthogonal,
which trains a small model in far fewer steps (Jordan 2024,
https://kellerjordan.github.io/posts/muon/). `adamw-triton` is AdamW in the course's own kernel
(utils/kernels/adamw.py), for GPUs, with the same curve and the same checkpoints.

    optimizer = make_optimizer(model, "muon")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from collections.abc import Callable, Iterable, Sequence

import torch

# good peaks for about a million parameters
LEARNING_RATES = {"muon": 0.02, "adamw": 3e-3, "adamw-triton": 3e-3}
STATE = {  # the state that each optimizer keeps per parameter
    torch.optim.Muon: ("momentum_buffer",),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
}


def make_optimizer(
    model: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
    kind: str = "muon",
    lr: float | None = None,
    adamw_lr: float = 6e-3,
    weight_decay: float = 0.0,
    muon: type[torch.optim.Optimizer] = torch.optim.Muon,
) -> "Optimizers":
    """The optimizers for all parameters of a model, or for some (name, parameter) pairs.

    kind          "muon", "adamw" or "adamw-triton"
    lr            peak learning rate of Muon's matrices; without Muon, of all parameters
    adamw_lr      peak learning rate of the parameters that Muon does not update
    weight_decay  for matrices; norms and biases are never decayed
    muon          the class that takes Muon's step

    Raises ValueError for an unknown kind, or one whose kernel cannot run here.
    """
    if kind not in LEARNING_RATES:
        raise ValueError(f"optimizer {kind!r} is not one of {', '.join(LEARNING_RATES)}")
    lr = LEARNING_RATES[kind] if lr is None else lr
    named = model.named_parameters() if isinstance(model, torch.nn.Module) else model
    names = {parameter: name for name, parameter in named}
    matrices = [parameter for parameter, name in names.items() if is_block_matrix(name, parameter)]
    others = [parameter for parameter in names if all(parameter is not m for m in matrices)]
    if update_rule(kind) == "adamw":
        make = torch.optim.AdamW if kind == "adamw" else _adamw_triton(names)
        return Optimizers("adamw", [_adamw(matrices + others, lr, weight_decay, make)], names)
    parts = [muon(matrices, lr=lr, weight_decay=weight_decay)] if matrices else []
    parts += [_adamw(others, adamw_lr, 0.0)] if others else []
    return Optimizers(kind, parts, names)


def update_rule(kind: str) -> str:
    """The update rule of a kind, whatever computes it: equal rules share checkpoints."""
    return kind.removesuffix("-triton")


def is_block_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon updates this parameter."""
    return parameter.ndim == 2 and ".layers." in f".{name}"


def state_shapes(
    named: Iterable[tuple[str, torch.Tensor]], kind: str
) -> dict[str, tuple[int, ...]]:
    """{"<parameter name>/<key>": shape} of the state after a step, for (name, parameter) pairs."""
    return {
        f"{name}/{key}": () if key == "step" else tuple(parameter.shape)
        for name, parameter in named
        for key in STATE[_class_for(name, parameter, kind)]
    }


def _class_for(name, parameter, kind):
    muon = kind == "muon" and is_block_matrix(name, parameter)
    return torch.optim.Muon if muon else torch.optim.AdamW


def _adamw_triton(parameters):
    """The class; Triton is imported only when it is needed."""
    try:
        from utils.kernels.adamw import AdamWTriton
        from utils.kernels.language import check_device
    except ImportError as error:
        raise ValueError(f"--optimizer adamw-triton cannot be used: {error}") from None
    for device in {parameter.device for parameter in parameters}:
        check_device(device, "--optimizer adamw")
    return AdamWTriton


def _adamw(parameters, lr, weight_decay, make=torch.optim.AdamW):
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options = {"fused": True} if make is torch.optim.AdamW else {}
    return make(groups, lr=lr, betas=(0.9, 0.95), **options)


class Optimizers:
    """Several torch optimizers over disjoint parameters, stepped together."""

    def __init__(
        self, kind: str, parts: Sequence[torch.optim.Optimizer], names: dict[torch.Tensor, str]
    ):
        self.kind = kind
        self.parts = parts
        self.names = names  # {parameter: name}
        for group in self.param_groups:
            group["peak_lr"] = group["lr"]

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def set_lr(self, scale: float) -> None:
        """Set every learning rate to `scale` times its peak."""
        for group in self.param_groups:
            group["lr"] = scale * group["peak_lr"]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    # ---- state by parameter name, for checkpoints

    def named_state(self) -> dict[str, torch.Tensor]:
        """{"<parameter name>/<key>": tensor}; empty before the first step."""
        return {
            f"{self.names[parameter]}/{key}": value
            for part, parameter in self._members()
            for key, value in part.state.get(parameter, {}).items()
        }

    def load_named_state(
        self,
        tensors: dict[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
        part_of: Callable[[torch.Tensor, str], torch.Tensor] | None = None,
    ) -> None:
        """Load the output of `named_state`, as pairs or a dict; skip parameters not held here.

        part_of(tensor, parameter_name) returns this rank's shard of a whole tensor.
        """
        members = {self.names[parameter]: (part, parameter) for part, parameter in self._members()}
        for name, tensor in tensors.items() if isinstance(tensors, dict) else tensors:
            parameter_name, key = name.rsplit("/", 1)
            if parameter_name in members:
                part, parameter = members[parameter_name]
                kept = part_of(tensor, parameter_name) if part_of else tensor
                part.state[parameter][key] = kept.to(parameter.device)

    def _members(self):
        return [
            (part, parameter)
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        ]
