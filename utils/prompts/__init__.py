"""Prompt tuning: virtual tokens for a frozen model, and the methods they are compared with.

tune, PromptConfig                      learn a prompt from examples, on one rank
PromptedRanks, tune_on_ranks            the same on a model sharded over ranks
prompted, draw_prompt, frozen           put a prompt in front of a model's input
answer, matches                         the model's answers, and whether they are right
read_examples, batch_of                 examples: a JSON-lines file -> tokens and targets
save_prompt, load_prompt                a prompt on disk, tied to its model
tune_weights, PeerConfig                full fine-tuning and LoRA, for comparison
merged                                  a model tuned with LoRA as a plain model
curve, few_shot                         in-context learning: no training at all
"""

from utils.prompts.answers import answer, matches
from utils.prompts.data import IGNORED, Example, batch_of, read_examples
from utils.prompts.embedding import PromptedEmbedding, draw_prompt, frozen, prompted
from utils.prompts.file import load_prompt, save_prompt
from utils.prompts.in_context import curve, few_shot
from utils.prompts.lora import PeerConfig, merged, tune_weights
from utils.prompts.parallel import PromptedRanks, tune_on_ranks
from utils.prompts.tuning import PromptConfig, prompt_loss, tune

__all__ = [
    "IGNORED",
    "Example",
    "PeerConfig",
    "PromptConfig",
    "PromptedEmbedding",
    "PromptedRanks",
    "answer",
    "batch_of",
    "curve",
    "draw_prompt",
    "few_shot",
    "frozen",
    "load_prompt",
    "matches",
    "merged",
    "prompt_loss",
    "prompted",
    "read_examples",
    "save_prompt",
    "tune",
    "tune_on_ranks",
    "tune_weights",
]
