"""A rank's pieces of a model, as `--dp --pp --tp --ep` ask for them.

    pieces = Pieces(model, config, mesh)
    pieces.stages       [the model], with what tensor and expert parallelism have left of it here,
                        or this rank's stages of the pipeline
    pieces.pipeline     what runs the stages, or None

Each way to break a model is a function of `utils.parallel`; this file puts them in order. Experts
go first, because tensor parallelism then cuts those that are left; the pipeline comes last, because
its stages are made of the modules that are there.
"""

from functools import cached_property

import torch
from torch import nn

from utils.memory.precision import FORMATS, is_mixed, weight_format
from utils.models.gpt import GPT, Block
from utils.models.moe import is_expert, set_balance
from utils.parallel.experts import expert_parallel
from utils.parallel.full_tensor import keep_splits, shard_of
from utils.parallel.pipeline import Pipeline
from utils.parallel.stages import make_stages, reduce_tied_gradients
from utils.parallel.tensor import loss_function, reduce_replicated_gradients, tensor_parallel
from utils.shares import shares

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Pieces:
    """What a rank holds of a model, and what holds the pieces together."""

    def __init__(self, model, config, mesh):
        """Breaks up a whole model in place, the same on every rank; it may be on the meta device,
        without memory: then call `fill`."""
        self.config, self.mesh, self.pipeline = config, mesh, None
        expert_parallel(model, mesh.ep)
        tensor_parallel(model, mesh.tp, config.sequence_parallel)
        self.stages = [model]
        if mesh.pp.size > 1:
            self.stages = make_stages(model, mesh.pp, config.pieces())
        self.loss_of = loss_function(self.stages[-1])
        # ranks that work on the same rows know the same loss; one of them says it
        self.counts = mesh.pp.is_last and mesh.tp.is_first

    @property
    def model(self):
        """The one piece where there is no pipeline."""
        return self.stages[0] if self.mesh.pp.size == 1 else None

    @cached_property
    def whole(self):
        """The whole model without memory: names, shapes, formats."""
        with torch.device("meta"):
            return GPT(self.config.model_config()).to(weight_format(self.config.precision))

    @torch.no_grad()
    def fill(self, weights):
        """Gives the pieces of a model from the meta device memory on the CPU, and this rank's parts
        of the weights, which come one whole tensor at a time: no rank ever holds them all.

        weights   called with put(name, tensor), to be called with each of them
        """
        made = {}  # id of a parameter -> the one in its place; a tied matrix is one
        for module in (module for stage in self.stages for module in stage.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                    keep_splits([parameter], [made[id(parameter)]])
                setattr(module, name, made[id(parameter)])
        named = self.named()

        def put(name, tensor):
            for own in (name, HEAD) if self.config.tie and name == EMBEDDING else (name,):
                if own in named:
                    named[own].copy_(shard_of(tensor, named[own]))

        weights(put)

    def named(self):
        """{name: parameter} of this rank, under the names of the whole model."""
        return {name: p for stage in self.stages for name, p in stage.named_parameters()}

    def blocks(self):
        return [m for stage in self.stages for m in stage.modules() if isinstance(m, Block)]

    def by_axis(self):
        """({name: parameter}, the axis whose ranks all have them): experts may have another one."""
        named = self.named()
        if self.mesh.ep.size == 1:
            return [(named, self.mesh.dp)]
        experts = {name: p for name, p in named.items() if is_expert(name)}
        dense = {name: p for name, p in named.items() if not is_expert(name)}
        return [(dense, self.mesh.dp), (experts, self.mesh.edp)]

    # ---- one step

    def connect(self, loss, forward_context, before_backward):
        """Makes the pipeline, if there is one; see `utils.parallel.pipeline.Pipeline`."""
        if self.mesh.pp.size > 1:
            self.pipeline = Pipeline(
                self.stages,
                self.mesh.pp,
                self.config.schedule,
                loss,
                forward_context=forward_context,
                boundary=self._boundary,
                before_backward=before_backward,
            )

    def _boundary(self, x):
        """Shape and format of what one stage hands to the next, for tokens (B, T)."""
        config = self.config
        rows, length = x.shape
        if config.sequence_parallel:
            length = shares(length, config.tp)[self.mesh.tp.index]
        # autocast adds 16-bit results to a stream of 32 bits; FSDP2 keeps all of it in 16
        short = is_mixed(config.precision) and config.level() >= 2
        format = FORMATS[config.precision] if short else weight_format(config.precision)
        return (rows, length, config.hidden), format

    def set_balance(self, share):
        """Before the passes of a step. share: what a token's loss is multiplied by."""
        for stage in self.stages:
            weight = self.config.balance / self.config.layers * self.config.seq * share
            set_balance(stage, weight)

    def complete_gradients(self):
        """After the passes of a step: adds up what tensor-parallel ranks have of norms, and what
        both ends of a pipeline have of a tied matrix."""
        for stage in self.stages if self.config.sequence_parallel else ():
            reduce_replicated_gradients(stage, self.mesh.tp)
        if self.pipeline:
            reduce_tied_gradients(self.stages, self.mesh.pp)

    # ---- the matrix that both ends of a pipeline have

    def is_tied_copy(self, name):
        return name == HEAD and self.config.tie and self.mesh.pp.size > 1

    def with_tied_copy(self, pairs):
        """Names and tensors, and under the last stage's name too what is the first stage's."""
        for name, tensor in pairs:
            yield name, tensor
            if self.config.tie and name.startswith(EMBEDDING):
                yield name.replace(EMBEDDING, HEAD), tensor


def draw_weights(config, put):
    """Hands out the weights that `GPT(config)` begins with, one at a time: put(name, tensor).

    The same numbers are drawn from torch's generator in the same order: first those that torch's
    layers draw when they are made, which nobody uses, then those of `GPT.initialize`.
    """
    with torch.device("meta"):
        model = GPT(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.Linear(module.in_features, module.out_features, module.bias is not None)
        elif isinstance(module, nn.Embedding):
            nn.Embedding(module.num_embeddings, module.embedding_dim)

    class OneAtATime:
        """What `GPT.initialize` asks of a model; it asks for a parameter when it has filled the
        one before."""

        def __init__(self):
            self.config = config

        def named_parameters(self):
            for name, parameter in model.named_parameters():
                tensor = torch.empty_like(parameter, device="cpu")
                yield name, tensor
                put(name, tensor)

    GPT.initialize(OneAtATime())
