"""The standard library as documents: reproducible, with whole modules held out."""

import hashlib
import os
import subprocess
import sys

import pytest

from utils.data import corpus, library
from utils.data.library import inspected_page, parsed_page

MODULE = '''"""What it is for."""
import os

def load(s, *, cls=None, **kw) -> dict:
    """Reads.

    More.
    """

def _private(): "no"

class Reader(Base):
    """A reader."""
    limit = 3
    async def read(self, n: int = -1): pass
    def __init__(self, s): "Takes it."
    def __eq__(self, other): "not shown"
    if os: pass
def load(s): "a second one"
'''


def test_a_page_is_signatures_and_docstrings():
    assert parsed_page("m", MODULE) == (
        "module m\n\nWhat it is for.\n"
        "\nm.load\nload(s, *, cls=None, **kw) -> dict\n    Reads.\n\n    More.\n"
        "\nm.Reader\nclass Reader(Base)\n    A reader.\n"
        "\nm.Reader.read\nasync read(self, n: int=-1)\n"
        "\nm.Reader.__init__\n__init__(self, s)\n    Takes it.\n"
    )
    assert parsed_page("m", "x = 1") == parsed_page("m", "def f(:") == ""


def test_a_module_in_c_has_a_page_too(monkeypatch):
    import builtins

    page = inspected_page("math")
    assert "\nmath.sqrt\nsqrt(x, /)\n    Return the square root of x.\n" in page
    before = inspected_page("builtins")
    assert "\nbuiltins.ValueError\nclass ValueError(Exception)\n    Inapp" in before
    assert "\nbuiltins.str.join\njoin(self, iterable, /)\n" in before
    monkeypatch.setattr(builtins, "display", lambda: None, raising=False)  # as IPython does
    assert inspected_page("builtins") == before
    assert inspected_page("no_such_module") == ""


@pytest.fixture(scope="module")
def pages():
    return library.documents()


def test_it_holds_what_it_should(pages):
    names = {name for name, _ in pages}
    assert {"json.decoder", "asyncio.events", "builtins", "pydoc_data.topics"} <= names
    parts = {part for name in names for part in name.split(".")}
    assert not parts & {"test", "tests", "idlelib", "tkinter", "lib2to3", "ensurepip", "torch"}
    assert "encodings.cp1252" not in names and "encodings.utf_8" in names
    texts = [text for _, text in pages]
    assert len(set(texts)) == len(texts)
    assert 8_000_000 < sum(map(len, texts)) < 14_000_000
    assert not any(library.END in text for text in texts)
    first = [hashlib.sha256(name.encode()).digest() for name, _ in pages]
    assert first == sorted(first)


def test_whole_modules_are_held_out(pages):
    train, held_out = library.split()
    assert train + held_out == library.END.join(text for _, text in pages)
    kept = train.count(library.END)
    outside = {name for name, _ in pages[kept:]}
    assert not outside & {name for name, _ in pages[:kept]}
    assert outside == set(library.held_out_modules())
    assert 0.03 < len(held_out) / len(train + held_out) <= 0.05


def test_it_is_the_same_in_another_process():
    ours = library.fingerprint()
    assert ours["bytes"] == len(corpus.load("library"))
    code = "from utils.data import library; print(library.fingerprint()['sha256'])"
    other = {**os.environ, "PYTHONHASHSEED": "12345"}
    result = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True)
    assert result.stdout.strip() == ours["sha256"]


def test_the_corpus_is_split_there():
    train, held_out = (part.encode() for part in library.split())
    ours = corpus.load_split("library")
    assert [part.numpy().tobytes() for part in ours] == [train, held_out]
