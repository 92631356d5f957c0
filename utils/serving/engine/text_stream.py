"""Tokens -> text, as soon as it is final: half a character or half a stop string is held back.

    decoder = Decoder.read(folder)
    text = TextStream(decoder, prompt=[5, 7], stop=("\\n\\n",))
    text.add(token)         # ("new text", False); True: a stop string, the text ends before it
    text.end()              # the text held back, when no more tokens follow

A token can be part of a character: "€" may arrive as three tokens, of which the first two are not
text yet. If a vocabulary falls back to bytes (Llama 2), no part of a run of bytes is final before
the run ends, because one bad byte invalidates all of it. A stop string can also arrive in pieces:
with stop "END", "E" waits for what follows. Together, the texts equal the tokenizer's decoding of
prompt and answer without its decoding of the prompt.
"""

from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

from tokenizers import Tokenizer

NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # decoding returns it for bytes that are not UTF-8
LONGEST = 3  # most bytes of an incomplete UTF-8 character
NEIGHBOURS = 4  # tokens before a text that affect its beginning: a space, bytes of a character


def byte_letters() -> dict[str, int]:
    """The letters with which byte-level BPE writes bytes: printable bytes are themselves, the
    others are written from "Ā" on (Radford et al., GPT-2, 2019)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in seen]
    letters = [*map(chr, seen), *(chr(256 + number) for number in range(len(rest)))]
    return dict(zip(letters, seen + rest))


class Decoder:
    """Token ids -> text. tokenizer: None if the model has none; then a token is a byte.

    fallback: the ids of single bytes, for characters that the vocabulary does not have.
    letters: of a byte-level BPE, letter -> byte; else None.
    """

    def __init__(self, tokenizer: Tokenizer | None = None):
        self.tokenizer, self.fallback, self.letters = tokenizer, frozenset(), None
        self.known = {}  # cache of bytes_of
        if tokenizer is not None:
            if tokenizer.decoder is not None and tokenizer.decoder.decode(["Ġ"]) == " ":
                self.letters = byte_letters()
            ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
            both = [ids[byte] for byte in "é".encode()]
            if None not in both and self(both) == "é":
                self.fallback = frozenset(ids) - {None}

    @classmethod
    def read(cls, folder: str | Path) -> "Decoder":
        """The decoder of a folder. Raises ValueError for a damaged tokenizer.json."""
        file = Path(folder) / "tokenizer.json"
        if not file.exists():
            return cls()
        try:
            return cls(Tokenizer.from_file(str(file)))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{file} is not a tokenizer: {error}") from None

    def __call__(self, ids: Sequence[int]) -> str:
        if self.tokenizer is not None:
            return self.tokenizer.decode(ids, skip_special_tokens=False)
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", errors="replace")

    def bytes_of(self, id: int) -> bytes:
        """The bytes of one token within a text; they may be part of a character."""
        if id not in self.known:
            self.known[id] = self._bytes_of(id)
        return self.known[id]

    def _bytes_of(self, id):
        if self.tokenizer is None:
            return bytes([id]) if id < 256 else b"\xff"
        piece = self.tokenizer.id_to_token(id)
        if piece is None:  # a row of the embedding without a token
            return b""
        if id in self.fallback:
            return bytes([int(piece[1:-1], 16)])  # "<0xE6>"
        if self.letters and self.letters.keys() >= set(piece):
            return bytes(map(self.letters.get, piece))
        if self.letters:
            return piece.encode()
        # a leading space appears only after another token, for which the token itself will do
        return self([id, id])[len(self([id])) :].encode()

    def told(self, pairs: Sequence[tuple[int, float]]) -> dict:
        """A token's entry in an answer, from (id, log-probability) of it and of the likeliest."""
        chosen, *likeliest = [self._named(id, logprob) for id, logprob in pairs]
        return chosen | {"top_logprobs": likeliest}

    def _named(self, id, logprob):
        data = self.bytes_of(id)
        text = data.decode("utf-8", errors="replace")
        return {"token": text, "id": id, "logprob": logprob, "bytes": list(data)}


class TextStream:
    """The text of one request. prompt: the tokens before it; stop: strings that end it."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self.decoder, self.stop = decoder, stop
        begin = len(prompt)
        while begin and prompt[begin - 1] in decoder.fallback:
            begin -= 1
        # Tokens before the window are no longer needed. The text of those before `fresh` has been
        # returned; they are kept because a token's text can depend on its neighbour (a space).
        self.window = list(prompt[max(0, begin - NEIGHBOURS) :])
        self.fresh = len(self.window)
        self.before = self.decoder(self.window)  # the prompt's text, until more is final
        self.given = 0  # characters of the window's text that were returned
        self.held = ""  # could be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> tuple[str, bool]:
        """(text that is now final, whether a stop string appeared) after one more token."""
        self.window.append(token)
        if token in self.decoder.fallback:
            return "", False
        said = self.decoder(self.window)
        unsure = min(len(said) - len(said.rstrip(NO_CHARACTER)), LONGEST)
        new = self._new(said[: len(said) - unsure])
        fresh = self.window[self.fresh :]
        if not unsure and (heard := len(self.decoder(fresh))):
            # move the window: the tokens that were new become the neighbours of the next
            self.window, self.fresh, self.given, self.before = fresh, len(fresh), heard, ""
        return self._until_stop(new)

    def end(self) -> str:
        """The rest of the text, when no more tokens follow; an incomplete character becomes �."""
        if self.stopped:
            return ""
        text, stopped = self._until_stop(self._new(self.decoder(self.window)))
        held, self.held = self.held, ""
        return text if stopped else text + held

    def _new(self, certain):
        """The part of a final text that was not returned yet."""
        if self.before:
            self.given = len(commonprefix((self.before, certain)))  # noqa: RUF071 (of characters)
        new = certain[self.given :]
        if new:
            self.given, self.before = len(certain), ""
        return new

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
