"""Text -> tokens and back, by the tokenizer of a Hugging Face folder, or byte by byte.

    tokenizer = Tokenizer.load("models/base")      # reads tokenizer.json; without one: bytes
    ids = tokenizer.encode("import json\n")
    tokenizer.decode(ids)                          # "import json\n": lossless

A byte-level BPE (byte pair encoding, arXiv:1508.07909) starts with the 256 bytes and repeatedly
merges the most frequent adjacent pair, so it can encode any text. The files are Hugging Face's:
`transformers.AutoTokenizer` reads the same folder and gives the same ids. No token is added before
a text.
"""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from utils import untrusted
from utils.models import hf_format

END = "<|end|>"  # between two documents, and after an answer
BYTES = 256

# BPE does not merge across these pieces: a word includes one character before it (" the", "_hook",
# ".join"), numbers are split after three digits, punctuation includes the end of the line, and the
# last space of a line's indentation belongs to the word after it.
WORDS = r"'(?:[sdmt]|ll|ve|re)\b|[ _.]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"


class Tokenizer:
    """Text <-> token ids. Make one with `load` or `train`.

    size   number of tokens: ids go from 0 to size - 1
    end    id of "<|end|>"; without one, the model's own end token, from config.json; None if there
           is none, as with bytes
    """

    def __init__(self, model: HFTokenizer | None = None):
        self.model = model  # a tokenizers.Tokenizer, or None: tokens are bytes
        self.size = BYTES if model is None else max(model.get_vocab().values()) + 1
        self.end = None if model is None else model.token_to_id(END)
        self._splits = self.end is not None  # "<|end|>" in a text is a token

    @classmethod
    def load(cls, folder: Path | str) -> "Tokenizer":
        """The tokenizer of a checkpoint folder; bytes if it has none.

        Raises CheckpointError (a ValueError) for a missing folder or a damaged file.
        """
        folder = hf_format.recover(folder)
        if not folder.is_dir():
            raise hf_format.CheckpointError(f"tokenizer folder {folder} does not exist")
        file = folder / hf_format.TOKENIZER
        if not file.exists():
            return cls()
        try:
            tokenizer = cls(HFTokenizer.from_file(str(untrusted.regular(file))))
        except Exception as error:  # tokenizers raises plain Exception
            raise hf_format.CheckpointError(f"{file} is not a tokenizer: {error}") from None
        if tokenizer.end is None and (folder / hf_format.CONFIG).exists():
            tokenizer.end = _end_of(hf_format.read_json(folder / hf_format.CONFIG), tokenizer.size)
        return tokenizer

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "Tokenizer":
        """A byte-level BPE of `size` tokens, including "<|end|>", learned from the texts."""
        if size <= BYTES:
            raise ValueError(f"size {size} is too small: a tokenizer needs {BYTES + 1} or more")
        model = HFTokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        model.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        model.train_from_iterator(texts, trainer)
        return cls(model)

    def encode(self, text: str) -> list[int]:
        """A string -> a list of ids. "<|end|>" in it becomes that token, if there is one."""
        if self.model is None:
            return list(text.encode("utf-8"))
        if not self._splits:
            return self.model.encode(text, add_special_tokens=False).ids
        ids = []
        for number, part in enumerate(text.split(END)):  # one long text would take much memory
            if number:
                ids.append(self.end)
            ids.extend(self.model.encode(part, add_special_tokens=False).ids)
        return ids

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """Ids (a list or a 1-D tensor) -> a string. Invalid UTF-8 becomes �.

        Raises ValueError for an id that is not a token.
        """
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        outside = [value for value in ids if not 0 <= value < self.size]
        if outside:
            raise ValueError(f"token {outside[0]} does not exist: ids go from 0 to {self.size - 1}")
        if self.model is None:
            return bytes(ids).decode("utf-8", errors="replace")
        return self.model.decode(ids, skip_special_tokens=False)

    def byte_lengths(self) -> torch.Tensor:
        """The number of bytes of each token, int64 (size,).

        Raises ValueError for a tokenizer that is not byte-level: its tokens are not made of bytes.
        """
        if self.model is None:
            return torch.ones(BYTES, dtype=torch.int64)
        if "ByteLevel" not in json.dumps(json.loads(self.model.to_str())["decoder"]):
            raise ValueError(
                "the tokenizer is not byte-level, so bits per byte cannot be counted: train one "
                "with Tokenizer.train, or leave it out and train on bytes"
            )
        added = self.model.get_added_tokens_decoder()
        lengths = torch.zeros(self.size, dtype=torch.int64)
        for token, id in self.model.get_vocab().items():
            # the file writes every byte of a token as one printable character
            lengths[id] = len(added[id].content.encode() if id in added else token)
        return lengths

    def save(self, folder: Path | str) -> None:
        """Write Hugging Face's tokenizer files into an existing folder; none for bytes."""
        if self.model is None:
            return
        folder = Path(folder)
        self.model.save(str(folder / hf_format.TOKENIZER))
        hf_format.write_json(
            folder / hf_format.TOKENIZER_CONFIG,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "pad_token": END,
                "clean_up_tokenization_spaces": False,
            },
        )


def _end_of(config, size):
    """The first end token that a config.json names, or None."""
    named = config.get("eos_token_id")
    first = named[0] if isinstance(named, list) and named else named
    return first if isinstance(first, int) and 0 <= first < size else None


@lru_cache(maxsize=8)
def facts(folder: Path | str) -> tuple[int, int | None]:
    """(number of tokens, id of the end token or None) of a folder's tokenizer."""
    tokenizer = Tokenizer.load(folder)
    return tokenizer.size, tokenizer.end


def same(folder: Path | str, other: Path | str) -> bool:
    """Whether two folders hold the same tokenizer."""
    files = [Path(each) / hf_format.TOKENIZER for each in (folder, other)]
    there = [hf_format.read_json(file) if file.exists() else None for file in files]
    return there[0] == there[1]
