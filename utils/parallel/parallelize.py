"""A model on many ranks: every way to split it, in the right order.

    stages = split_model(model, mesh)               experts, matrices, vocabulary, layers, positions
    fill_weights(stages, weights)                   if the model came without memory
    recompute(None, "full", layers=blocks(stages))  activation checkpointing
    ranks = data_parallel(stages, mesh, device)     DDP, ZeRO or FSDP2

`parallelize` does all of them. The order matters. Experts go first, so that tensor parallelism
splits only those that remain; then the stages of a pipeline are made from the remaining modules;
recomputation is set up before the blocks are wrapped; and the optimizer gets the parameters that
data parallelism leaves on this rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from utils.memory.checkpointing import recompute as recompute_layers
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, Block
from utils.parallel.context.context_parallel import context_parallel
from utils.parallel.context.positions import held, positions
from utils.parallel.ddp import DDP, DataParallel, SummedGradients, named_parameters
from utils.parallel.experts import expert_parallel
from utils.parallel.full_tensor import keep_splits, shard_of
from utils.parallel.mesh import Mesh
from utils.parallel.stages import make_stages, reduce_tied_gradients
from utils.parallel.tensor import reduce_replicated_gradients, tensor_parallel
from utils.parallel.zero import FullySharded, Zero1
from utils.shares import shares

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Put = Callable[[str, torch.Tensor], None]


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    *,
    context: str = "ring",
    sequence_parallel: bool = False,
    chunks: int = 1,
    weights: Callable[[Put], None] | None = None,
    recompute: str = "none",
    zero_stage: int = 0,
    precision: str = "fp32",
    offload: bool = False,
) -> DataParallel:
    """Split a whole model, which is the same on every rank, in place; return this rank's part.

    context                          the `way` of `context_parallel`
    sequence_parallel                see `tensor_parallel`
    chunks                           stages of the pipeline on each rank
    weights                          see `fill_weights`; None: the model has its weights
    recompute                        see `utils.memory.checkpointing.recompute`
    zero_stage, precision, offload   see `data_parallel`
    """
    stages = split_model(model, mesh, sequence_parallel, chunks, context)
    if weights:
        fill_weights(stages, weights)
    recompute_layers(None, recompute, layers=blocks(stages))
    return data_parallel(stages, mesh, device, zero_stage, precision, offload)


def split_model(
    model: nn.Module,
    mesh: Mesh,
    sequence_parallel: bool = False,
    chunks: int = 1,
    context: str = "ring",
) -> list[nn.Module]:
    """[the model], as expert and tensor parallelism leave it on this rank; or this rank's `chunks`
    stages of the pipeline. It may be on the meta device.

    context   how attention sees the positions of cp's other ranks: see `context_parallel`
    """
    expert_parallel(model, mesh.ep)
    tensor_parallel(model, mesh.tp, sequence_parallel)
    stages = make_stages(model, mesh.pp, chunks) if mesh.pp.size > 1 else [model]
    return [context_parallel(stage, mesh.cp, context) for stage in stages]


def data_parallel(
    stages: Sequence[nn.Module],
    mesh: Mesh,
    device: torch.device,
    zero_stage: int = 0,
    precision: str = "fp32",
    offload: bool = False,
) -> DataParallel:
    """Choose how the ranks of dp_cp, which split the tokens, hold the state of the model.

    zero_stage   0: each rank holds all of it; 1: the optimizer's state is sharded; 2: also the
                 gradients; 3: also the parameters
    precision    of the passes; only FSDP2 needs to know it
    offload      with 3: each rank's shards stay in host memory
    """
    if zero_stage >= 2:
        return FullySharded(stages, mesh, device, zero_stage, precision, offload)
    if zero_stage == 1:
        return Zero1(stages, mesh, device)
    if mesh.pp.size * mesh.ep.size > 1:
        return SummedGradients(stages, mesh, device)
    return DDP(stages, mesh, device) if mesh.dp_cp.size > 1 else DataParallel(stages, mesh, device)


def blocks(stages: Sequence[nn.Module]) -> list[Block]:
    """The transformer blocks of this rank's stages, in order."""
    return [m for stage in stages for m in stage.modules() if isinstance(m, Block)]


# ---- the passes of a step


def boundary(
    config: GPTConfig, mesh: Mesh, dtype: torch.dtype, sequence_parallel: bool = False
) -> Callable[[torch.Tensor], tuple[tuple[int, ...], torch.dtype]]:
    """The `boundary` of `Pipeline`: shape and type of the hidden states for tokens (B, T).

    dtype   of the hidden states: autocast adds 16-bit results to a 32-bit stream, FSDP2 keeps all
            of it in 16 bits
    """

    def hidden_states(x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        rows, length = x.shape
        length = held(positions(length, mesh.cp.size)[mesh.cp.index])
        if sequence_parallel:
            length = shares(length, mesh.tp.size)[mesh.tp.index]
        return (rows, length, config.hidden_size), dtype

    return hidden_states


def complete_gradients(stages: Sequence[nn.Module], mesh: Mesh) -> None:
    """Complete the gradients after the passes of a step: sum those of norms over tensor-parallel
    ranks, and those of a tied matrix over both ends of a pipeline."""
    for stage in stages if mesh.tp.size > 1 else ():
        reduce_replicated_gradients(stage, mesh.tp)
    if mesh.pp.size > 1:
        reduce_tied_gradients(stages, mesh.pp)


# ---- weights, one whole tensor at a time: no rank ever holds them all


@torch.no_grad()
def fill_weights(stages: Sequence[nn.Module], weights: Callable[[Put], None]) -> None:
    """Give stages on the meta device memory on the CPU, and this rank's shards of the weights.

    weights   a function that is given put(name, tensor) and calls it with each whole tensor
    """
    made = {}  # id of a parameter -> its replacement; a tied matrix has one
    for module in (module for stage in stages for module in stage.modules()):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                keep_splits([parameter], [made[id(parameter)]])
            setattr(module, name, made[id(parameter)])
    named, tied = named_parameters(stages), stages[0].config.tie_embeddings

    def put(name: str, tensor: torch.Tensor) -> None:
        for own, whole in with_tied_copy([(name, tensor)], tied):
            if own in named:
                named[own].copy_(shard_of(whole, named[own]))

    weights(put)


def with_tied_copy(
    pairs: Iterable[tuple[str, torch.Tensor]], tied: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the pairs, and if both are tied, the embedding's again under the name of lm_head: both
    ends of a pipeline have the matrix."""
    for name, tensor in pairs:
        yield name, tensor
        if tied and name.startswith(EMBEDDING):
            yield name.replace(EMBEDDING, HEAD), tensor


def draw_weights(config: GPTConfig, put: Put) -> None:
    """Pass the initial weights of `GPT(config)` one at a time to put(name, tensor).

    The same values are drawn from torch's generator in the same order: first those that torch's
    layers draw when they are created, which are discarded, then those of `GPT.initialize`.
    """
    model = GPT.without_memory(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim)

    class OneAtATime:
        """A stand-in for the model in `GPT.initialize`, which requests the next parameter after
        filling the previous one."""

        def __init__(self):
            self.config = config

        def named_parameters(self):
            for name, parameter in model.named_parameters():
                tensor = torch.empty_like(parameter, device="cpu")
                yield name, tensor
                put(name, tensor)

    GPT.initialize(OneAtATime())
