"""The tokenizer: nothing is lost, every byte counts, transformers reads the same ids."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from utils.data import corpus
from utils.models.tokenizer import END, Tokenizer, facts, same

TEXTS = ["def read(path):\n    return path.read_text()\n" * 20, corpus.embedded()[:20_000].decode()]
HARD = (
    "",
    " ",
    "\n\n    def __init__(self, *args):\n\treturn 12345\r\n",
    "Größe ≠ 0 🙂 \u2028 日本語",
    "it's <|end|> a [CLS] token <s>",
    "trailing   ",
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 300)


def test_training_gives_what_it_was_asked_for(tokenizer):
    assert tokenizer.size == 300 and tokenizer.decode([tokenizer.end]) == END
    again = Tokenizer.train(TEXTS, 300)
    assert again.model.to_str() == tokenizer.model.to_str()
    longer = Tokenizer.train(TEXTS, 400)  # more tokens make a text shorter
    assert len(longer.encode(TEXTS[1])) < len(tokenizer.encode(TEXTS[1])) < 0.8 * len(TEXTS[1])
    with pytest.raises(ValueError, match="size 256 is too small"):
        Tokenizer.train(TEXTS, 256)


@pytest.mark.parametrize("text", HARD)
def test_nothing_is_lost(tokenizer, text):
    for each in (tokenizer, Tokenizer()):
        ids = each.encode(text)
        assert each.decode(ids) == each.decode(torch.tensor(ids, dtype=torch.long)) == text
        assert each.byte_lengths()[ids].sum() == len(text.encode())
    assert tokenizer.encode(text).count(tokenizer.end) == text.count(END)


def test_transformers_reads_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD:
        assert again.encode(text) == tokenizer.encode(text) == theirs(text)["input_ids"]
        assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == again.end == tokenizer.end
    assert len(theirs) == again.size == facts(tmp_path)[0]
    assert same(tmp_path, tmp_path)


def test_bytes(tmp_path):
    tokenizer = Tokenizer.load(tmp_path)  # a folder without a tokenizer
    assert (tokenizer.size, tokenizer.end) == (256, None)
    assert tokenizer.encode("é") == [0xC3, 0xA9] and tokenizer.decode([0xC3]) == "�"
    tokenizer.save(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_stranger_keeps_its_own_end(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace(END, "</s>"))
    for named, end in ((7, 7), ([5, 6], 5), (300, None), (None, None)):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": named}))
        assert Tokenizer.load(tmp_path).end == end
    stranger = Tokenizer.load(tmp_path)
    assert stranger.decode(stranger.encode(HARD[4])) == HARD[4]  # to it "<|end|>" is just text


def test_what_is_wrong_is_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no does not exist"):
        Tokenizer.load(tmp_path / "no")
    with pytest.raises(ValueError, match="token 300 does not exist: ids go from 0 to 299"):
        tokenizer.decode([1, 300])
    with pytest.raises(ValueError, match="token 256 does not exist: ids go from 0 to 255"):
        Tokenizer().decode([256])
    tokenizer.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "decoder": {"type": "Fuse"}}))
    with pytest.raises(ValueError, match="not byte-level, so bits per byte cannot be counted"):
        Tokenizer.load(tmp_path).byte_lengths()
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
