"""What prompt tuning is compared with: full fine-tuning, and LoRA by peft, on the same examples.

    tuned, history = tune_weights(model, tokenizer, examples, PeerConfig("full", lr=3e-4))
    tuned, history = tune_weights(model, tokenizer, examples, PeerConfig("lora", lr=1e-2, rank=4))
    learned_numbers(tuned)              # how many numbers were learned
    matches(tuned, tokenizer, held_out) # of utils.prompt_tuning: the result is a GPT like any other

The loss, the batches, their order and the schedule of the learning rate are those of `tune` in
utils/prompts/tuning.py; only what is learned differs. The model that is given is not touched.

LoRA (arXiv:2106.09685) learns two thin matrices beside each frozen one: W + (alpha / rank) B A. At
first B is zero, so nothing changes.
"""

import copy
import math
import warnings
from dataclasses import dataclass

import torch

from utils.cli import check_types, option
from utils.prompts.data import encode, padded, rows_of_step
from utils.prompts.tuning import prompt_loss

KINDS = ("full", "lora")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class PeerConfig:
    """How weights are tuned. Raises ValueError for values that make no sense."""

    kind: str = option("full", "full: every weight; lora: thin matrices beside each", KINDS)
    lr: float = option(3e-4, "learning rate of Adam")
    cooldown: float = option(0.5, "part of the steps in which the learning rate falls to 0")
    steps: int = option(200, "how many steps")
    batch: int = option(16, "examples in a step")
    seed: int = option(0, "of LoRA's first matrices and of the order of the examples")
    rank: int = option(4, "LoRA: columns of the thin matrices")
    alpha: float | None = option(None, "LoRA: the update is scaled by alpha / rank; default: rank")

    def __post_init__(self):
        check_types(self)
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(KINDS)}")
        for name in ("steps", "batch", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is not at least 1")
        if self.lr <= 0:
            raise ValueError(f"lr {self.lr} is not above 0")
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"cooldown {self.cooldown} is not a part of the run, from 0 to 1")

    def rate(self, step):
        """The learning rate of a step, counted from 0: level, then falling to 0 in a line."""
        left = 1 - step / self.steps
        return self.lr * min(1.0, left / self.cooldown if self.cooldown else 1.0)


def tune_weights(model, tokenizer, examples, config=None, on_step=None):
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
    optimizer = torch.optim.Adam(parameters, lr=config.lr)
    device, history = tuned.lm_head.weight.device, []
    for step in range(config.steps):
        numbers = rows_of_step(len(rows), step, config.batch, config.seed)
        loss = prompt_loss(tuned, *padded([rows[number] for number in numbers], device))
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"the loss is {loss.item()} at step {step + 1}: lower lr")
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append({"step": step + 1, "loss": loss.item(), "lr": config.rate(step)})
        if on_step and on_step(history[-1]):
            break
    return tuned, history


def prepared(model, config):
    """A copy of the model in which just what will be learned has requires_grad."""
    tuned = copy.deepcopy(model)
    if config.kind == "full":
        return tuned.requires_grad_(True)
    return with_lora(tuned, config)


def with_lora(model, config):
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


def learned_numbers(model):
    """How many numbers of a model `tune_weights` has learned (or would learn)."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
