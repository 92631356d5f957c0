"""A decode step on a GPU: our own kernels between the matrix products, in one CUDA graph.

    step = FusedStep(decoder, kernels)            # kernels: the module utils.kernels.decode
    step.join(slot, sampler, logits, position)    # a prompt was read: its first token, a tensor
    logits, tokens = step([0, 3], [17, LAST], [64, 5])

The reference in PyTorch (model.py) launches about 35 operators per layer, and gathers keys and
values into one tensor before it attends to them. Here a layer has about ten operators, keys and
values are read in place, tokens are chosen on the device, and a graph launches everything at once.
There is a graph for each of several batch sizes, and a batch uses the next larger one. Everything
that changes from step to step is read from tensors at fixed addresses.

On a CPU the interpreter of the Triton language runs the same kernels, without graphs, for tests.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from utils.serving.engine.blocks import BLOCK
from utils.serving.engine.sampling import Sampler
from utils.serving.engine.scheduler import LAST, NOT_FINITE


def sizes_of(most: int) -> list[int]:
    """The numbers of rows that have a graph: 1, 2, 4, 8, 16, 24 and so on, up to `most`."""
    return sorted({size for size in (1, 2, 4, *range(8, most, 8), most) if size <= most})


class FusedStep:
    """A whole decode step of one rank, from tokens to tokens.

    decoder   ServedDecoder whose keys and values have the compute dtype
    """

    def __init__(self, decoder: Any, kernels: ModuleType):
        self.decoder, self.kernels = decoder, kernels
        cache, device = decoder.cache, decoder.device
        slots, width = cache.blocks.shape
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.sizes, self.graphs = sizes_of(slots), {}
        self.splits = {
            rows: kernels.splits_for(rows, cache.layers[0].keys.shape[1], BLOCK * width, processors)
            for rows in self.sizes
        }
        turns = torch.view_as_real(cache.turns)  # (P, D/2, 2)
        self.cos, self.sin = (part.contiguous().to(device) for part in turns.unbind(-1))
        # tokens, slots and positions of a step: written by the host, then read by the device
        self.given = torch.zeros(3, slots, dtype=torch.long, pin_memory=device.type == "cuda")
        self.read = self.given.to(device)
        # of each slot: its last token, and how its tokens are drawn
        self.last = torch.zeros(slots, dtype=torch.long, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.long, device=device)
        self.temperatures = torch.zeros(slots, device=device)
        if device.type == "cuda":
            for rows in reversed(self.sizes):  # the largest first: all share its memory
                self.graphs[rows] = self._captured(rows)

    @torch.inference_mode()
    def __call__(
        self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits (B, V) on rank 0, else None, and the next tokens (B,) on every rank. The next step
        overwrites both.

        tokens   of these slots; LAST: the token that was chosen last
        """
        B = len(slots)
        rows = next(size for size in self.sizes if size >= B)
        # padding rows repeat the first one: they write the same values to the same place
        columns = [*range(B), *[0] * (rows - B)]
        step = torch.tensor([tokens, slots, positions])[:, columns]
        self.given[:, :rows] = step
        self.read[:, :rows].copy_(self.given[:, :rows], non_blocking=True)
        if rows in self.graphs:
            graph, logits, chosen = self.graphs[rows]
            graph.replay()
        else:
            logits, chosen = self._forward(rows)
        return None if logits is None else logits[:B], chosen[:B]

    @torch.inference_mode()
    def join(
        self, slot: int, sampler: Sampler, logits: torch.Tensor | None, position: int
    ) -> torch.Tensor:
        """The token (1,) after a prompt, from the prompt's logits (1, V) on rank 0.

        position   of the prompt's last token
        """
        self.seeds[slot], self.temperatures[slot] = sampler.seed, sampler.temperature
        where = torch.tensor([slot], device=self.decoder.device)
        position = torch.tensor([position], device=self.decoder.device)
        return self._chosen(logits, where, position)

    @torch.inference_mode()
    def choose(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Broadcast tokens that rank 0 chose outside the step; other ranks ignore `tokens`."""
        chosen = torch.tensor(tokens, device=self.decoder.device)
        if self.decoder.tp > 1:
            dist.broadcast(chosen, 0)
        self.last[torch.tensor(slots, device=self.decoder.device)] = chosen.clamp(min=0)

    def _forward(self, rows):
        decoder, kernels, cache = self.decoder, self.kernels, self.decoder.cache
        tokens, slots, positions = self.read[:, :rows].unbind()
        tokens = torch.where(tokens == LAST, self.last[slots], tokens)
        blocks, lengths = cache.blocks[slots], (positions + 1).int()
        x, y = decoder.embed(tokens), None
        for block, kept in zip(decoder.layers.layers, cache.layers):
            attention, mlp = block.self_attn, block.feed_forward
            norm = block.input_layernorm
            h = kernels.add_norm(x, y, norm.weight, norm.eps)
            q = kernels.turn_and_keep(
                attention.qkv_proj(h), self.cos, self.sin, positions, blocks, kept.keys,
                kept.values, attention.heads,
            )
            h = kernels.paged_attention(
                q, kept.keys, kept.values, blocks, lengths, self.splits[rows]
            )
            y = attention.o_proj(h.flatten(1))
            norm = block.post_attention_layernorm
            h = kernels.add_norm(x, y, norm.weight, norm.eps)
            y = mlp.down_proj(kernels.gated(mlp.gate_up_proj(h)))
        norm = decoder.norm
        logits = decoder.gathered(decoder.lm_head(kernels.add_norm(x, y, norm.weight, norm.eps)))
        return logits, self._chosen(logits, slots, positions)

    def _chosen(self, logits, slots, positions):
        """Choose tokens (B,), on every rank, and record them as these slots' last ones."""
        chosen = torch.empty_like(slots)
        if logits is not None:
            chosen = self.kernels.race(
                logits, self.temperatures[slots], self.seeds[slots], positions
            )
            chosen = torch.where(logits.amax(dim=-1).isfinite(), chosen, NOT_FINITE)
        if self.decoder.tp > 1:
            dist.broadcast(chosen, 0)
        self.last[slots] = chosen.clamp(min=0)
        return chosen

    @torch.inference_mode()
    def _captured(self, rows):
        """(graph, logits, tokens) of a step with this many rows, captured with slot 0 in each."""
        stream = torch.cuda.Stream()  # the first run may compile or allocate, so do not capture it
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits, chosen = self._forward(rows)
        return graph, logits, chosen
