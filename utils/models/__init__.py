"""The model: its sizes, decoder, files on disk and tokenizer; nothing about parallelism.

config      GPTConfig: sizes, parameters and FLOPs by formula, Hugging Face's config.json
gpt         GPT: the decoder, from which pipeline stages and the server's engine are also made
moe         the mixture of experts that replaces an MLP
ops         norm, rotation and loss with handwritten gradients
tp_plan     how each matrix is split for tensor parallelism
hf_format   reading and writing checkpoint folders
tokenizer   text to tokens; fingerprint: identifies weights; shipped: the workshop's own models
"""

from utils.models.config import GPTConfig

__all__ = ["GPTConfig"]
