"""Text, tokens and batches are deterministic, and the same on N ranks as on one."""

import os
import subprocess
import sys
import zlib

import pytest
import torch

from utils.data import corpus
from utils.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokens():
    return corpus.load()


def test_embedded_text_is_the_language_reference(tokens):
    text = corpus.embedded()
    assert tokens.dtype == torch.uint8 and bytes(tokens.tolist()) == text
    assert 400_000 < len(text) < 600_000  # 3.11 and 3.12 differ a little
    assert text.startswith(b'The "assert" statement')
    code = "import zlib; from utils.data import corpus; print(zlib.crc32(corpus.embedded()))"
    other = {**os.environ, "PYTHONHASHSEED": "12345"}
    result = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True)
    assert int(result.stdout) == zlib.crc32(text)


def test_encode_and_decode():
    text = "Größe ≠ 0"
    assert corpus.encode(text).dtype == torch.int64
    assert corpus.decode(corpus.encode(text)) == text
    assert corpus.decode([255, 65]) == "�A"
    with pytest.raises(ValueError, match="token 256 is not a byte"):
        corpus.decode([65, 256])


def test_split(tokens):
    train, held_out = corpus.split(tokens)
    assert torch.equal(torch.cat((train, held_out)), tokens)
    assert len(held_out) == len(tokens) // 20
    assert train.data_ptr() == tokens.data_ptr()  # no copy


# ---- batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("batch", [7, 8, 13])
def test_ranks_share_the_global_batch(tokens, world_size, batch):
    whole = corpus.batch(tokens, 5, batch, 33, seed=3)
    parts = [corpus.batch(tokens, 5, batch, 33, 3, rank, world_size) for rank in range(world_size)]
    for both in range(2):
        assert torch.equal(torch.cat([part[both] for part in parts]), whole[both])
    sizes = [len(x) for x, _ in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_batch_is_a_pure_function_of_seed_and_step(tokens):
    torch.manual_seed(1)
    x, y = corpus.batch(tokens, step=9, batch=4, seq=16, seed=2)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    again, _ = corpus.batch(tokens, step=9, batch=4, seq=16, seed=2)
    assert torch.equal(x, again)
    torch.manual_seed(1)
    corpus.batch(tokens, step=9)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is left alone
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    assert not torch.equal(x, corpus.batch(tokens, step=10, batch=4, seq=16, seed=2)[0])
    assert not torch.equal(x, corpus.batch(tokens, step=9, batch=4, seq=16, seed=3)[0])
    # (seed, step) are mixed well: no seed repeats another one's data some steps later
    later = [corpus.batch(tokens, step, 4, 16, seed=0)[0] for step in range(50)]
    sooner = [corpus.batch(tokens, step, 4, 16, seed=1)[0] for step in range(50)]
    assert not any(torch.equal(a, b) for a in later for b in sooner)


def test_every_position_can_be_drawn():
    tokens = torch.arange(6, dtype=torch.uint8)
    seen = {row[0].item() for step in range(40) for row in corpus.batch(tokens, step, 4, 3)[0]}
    assert seen == {0, 1, 2}
    x, y = corpus.batch(tokens[:4], 0, batch=2, seq=3)  # the shortest possible text
    assert x.tolist() == [[0, 1, 2]] * 2 and y.tolist() == [[1, 2, 3]] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_held_out_batches_are_shared_and_do_not_overlap(world_size):
    tokens = torch.arange(10 * 7 + 3, dtype=torch.uint8)
    rows = [
        x
        for rank in range(world_size)
        for x, _ in corpus.held_out_batches(tokens, 7, 4, rank=rank, world_size=world_size)
    ]
    assert torch.cat(rows).flatten().tolist() == list(range(70))
    kept = torch.cat([x for x, _ in corpus.held_out_batches(tokens, 7, 4, limit=3)])
    assert kept[:, 0].tolist() == [0, 28, 63]  # spread over the text


# ---- a learner's own text


def test_text_from_a_file_and_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first ä")
    (tmp_path / "sub" / "c").write_text("third")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\1")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert corpus.decode(corpus.load(tmp_path)) == "first ä\nsecond\nthird"
    assert corpus.decode(corpus.load(str(tmp_path / "b.txt"))) == "second"


def test_a_tokenizer_makes_the_tokens(tmp_path):
    file = tmp_path / "text"
    file.write_text("ä" * 203 + "b")  # 407 bytes: 95 % is inside a character
    bytes_only = corpus.load_split(file)
    assert [len(part) for part in bytes_only] == [387, 20]
    assert torch.equal(torch.cat(bytes_only), corpus.load(file))
    assert torch.equal(bytes_only[0], corpus.split(corpus.load(file))[0])
    tokenizer = Tokenizer.train(["ä" * 50], 258)
    train, held_out = corpus.load_split(file, tokenizer)
    assert train.dtype == torch.int32 and len(train) < 200
    assert tokenizer.decode(train) + tokenizer.decode(held_out) == file.read_text()
    assert tokenizer.decode(train) == "ä" * 194  # which belongs to the first part
    x, y = corpus.batch(train, 0, batch=2, seq=3)
    assert x.dtype == torch.int64 and torch.equal(x[:, 1:], y[:, :-1])
    file.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"text .*text is not UTF-8 \(byte 3\), which a tokenizer"):
        corpus.load_split(file, tokenizer)


def test_bad_text_is_named(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    os.mkfifo(tmp_path / "fifo")  # reading it would block forever
    for path, words in (
        (tmp_path / "fifo", "fifo is not a regular file"),
        (tmp_path / "no", "no does not exist: give a file, a folder or 'library'"),
        (empty, "empty.txt is empty"),
        (tmp_path, "holds no text file"),
    ):
        with pytest.raises(ValueError, match=words):
            corpus.load(path)
    with pytest.raises(ValueError, match="has 8 tokens, too short for one sequence of 8"):
        corpus.batch(torch.zeros(8, dtype=torch.uint8), 0, batch=1, seq=8)
    with pytest.raises(ValueError, match="batch 3 leaves some of 4 ranks without a row"):
        corpus.batch(torch.zeros(99, dtype=torch.uint8), 0, batch=3, seq=8, rank=0, world_size=4)
