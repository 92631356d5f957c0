"""What prompt tuning is compared with: full fine-tuning, and LoRA by peft, on the same examples.

    tuned, history = tune_weights(model, tokenizer, examples, PeerConfig("full", lr=3e-4))
    tuned, history = tune_weights(model, tokenizer, examples, PeerConfig("lora", lr=1e-2, rank=4))
    learned_numbers(tuned)              # how many numbers were learned
    merged(tuned)                       # the same model without LoRA's layers, to be exported
    matches(tuned, tokenizer, held_out) # of utils.prompts: the result is a GPT like any other

The loss, the batches, their order and the schedule of the learning rate are those of `tune` in
utils/prompts/tuning.py; only what is learned differs. The model that is given is not touched.

LoRA (arXiv:2106.09685) learns two thin matrices beside each frozen one: W + (alpha / rank) B A. At
first B is zero, so nothing changes.
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
    """How weights are tuned. Raises ValueError for values that make no sense."""

    kind: str = option("full", "full: every weight; lora: thin matrices beside each", KINDS)
    lr: float = option(3e-4, "learning rate of Adam", above=0)
    cooldown: float = option(0.5, "part of the steps in which the learning rate falls to 0")
    steps: int = option(200, "how many steps", least=1)
    batch: int = option(16, "examples in a step", least=1, most=MOST)
    seed: int = option(0, "of LoRA's first matrices and of the order of the examples")
    rank: int = option(4, "LoRA: columns of the thin matrices", least=1)
    alpha: float | None = option(None, "LoRA: the update is scaled by alpha / rank; default: rank")

    def __post_init__(self):
        check_options(self)
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"--cooldown {self.cooldown} is not a part of the run, from 0 to 1")


def tune_weights(
    model: GPT,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    config: PeerConfig | None = None,
    on_step: Callable[[dict], bool | None] | None = None,
) -> tuple[GPT, list[dict]]:
    """A tuned copy of a GPT, and the history: each step's {"step", "loss", "lr"}.

    on_step   called with each step's; the tuning ends early where it returns True
    Raises ValueError where there are no examples or they are too long, and FloatingPointError
    where the loss is not finite.
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
    """A copy of the model in which just what will be learned has requires_grad."""
    tuned = copy.deepcopy(model)
    if config.kind == "full":
        return tuned.requires_grad_(True)
    return with_lora(tuned, config)


def with_lora(model: GPT, config: PeerConfig) -> GPT:
    """Puts peft's LoRA layers beside every matrix of the blocks, in place; the rest is frozen."""
    from peft import LoraConfig, inject_adapter_in_model

    alpha = config.rank if config.alpha is None else config.alpha
    lora = LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=list(MATRICES))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tied embedding, which is no target here
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
    """How many numbers of a model `tune_weights` has learned (or would learn)."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
