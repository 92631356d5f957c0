"""Tokens -> text, as soon as it is certain: half a character and half a stop string wait.

    text = TextStream(tokenizer, stop=("\\n\\n",))
    text.add(token)         # ("new text", False); True: a stop string came, the text ends before it
    text.end()              # what was held back, when no more tokens come

A byte-level token can be a part of a character: "€" may come as three tokens, and the first two are
no text yet. A stop string can come in pieces as well: with stop "END", "E" waits for what follows.
All texts together are what the tokenizer makes of all tokens together.
"""

from pathlib import Path

from tokenizers import Tokenizer

NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what decoding makes of bytes that are no UTF-8
LONGEST = 3  # as many bytes can be the beginning of one character of UTF-8


class Bytes:
    """The tokenizer of a model whose folder brings none: a token is a byte."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        known = b"".join(bytes([id]) if id < 256 else b"\xff" for id in ids)
        return known.decode("utf-8", errors="replace")


def load_tokenizer(folder: str | Path) -> Tokenizer | Bytes:
    """The tokenizer of a folder: a tokenizers.Tokenizer, or Bytes where there is none.

    Raises ValueError for a damaged file.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        return Bytes()
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from None


class TextStream:
    """The text of one request."""

    def __init__(self, tokenizer: Tokenizer | Bytes, stop: tuple[str, ...] = ()):
        self.tokenizer, self.stop = tokenizer, stop
        # Tokens before `start` are done with. What those before `fresh` say was given out; they
        # are kept because what a token says can depend on its neighbour (a space before it).
        self.window, self.fresh = [], 0
        self.given = 0  # characters of the window's text that were given out
        self.held = ""  # could be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> tuple[str, bool]:
        """(text that is certain now, whether a stop string has come) with one more token."""
        self.window.append(token)
        said = self._decode(self.window)
        unsure = min(len(said) - len(said.rstrip(NO_CHARACTER)), LONGEST)
        new = said[self.given : len(said) - unsure]
        if unsure:
            self.given = max(self.given, len(said) - unsure)
        else:  # the window moves on: the tokens that were new are the neighbours of the next
            self.window, self.fresh = self.window[self.fresh :], len(self.window) - self.fresh
            self.given = len(self._decode(self.window))
        return self._until_stop(new)

    def end(self) -> str:
        """The rest of the text, when no more tokens come; half a character is marked �."""
        if self.stopped:
            return ""
        text, stopped = self._until_stop(self._decode(self.window)[self.given :])
        held, self.held = self.held, ""
        return text if stopped else text + held

    def _decode(self, tokens):
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def _until_stop(self, new):
        if not self.stop or not new:
            return new, False
        text = self.held + new
        found = [place for place in map(text.find, self.stop) if place >= 0]
        if found:
            self.held, self.stopped = "", True
            return text[: min(found)], True
        waits = max(_overlap(text, stop) for stop in self.stop)
        self.held = text[len(text) - waits :]
        return text[: len(text) - waits], False


def _overlap(text, stop):
    """How many characters at the end of the text could be the beginning of the stop string."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
