"""Virtual tokens in front of a model's input: the initial prompt, and the embedding that adds it.

    prompt = draw_prompt(model, 16)                         # (P, C)
    with prompted(model, prompt):
        logits = model(tokens)[:, 16:]                      # (B, T, V) for tokens (B, T)

Each row may have its own prompt (`index=`, or prompts (B, P, C)), so a batch can mix several tasks.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from utils.models.gpt import GPT


@torch.no_grad()
def draw_prompt(
    model: GPT, length: int, seed: int = 0, words: Sequence[int] | None = None
) -> torch.Tensor:
    """An initial prompt, (P, C) fp32: P rows of the model's embedding.

    words   token ids whose rows are used, repeated or truncated to P; None: random tokens
    A prompt initialized from embeddings is learned faster than one of random values (Lester et al.,
    arXiv:2104.08691, section 3.2).
    """
    weight = model.model.embed_tokens.weight
    if words is None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(len(weight), (length,), generator=generator)
    words = torch.as_tensor(words, device=weight.device)
    if not len(words):
        raise ValueError("there are no words to begin the prompt with: give at least one token")
    repeats = math.ceil(length / len(words))
    return weight[words.repeat(repeats)[:length]].float()  # a copy


class PromptedEmbedding(nn.Module):
    """Replaces a model's embedding: tokens (B, T) -> (B, P + T, C), with the prompt first.

    prompts   (P, C): one for all rows; (N, P, C): several; either N = B, or `choose` assigns them.
              A Parameter becomes a parameter of this module, any other tensor a buffer
    The virtual tokens have the positions 0 to P - 1, the real ones those from P on.
    """

    def __init__(self, embedding: nn.Module, prompts: torch.Tensor):
        super().__init__()
        size = embedding.weight.shape[1]
        if prompts.ndim not in (2, 3) or prompts.shape[-1] != size:
            raise ValueError(
                f"a prompt of shape {list(prompts.shape)} does not fit: the model takes (P, {size})"
                f", or (N, P, {size}) for several"
            )
        if getattr(getattr(embedding, "region", None), "sequence_parallel", False):
            raise ValueError(
                "sequence parallelism gives every rank some of the positions, but the prompt is "
                "not split: use tensor_parallel without sequence_parallel"
            )
        self.embedding, self.index = embedding, None
        if isinstance(prompts, nn.Parameter):
            self.prompts = prompts
        else:
            self.register_buffer("prompts", prompts, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The embeddings of the vocabulary, (V, C)."""
        return self.embedding.weight

    @property
    def length(self) -> int:
        """P, the number of virtual tokens."""
        return self.prompts.shape[-2]

    def choose(self, index: torch.Tensor | None) -> "PromptedEmbedding":
        """From now on row b uses the prompt index[b]: int64 (B,), or None for prompt b."""
        self.index = index
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)  # (B, T, C)
        prompts = self.prompts if self.index is None else self.prompts[self.index]
        if prompts.ndim == 2:
            prompts = prompts.expand(len(x), -1, -1)
        if len(prompts) != len(x):
            raise ValueError(f"there are {len(prompts)} prompts for {len(x)} rows: give one each")
        return torch.cat((prompts.to(x.dtype), x), dim=1)  # (B, P + T, C)


@contextmanager
def prompted(
    model: GPT, prompt: torch.Tensor | None, index: torch.Tensor | None = None
) -> Iterator[nn.Module]:
    """Put a prompt, or one for each row, in front of a GPT's input, and remove it at the end.

    Inside, `model(tokens)` has P more positions: use `model(tokens)[:, P:]`. Yields the embedding;
    prompt None changes nothing. index: see `PromptedEmbedding.choose`.
    """
    embedding = model.model.embed_tokens
    if prompt is None:
        yield embedding
        return
    model.model.embed_tokens = PromptedEmbedding(embedding, prompt).choose(index)
    try:
        yield model.model.embed_tokens
    finally:
        model.model.embed_tokens = embedding


@contextmanager
def frozen(model: GPT) -> Iterator[GPT]:
    """Inside, no weight of the model gets a gradient; afterwards `requires_grad` is restored."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        yield model
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
