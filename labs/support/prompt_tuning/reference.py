"""Given: small models with random weights, and what is right for them, found in another way.

A virtual token is a word more in the embedding: with P more rows there the GPT is used as it is,
`model(tokens)`, one row of the batch after the other, so that nothing needs filling up.
"""

import copy

import torch
from torch import nn

from utils.models.gpt import GPT, GPTConfig, cross_entropy, rotary_tables

# sizes that are easily told apart: 37 words, vectors of 30 values
CONFIG = GPTConfig(
    vocab_size=37, hidden_size=30, layers=2, heads=5, kv_heads=1, intermediate_size=19,
    max_positions=64, tie_embeddings=True,
)  # fmt: skip
END = 0


def random_model(config: GPTConfig = CONFIG, seed: int = 0) -> GPT:
    """fp64; weights large enough for every position to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25 * torch.randn_like(parameter))
    return model.double()


def random_prompt(length: int, seed: int, config: GPTConfig = CONFIG) -> torch.Tensor:
    """fp64 (length, C)"""
    generator = torch.Generator().manual_seed(100 + seed)
    shape = length, config.hidden_size
    return 0.7 * torch.randn(shape, generator=generator, dtype=torch.float64)


def random_pairs(count: int, seed: int, vocabulary: int = CONFIG.vocab_size) -> list:
    """Questions of 2 to 7 tokens, answers of 1 to 4; END occurs in neither."""
    generator = torch.Generator().manual_seed(200 + seed)

    def some(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(1, vocabulary, (length,), generator=generator).tolist()

    return [(some(2, 7), some(1, 4)) for _ in range(count)]


def right_batch(pairs: list, end: int = END) -> tuple[torch.Tensor, torch.Tensor]:
    """What `batch` must return."""
    longest = max(len(q) + len(a) for q, a in pairs)
    tokens, targets = [], []
    for question, answer in pairs:
        filling = longest - len(question) - len(answer)
        tokens.append(question + answer + [end] * filling)
        targets.append([-100] * (len(question) - 1) + answer + [end] + [-100] * filling)
    return torch.tensor(tokens), torch.tensor(targets)


class Spelled:
    """A copy of the model that knows the virtual tokens of all prompts as words."""

    def __init__(self, model: GPT, *prompts: torch.Tensor):
        self.model, self.prompts = copy.deepcopy(model).requires_grad_(False), prompts
        known = self.model.model.embed_tokens.weight.detach()
        rows = torch.cat((known, *(prompt.detach() for prompt in prompts)))
        self.model.model.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        self.ids, first = [], len(known)
        for prompt in prompts:
            self.ids.append(torch.arange(first, first + len(prompt)))
            first += len(prompt)

    def all_logits(self, tokens: torch.Tensor, task=None) -> list:
        """For each row the logits of its virtual tokens and its tokens, (P + T, V)."""
        task = [0] * len(tokens) if task is None else task
        rows = [(self.ids[number], row) for number, row in zip(task, tokens)]
        return [self.model(torch.cat(row)[None])[0] for row in rows]

    def logits(self, tokens: torch.Tensor, task=None) -> torch.Tensor:
        """(B, T, V)"""
        return torch.stack([row[-tokens.shape[1] :] for row in self.all_logits(tokens, task)])

    def gradients(self) -> list[torch.Tensor]:
        """Of each prompt, after a backward pass."""
        return [self.model.model.embed_tokens.weight.grad[ids] for ids in self.ids]


def right_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counts = targets.flatten() != -100
    return cross_entropy(logits.flatten(0, 1)[counts][None], targets.flatten()[counts][None])


def walk(model: GPT, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits of vectors x (B, L, C) at positions (L): to know a mistake by its values."""
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return model.lm_head(model.model.norm(x))
