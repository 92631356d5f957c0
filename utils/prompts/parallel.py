"""Prompt tuning on a model sharded over ranks: one prompt, the same as on one rank.

    mesh = make_mesh(dp=1, pp=2, tp=2)
    prompt, history = tune_on_ranks(model, tokenizer, examples, config, mesh)      # on every rank

Where the prompt is, and what its gradient needs:

    tensor parallel    every rank has all of it. Its gradient is complete on each, because every
                       layer's f sums the gradients on their way to the embedding: no message
    pipeline parallel  the first stage has it and its gradient. The other stages hold no state
    data parallel      every rank has all of it. Each sees its own rows: one all-reduce of P·C
                       elements, whatever the size of the model

The weights are frozen, so their gradients are neither computed nor sent. In a pipeline the token
tensor has placeholders for the virtual tokens, since every stage derives its sizes from it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from utils.memory.precision import autocast
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.parallel.mesh import Mesh
from utils.parallel.pipeline import Pipeline
from utils.parallel.stages import make_stages
from utils.parallel.tensor import loss_function, tensor_parallel
from utils.prompts.data import IGNORED, Example, Row, padded
from utils.prompts.embedding import PromptedEmbedding
from utils.prompts.tuning import (
    PromptConfig,
    descend,
    encode_all,
    first_prompt,
    prompt_loss,
)
from utils.shares import shares


class PlacedEmbedding(PromptedEmbedding):
    """A PromptedEmbedding for tokens (B, P + T), of which the first P are placeholders."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens[:, self.length :])  # (B, P + T, C)


class PromptedRanks:
    """This rank's shard of a frozen model with a prompt in front.

    model          a whole GPT, the same on every rank; it is sharded, and freed where possible
    prompt         a Parameter (P, C), the same on every rank
    micro_batches  number into which a data-parallel rank's rows are split, in a pipeline
    schedule, chunks, layers   of the pipeline: see `Pipeline` and `make_stages`

    Afterwards `prompt` is the Parameter, or None on ranks of later stages.
    """

    def __init__(
        self,
        model: GPT,
        prompt: torch.Tensor,
        mesh: Mesh,
        *,
        micro_batches: int | None = None,
        schedule: str = "1f1b",
        chunks: int = 1,
        layers: Sequence[range] | None = None,
        precision: str = "fp32",
    ):
        self.mesh, self.device, self.length = mesh, prompt.device, prompt.shape[0]
        self.precision, self.micro_batches = precision, micro_batches or mesh.pp.size
        self.prompt = prompt if mesh.pp.is_first else None
        self.like = prompt.detach()  # gives its shape and dtype, on every rank
        model.requires_grad_(False)
        self.parts = [model]
        if mesh.pp.size > 1:
            self.parts = make_stages(model, mesh.pp, chunks, layers)
        for part in self.parts:
            tensor_parallel(part, mesh.tp)
        self.loss = loss_function(self.parts[-1])
        if self.prompt is not None:
            put = PlacedEmbedding if mesh.pp.size > 1 else PromptedEmbedding
            first = self.parts[0].model
            first.embed_tokens = put(first.embed_tokens, prompt)
        if mesh.pp.size > 1:
            weights = next(part.model.layers[0].input_layernorm.weight for part in self.parts)
            self.pipeline = Pipeline(
                self.parts, mesh.pp, schedule, self._loss_of_pipeline,
                forward_context=lambda: autocast(precision, self.device),
                boundary=lambda x: ((*x.shape, prompt.shape[1]), weights.dtype),
            )

    def backward(self, rows: Sequence[Row]) -> float:
        """Run forward and backward passes on this rank's rows of a step.

        Returns the mean loss over all rows, the same on every rank; the prompt's gradient, on ranks
        that have it, is that of this mean.
        """
        self.tokens_counted = sum(len(answer) for _, answer in rows)
        if len(rows) < self.mesh.dp.size:
            raise ValueError(
                f"batch {len(rows)} leaves some of {self.mesh.dp.size} data-parallel ranks without "
                "a row: raise the batch"
            )
        sizes = shares(len(rows), self.mesh.dp.size)
        first = sum(sizes[: self.mesh.dp.index])
        mine = rows[first : first + sizes[self.mesh.dp.index]]
        total = self._pipeline(mine) if self.mesh.pp.size > 1 else self._one_piece(mine)
        return self._over_data_parallel(total)

    def _one_piece(self, rows):
        tokens, targets = padded(rows, self.device)
        with autocast(self.precision, self.device):
            loss = prompt_loss(self.parts[0], tokens, targets, "sum", self.loss)
            loss = loss / self.tokens_counted
        loss.backward()
        return loss.detach()

    def _pipeline(self, rows):
        batches = []
        for part in _cut(rows, self.micro_batches):
            tokens, targets = padded(part, self.device)
            places = tokens.new_zeros(len(tokens), self.length)
            batches.append((torch.cat((places, tokens), dim=1), targets))  # (B, P + T), (B, T)
        return self.pipeline.run(batches)

    def _loss_of_pipeline(self, logits, targets):
        counted = targets != IGNORED
        logits = logits[:, self.length :][counted]  # (N, V) or, of this rank's shard, (N, V_local)
        loss = self.loss(logits[None], targets[counted][None], reduction="sum")
        return loss / self.tokens_counted

    def _over_data_parallel(self, total):
        """Sum the gradients and, in the same message, the losses."""
        axis = self.mesh.dp
        if axis.size == 1:
            return total.item()
        if self.prompt is None:  # a later stage: only the loss
            total = total.clone()
            dist.all_reduce(total, group=axis.group)
            return total.item()
        gradient = self.prompt.grad
        both = torch.cat((gradient.flatten(), total.to(gradient.dtype)[None]))
        dist.all_reduce(both, group=axis.group)
        gradient.copy_(both[:-1].view_as(gradient))
        return both[-1].item()

    @torch.no_grad()
    def prompt_everywhere(self) -> torch.Tensor:
        """The prompt (P, C) on every rank, later stages included."""
        axis = self.mesh.pp
        if axis.size == 1:
            return self.prompt.detach()
        held = self.like if self.prompt is None else self.prompt
        prompt = held.detach().clone()
        dist.broadcast(prompt, axis.ranks[0], group=axis.group)
        return prompt


def tune_on_ranks(
    model: GPT,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    config: PromptConfig | None,
    mesh: Mesh,
    on_step: Callable[[dict], bool | None] | None = None,
    start: torch.Tensor | None = None,
    **pipeline: Any,
) -> tuple[torch.Tensor, list[dict]]:
    """`tune` on the ranks of a mesh, called in the same way on each; (prompt, history) on each.

    model      whole and the same on every rank; afterwards it is sharded and cannot be used
    pipeline   micro_batches, schedule, chunks, layers of `PromptedRanks`
    `on_step` must return the same on all ranks.
    """
    config = config or PromptConfig()
    rows = encode_all(model, tokenizer, examples, config)
    prompt = first_prompt(model, tokenizer, rows, config, start)
    ranks = PromptedRanks(model, prompt, mesh, precision=config.precision, **pipeline)
    learned = [] if ranks.prompt is None else [ranks.prompt]
    history = descend(learned, rows, config, ranks.backward, on_step)
    return ranks.prompt_everywhere(), history


def _cut(rows, parts):
    """Split rows into `parts` lists, none empty: fewer if there are fewer rows."""
    sizes = shares(len(rows), min(parts, len(rows)))
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [rows[start : start + size] for start, size in zip(starts, sizes)]
