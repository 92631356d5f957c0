"""The model: its sizes, the decoder, its files on disk, its tokenizer; nothing of parallelism.

config      GPTConfig: sizes, parameters and FLOPs by formula, Hugging Face's config.json
gpt         GPT: the decoder, of which stages of a pipeline and the server's engine are made too
moe         the mixture of experts in place of an MLP
ops         norm and rotation with gradients by hand
tp_plan     how each matrix is cut for tensor parallelism
hf_format   checkpoint folders, read and written
tokenizer   text to tokens; fingerprint: which weights these are; shipped: the workshop's own models
"""

from utils.models.config import GPTConfig

__all__ = ["GPTConfig"]
