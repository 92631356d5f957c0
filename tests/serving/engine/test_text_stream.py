"""Streamed text equals the tokenizer's text of all tokens, for every kind of tokenizer."""

from collections.abc import Callable
from os.path import commonprefix

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.serving.engines import MODELS
from utils.serving.engine.text_stream import Decoder, TextStream

TEXT = (
    "The ranks add: 1, 2 … it's naïve – 漢字 costs €5, 日本語です。 🙂🙃👩‍👩‍👧 Ünïcödé\n\n\t"
    "END end 'tis n't "
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
MARKER = decoders.Sequence([*SPACES, decoders.Strip(" ", 1, 0)])  # as in Llama 2


def sentencepiece_bpe() -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "o"), ("▁", "co"), ("n", "d")]
    joined = ["".join(pair) for pair in merges]
    pieces = ["<unk>", "<s>", *BYTES, *"▁abcdehiknorst.,:'�", *joined]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    words = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    words.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    words.decoder = MARKER
    words.add_special_tokens(["<s>"])
    return words


def unigram() -> Tokenizer:
    pieces = ["<unk>", *BYTES, "▁", "▁rank", "s", "▁the", "a", "e", "n", "t", "▁日", ".", "�"]
    words = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return words


def wordpiece() -> Tokenizer:
    pieces = ["[UNK]", "the", "rank", "##s", "##ing", ".", ",", "n't", "'s", "do", "not", "日", "'"]
    words = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    words.decoder = decoders.WordPiece()
    return words


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(MODELS / "base" / "tokenizer.json"))


KINDS = {kind.__name__: kind for kind in (byte_level, sentencepiece_bpe, unigram, wordpiece)}


@pytest.fixture(scope="module", params=[*KINDS, "bytes"])
def words(request) -> Tokenizer | None:
    """A tokenizer of each kind; None: a token is a byte."""
    return None if request.param == "bytes" else KINDS[request.param]()


@pytest.fixture(scope="module")
def whole(words) -> Callable[[list[int]], str]:
    """Decoding of ids by Hugging Face's own class."""
    if words is None:
        return lambda ids: bytes(ids).decode(errors="replace")
    return PreTrainedTokenizerFast(tokenizer_object=words).decode


def streamed(decoder, prompt, ids, stop=()) -> list[str]:
    """The texts that a TextStream emits, per token and at the end."""
    stream, out = TextStream(decoder, prompt, stop), []
    for token in ids:
        text, stopped = stream.add(token)
        out.append(text)
        if stopped:
            assert stream.end() == ""
            return out
    return [*out, stream.end()]


@draw.composite
def tokens(pick, words):
    """Ids of a text, or arbitrary ids, many of them bytes."""
    some = draw.one_of(draw.text(max_size=9), draw.lists(draw.sampled_from(TEXT)).map("".join))
    if words is None:
        return list(pick(draw.one_of(draw.binary(max_size=30), some.map(str.encode))))
    known = words.get_vocab()
    single = draw.sampled_from([known[byte] for byte in BYTES if byte in known] or [0])
    every = draw.integers(0, len(known) - 1)
    any_ids = draw.lists(draw.one_of(every, single), max_size=30)
    return pick(draw.one_of(any_ids, some.map(lambda text: words.encode(text).ids)))


@settings(max_examples=200, deadline=None)
@given(draw.data())
def test_all_texts_together_are_the_text_of_all_tokens(words, whole, data):
    prompt, ids = data.draw(tokens(words)), data.draw(tokens(words))
    before, both = whole(prompt), whole(prompt + ids)
    right = both[len(commonprefix((before, both))) :]  # noqa: RUF071 (of characters)
    decoder = Decoder(words)
    assert "".join(streamed(decoder, prompt, ids)) == right
    if right:  # and it ends before a stop string, wherever that begins and ends
        begin = data.draw(draw.integers(0, len(right) - 1))
        stop = right[begin : begin + data.draw(draw.integers(1, 5))]
        assert "".join(streamed(decoder, prompt, ids, (stop,))) == right[: right.find(stop)]


@settings(max_examples=100, deadline=None)
@given(draw.data())
def test_the_bytes_of_the_tokens_are_the_text_of_all(words, data):
    """Except for the space that some tokenizers put before a text."""
    decoder, text = Decoder(words), data.draw(draw.lists(draw.sampled_from(TEXT)).map("".join))
    ids = list(text.encode()) if words is None else words.encode(text).ids
    known = b"".join(map(decoder.bytes_of, ids)).decode()
    assert known in (decoder(ids), " " + decoder(ids))


