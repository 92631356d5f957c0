"""Given: the parameters of one module as one flat tensor of N equal shards, one per rank.

Small messages are slow (lesson 01), so parameters are sent together: a *unit* is gathered, reduced
and released as a whole. In a GPT each block is a unit.
"""

import math

import torch
import torch.distributed as dist


class Unit:
    """The parameters of `module`, concatenated.

    flat        (N · length,) all parameters, padded with zeros; each parameter is a view into it
    length      elements in one rank's shard
    parameters  the list of the module's parameters
    shard       this rank's shard as a parameter of its own, for the optimizer; made by `Zero1`
    """

    def __init__(self, module: torch.nn.Module, name: str):
        self.module, self.name = module, name
        self.parameters = list(module.parameters())
        numbers = sum(p.numel() for p in self.parameters)
        self.length = math.ceil(numbers / dist.get_world_size())
        first = self.parameters[0]
        self.flat = first.new_zeros(self.length * dist.get_world_size(), requires_grad=False)
        self.bytes = self.flat.untyped_storage().nbytes()
        with torch.no_grad():
            for view, parameter in zip(self.views(self.flat), self.parameters):
                view.copy_(parameter)
                parameter.data = view
        dist.broadcast(self.flat, src=0)  # all ranks begin with rank 0's weights

    def parts(self, flat: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The N equal shards of `flat` (by default the parameters), as views, by rank."""
        if flat is None and not self.is_whole():
            raise RuntimeError(f"{self.name} has no memory for its parameters: allocate() first")
        return list((self.flat if flat is None else flat).view(-1, self.length))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """`flat` split into tensors of the parameters' shapes."""
        sizes = [p.numel() for p in self.parameters]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.view(p.shape) for piece, p in zip(pieces, self.parameters)]

    def gradients(self) -> torch.Tensor:
        """This rank's full gradients as a new flat tensor (N · length,), padded with zeros."""
        flat = torch.zeros(self.length * dist.get_world_size(), dtype=self.flat.dtype,
                           device=self.flat.device)
        for view, parameter in zip(self.views(flat), self.parameters):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
        return flat

    def forget_gradients(self) -> None:
        """Free the memory of the full gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Free the memory of the full parameters. They must not be used until `allocate`.

        The tensors keep their shapes; only their storage becomes empty. Autograd's saved tensors
        use the same storage, so it must be filled again before this unit's backward pass.
        """
        self.flat.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again. Its contents are undefined: here NaN, to expose errors."""
        self.flat.untyped_storage().resize_(self.bytes)
        self.flat.fill_(math.nan)

    def is_whole(self) -> bool:
        """Whether the full parameters have memory now."""
        return self.flat.untyped_storage().nbytes() > 0

    def must_be_whole(self, after: str) -> None:
        """Raise RuntimeError if a computation would read released memory."""
        if not self.is_whole():
            raise RuntimeError(
                f"{self.name} is about to compute, but its parameters have no memory: "
                f"{after} must gather them"
            )
