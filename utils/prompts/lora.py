"""The peers of prompt tuning: full fine-tuning and peft's LoRA, on the same examples.

    tuned, history = tune_weights(model, tokenizer, examples, PeerConfig("full", lr=3e-4))
    tuned, history = tune_weights(model, tokenizer, examples, PeerConfig("lora", lr=1e-2, rank=4))
    learned_numbers(tuned)              # the number of trained values
    merged(tuned)                       # the same model without LoRA's layers, ready for export
    matches(tuned, tokenizer, held_out) # from utils.prompts: the result is a GPT like any other

The loss, the batches, their order and the learning-rate schedule are those of `tune` in
utils/prompts/tuning.py; only the trained parameters differ. The given model is not modified.

LoRA (arXiv:2106.09685) learns two thin matrices for each frozen one: W + (alpha / rank) B A. B is
initialized to zero, so at first nothing changes.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from utils.cli import check_options, option
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts.data import MOST, Example, encode, padded
from utils.prompts.tuning import FallingRate, descend, prompt_loss

KINDS = ("full", "lora")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class PeerConfig(FallingRate):
    """How weights are tuned. Raises ValueError for invalid values."""

    kind: str = option("full", "full: every weight; lora: thin matrices beside each", KINDS)
    lr: float = option(3e-4, "learning rate of Adam", above=0)
    cooldown: float = option(0.5, "fraction of the steps in which the learning rate falls to 0")
    steps: int = option(200, "number of steps", least=1)
    batch: int = option(16, "examples per step", least=1, most=MOST)
    seed: int = option(0, "of LoRA's initial matrices and the order of the examples")
    rank: int = option(4, "LoRA: columns of the thin matrices", least=1)
    alpha: float | None = option(None, "LoRA: the update is scaled by alpha / rank; default: rank")

    def __post_init__(self):
        check_options(self)
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"--cooldown {self.cooldown} is not a fraction from 0 to 1")


def tune_weights(
    model: GPT,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    config: PeerConfig | None = None,
    on_step: Callable[[dict], bool | None] | None = None,
) -> tuple[GPT, list[dict]]:
    """A tuned copy of a GPT, and the history: each step's {"step", "loss", "lr"}.

    on_step   called with each step's entry; if it returns True, the tuning ends early
    Raises ValueError if there are no examples or they are too long, and FloatingPointError if the
    loss is not finite.
    """
    config = config or PeerConfig()
    if not examples:
        raise ValueError("there are no examples to learn from: give at least one")
    rows = encode(examples, tokenizer, model.config.max_positions)
    tuned = prepared(model, config)
    parameters = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    device = tuned.lm_head.weight.device

    def backward(rows):
        loss = prompt_loss(tuned, *padded(rows, device))
        loss.backward()
        return loss.item()

    return tuned, descend(parameters, rows, config, backward, on_step)


def prepared(model: GPT, config: PeerConfig) -> GPT:
    """A copy of the model in which only the parameters to be learned have requires_grad."""
    tuned = copy.deepcopy(model)
    if config.kind == "full":
        return tuned.requires_grad_(True)
    return with_lora(tuned, config)


def with_lora(model: GPT, config: PeerConfig) -> GPT:
    """Add peft's LoRA layers to every matrix of the blocks, in place; freeze the rest."""
    from peft import LoraConfig, inject_adapter_in_model

    alpha = config.rank if config.alpha is None else config.alpha
    lora = LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=list(MATRICES))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a tied embedding, which is not a target here
        torch.manual_seed(config.seed)
        inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


@torch.no_grad()
def merged(tuned: GPT) -> GPT:
    """A plain copy of a model tuned with LoRA: each matrix is W + (alpha / rank) B A."""
    plain = copy.deepcopy(tuned)
    for name, layer in tuned.named_modules():
        if hasattr(layer, "lora_A"):
            A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            matrix = plain.get_submodule(name).base_layer
            matrix.weight += layer.scaling["default"] * B @ A
            plain.set_submodule(name, matrix)
    return plain


def learned_numbers(model: torch.nn.Module) -> int:
    """The number of a model's values that `tune_weights` has learned (or would learn)."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
