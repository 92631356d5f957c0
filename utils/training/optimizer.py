"""Optimizers of a training run, stepped as one.

`adamw` is AdamW on everything. `muon` is Muon on the matrices inside the blocks, and AdamW on the
rest (embedding, lm_head, norms, biases). Muon makes every update of a matrix an almost orthogonal
one, which trains a small model in far fewer steps (Jordan 2024,
https://kellerjordan.github.io/posts/muon/). `adamw-triton` is AdamW by the course's own kernel
(utils/kernels/adamw.py), for GPUs: the same curve, and the same checkpoints.

    optimizer = make_optimizer(model, "muon")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""

from collections.abc import Callable, Iterable, Sequence

import torch

# good peaks for about a million parameters
LEARNING_RATES = {"muon": 0.02, "adamw": 3e-3, "adamw-triton": 3e-3}
STATE = {  # what each optimizer keeps per parameter, besides a tensor of the parameter's own shape
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
    """Optimizers for all parameters of a model, or of some: (name, parameter) pairs.

    kind          "muon", "adamw" or "adamw-triton"
    lr            peak learning rate of Muon's matrices, or of everything without Muon
    adamw_lr      peak learning rate of what Muon does not take
    weight_decay  of matrices; norms and biases are never decayed
    muon          the class that does Muon's step

    Raises ValueError for a kind that is not one of these, or whose kernel cannot run here.
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
    """The rule of a kind, whoever computes it: checkpoints fit where it is the same."""
    return kind.removesuffix("-triton")


def is_block_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon takes this parameter."""
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
    """The class; Triton is imported only where it is asked for."""
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
    """Several torch optimizers over disjoint parameters, stepped as one."""

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
        """Sets every learning rate to `scale` times its peak."""
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
        """Takes what `named_state` gave, as pairs or as a dict; skips parameters it does not hold.

        part_of(tensor, parameter_name) makes of a whole tensor what this rank keeps of it.
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