def test_the_bytes_of_one_token():
    words = byte_level()
    decoder = Decoder(words)
    halves = [decoder.bytes_of(id) for id in words.encode("漢🙂").ids]
    assert b"".join(halves) == "漢🙂".encode() and len(halves) > 2
    every = {decoder.bytes_of(id) for id in range(words.get_vocab_size())}
    assert every >= {bytes([byte]) for byte in range(256)}
    assert decoder.bytes_of(words.token_to_id("<|end|>")) == b"<|end|>"
    assert decoder.bytes_of(words.get_vocab_size()) == b""  # a vocabulary row without a token
    words = sentencepiece_bpe()
    named = {"<0xE6>": b"\xe6", "<0x0A>": b"\n", "▁the": b" the", "nd": b"nd", "<s>": b"<s>"}
    decoder = Decoder(words)
    assert {piece: decoder.bytes_of(words.token_to_id(piece)) for piece in named} == named
    words = wordpiece()
    named = {"##ing": b"ing", "rank": b" rank", "n't": b"n't"}
    decoder = Decoder(words)
    assert {piece: decoder.bytes_of(words.token_to_id(piece)) for piece in named} == named
    assert [Decoder().bytes_of(id) for id in (65, 255, 256)] == [b"A", b"\xff", b"\xff"]


def test_what_is_told_of_a_token():
    told = Decoder().told([(65, -0.5), (0xE2, -1.0)])
    half = {"token": "\ufffd", "id": 0xE2, "logprob": -1.0, "bytes": [0xE2]}
    assert told == {
        "token": "A", "id": 65, "logprob": -0.5, "bytes": [65], "top_logprobs": [half],
    }


def test_half_a_character_waits_for_its_other_half():
    words = byte_level()
    text = "naïve – 漢字 costs €5 🙂🙃\n"
    ids = words.encode(text).ids
    given = streamed(Decoder(words), [], ids)
    assert "".join(given) == text
    assert all("\ufffd" not in piece for piece in given)
    halves = [words.decode([token]) for token in ids]
    assert any("\ufffd" in half for half in halves)  # else this test would prove nothing
    given = streamed(Decoder(words), [], ids[:-2])  # ends within a character: marked at the end
    assert "".join(given) == words.decode(ids[:-2], skip_special_tokens=False)
    assert given[-1] == "\ufffd" and "\ufffd" not in "".join(given[:-1])


def test_a_run_of_bytes_waits_for_its_end_and_words_do_not_wait():
    words = sentencepiece_bpe()
    word, space = (words.token_to_id(piece) for piece in ("▁co", "▁"))
    run = [words.token_to_id(f"<0x{byte:02X}>") for byte in "日本".encode()]
    given = streamed(Decoder(words), [word], [space, *run, word, *run])
    assert given == [" ", *[""] * 6, "日本 co", *[""] * 6, "日本"]
    bad = streamed(Decoder(words), [word], [*run, run[0], space])  # one byte too many
    assert bad == [*[""] * 7, "\ufffd" * 7 + " ", ""]


def test_the_space_between_prompt_and_answer_is_kept():
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁rank": 1, "s": 2, "[UNK]": 3}, "[UNK]"))
    words.decoder = decoders.Metaspace()
    assert streamed(Decoder(words), [], [0, 1, 2, 0]) == ["the", " rank", "s", " the", ""]
    assert streamed(Decoder(words), [0], [1, 2, 0]) == [" rank", "s", " the", ""]


def test_a_stop_string_ends_the_text_wherever_its_pieces_fall():
    text = "one ENE END two"
    ids = list(text.encode())
    assert "".join(streamed(Decoder(), [], ids, ("END",))) == "one ENE "
    assert "".join(streamed(Decoder(), [], ids, ("two!", "ENE"))) == "one "  # the first to occur
    given = streamed(Decoder(), [], ids, ("two!", "twX"))
    assert "".join(given) == text  # text held back for "!" comes at the end
    assert given[-1] == "two" and given[:4] == ["o", "n", "e", " "]
    stream, given = TextStream(Decoder(), stop=("END",)), ""
    for token in ids[:11]:  # text that may belong to a stop string is held back
        given += stream.add(token)[0]
        assert "one ENE ".startswith(given)
