"""How a notebook becomes slides and a page of the book, on small notebooks made here."""

import hashlib
import importlib.util
import json
import re
import sys

import pytest
from packaging.requirements import Requirement

from utils.paths import ROOT
from utils.workshop import book, notebooks
from utils.workshop.pip import SetupError

pytestmark = pytest.mark.thorough

BOOK = ROOT / "docs" / "book"


@pytest.fixture(scope="module")
def slides():
    """docs/book/slides.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("slides_of_the_book", BOOK / "slides.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def markdown(text, **metadata):
    return {"cell_type": "markdown", "source": text, "metadata": metadata}


def code(text, *outputs, **metadata):
    return {"cell_type": "code", "source": text, "outputs": list(outputs), "metadata": metadata}


def printed(text):
    return {"output_type": "stream", "name": "stdout", "text": text}


FIGURE = {"output_type": "display_data", "data": {"image/png": "iVBORw0KGgo=\n"}, "metadata": {}}


def kinds(part):
    """The kind of each piece, or "notes"."""
    return [re.search(r'class="(?:piece )?([a-z ]+)', piece)[1].strip() for piece in part.pieces]


# --- what a slide shows ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, expected",
    [
        ("One is here. Two is there.", ["One is here.", "Two is there."]),
        ("Shoeybi et al. Found it.", ["Shoeybi et al. Found it."]),
        ("**All of it. Always.** Then more.", ["**All of it. Always.**", "Then more."]),
        ("Run `a. B` now. Then stop.", ["Run `a. B` now.", "Then stop."]),
        ("Why? (Because. It is.) So.", ["Why?", "(Because. It is.)", "So."]),
        ("It is 0.5. $x$ is not.", ["It is 0.5.", "$x$ is not."]),
    ],
)
def test_where_a_sentence_ends(slides, text, expected):
    assert slides.sentences(text) == expected


def test_of_a_paragraph_the_first_sentence_and_the_bold_ones(slides):
    text = "The first sentence is as long as this one. Left out. **Kept.** Left out, too."
    assert slides.lead(text) == "The first sentence is as long as this one. **Kept.**"
    assert slides.lead("Short. It needs the next. Not this.") == "Short. It needs the next."


def test_short_code_is_shown_without_its_imports(slides):
    assert slides.code("import a\nfrom b import (\n    c,\n)\n\nx = c(a)") == "x = c(a)"
    assert slides.code("%%ranks two\nimport a\nprint(a)") == "%%ranks two\nprint(a)"
    assert slides.code("import a") == ""


def test_of_long_code_the_names_and_docstrings_are_shown(slides):
    body = "\n".join(f"    x = {number}" for number in range(20))
    within = body.replace("    x", "        x")
    source = (
        f'def f(x):\n    """What f does."""\n{body}\n\n\nclass A:\n    def g(self):\n{within}\n'
    )
    shown = slides.code(source)
    assert shown.splitlines()[:3] == ["def f(x):", '    """What f does."""', "    ..."]
    assert shown.splitlines()[-2:] == ["    def g(self):", "        ..."]
    assert "x = 3" not in shown
    assert slides.code("\n".join(f"print({number})" for number in range(20))) == ""


def test_a_lesson_becomes_parts(slides):
    lesson = [
        markdown("# 06 · Title\n\n**The question:** why?"),
        markdown(
            "## 1 · Idea\n\nA lead sentence that is surely long enough. And more.\n\n- one\n- two"
        ),
        code("import x\n\nx.draw()", FIGURE),
        markdown("### Below\n\nIt is so:"),
        code("print(1)", printed("\x1b[32m1\x1b[0m\n")),
        markdown("## Questions\n\nOne sentence that is long enough for a slide. Is it?"),
        markdown("<details><summary>Why?</summary>\n\nSo.\n\n</details>"),
        markdown("## Further reading\n\n- a paper"),
    ]
    parts = slides.deck({"cells": lesson})
    assert [part.title for part in parts] == ["06 · Title", "1 · Idea", "Questions"]
    assert [part.number for part in parts] == ["06", "1", ""]
    idea = "text", "notes", "list", "figure", "below", "text leads", "code leads", "output"
    assert tuple(kinds(parts[1])) == idea
    assert "<pre>1</pre>" in parts[1].pieces[-1]
    assert kinds(parts[2]) == ["text", "text", "notes"]
    for piece, words in zip(parts[2].pieces, ("Is it?", "Why?", "So.")):
        assert words in piece


def test_an_answer_and_the_words_behind_it_wait_for_one_key(slides):
    lesson = [
        markdown("# 06 · Title\n\n## 1 · Idea"),
        code(
            """predict("06 a rank's bytes", None, "bytes")""",
            printed("8 ranks\n06 a rank's bytes: write your number (bytes) in place of None.\n"),
        ),
        code("print(4)", printed("4"), FIGURE, jupyter={"outputs_hidden": True}),
        markdown("Four, because of this and because of that.\n\n## 2 · Next\n\nOpen again."),
    ]
    _, first, second = slides.deck({"cells": lesson})
    shown = ["output", "predict", "output fragment", "figure fragment", "text fragment"]
    assert kinds(first) == shown
    assert "<pre>8 ranks</pre>" in first.pieces[0]
    assert "a rank&#x27;s bytes (bytes)" in first.pieces[1]
    waits = [re.findall(r'data-fragment-index="(\d+)"', piece) for piece in first.pieces]
    assert waits == [[], [], ["2"], ["2"], ["2"]]
    assert "fragment" not in "".join(second.pieces)


def test_the_metadata_of_a_cell_comes_first(slides):
    def says(kind):
        return {"slideshow": {"slide_type": kind}}

    lesson = [
        markdown("# 06 · Title\n\n## 1 · Idea"),
        markdown("Not for the slides.", **says("skip")),
        markdown("For the speaker.", **says("notes")),
        code("print(1)", printed("1"), **says("subslide")),
        markdown("Later, at the press of a key.", **says("fragment")),
    ]
    _, idea = slides.deck({"cells": lesson})
    assert kinds(idea) == ["notes", "break", "code leads", "output", "text fragment"]
    assert "Not for the slides" not in "".join(idea.pieces)


def test_the_metadata_of_a_cell_is_stored():
    for kind in notebooks.SLIDE_TYPES:
        content = {"cells": [markdown("text", slideshow={"slide_type": kind}, other=1)]}
        content["cells"][0]["id"] = "a"
        content |= {"metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        stored = notebooks.normalise(notebooks.nbformat.from_dict(content))
        (cell,) = stored.cells
        assert cell.metadata == {"slideshow": {"slide_type": kind}}


def test_links_inside_the_course_are_words_and_others_stay(slides):
    text = slides.MARKDOWN.render("[a](../docs/glossary.md#a) and [b](https://example.org/)")
    assert text == '<p>a and <a href="https://example.org/">b</a></p>\n'


# --- the speaker's notes --------------------------------------------------------------------------

GUIDE = """# Guide

Lessons 05 to 07 are ready.

## A day

| time | what | remarks |
| --- | --- | --- |
| 0:00 | Lesson 06, sections 2 to 4 | Draw it. |
| 1:00 | Lesson 07 | Ask first. |
| 2:00 | Lab 06, exercise a | In pairs. |
| 3:00 | Lunch | |

Lesson 06: section 9 can wait. It is long. In lesson 07, vote. Nobody loses.

## An evening

| time | what | remarks |
| --- | --- | --- |
| 0:00 | Lesson 07 | Again. |

Lesson 06 is wanted before.

### 06 · Tensor parallel

Where it hurts: section 3.

- A list for it.

### 07 · Context parallel

Not for 06.
"""


def test_the_notes_are_what_the_guide_says_of_a_lesson(slides):
    assert slides.remarks(GUIDE, "06") == {
        "2": ["*Lesson 06, sections 2 to 4:* Draw it."],
        "": ["*Lab 06, exercise a:* In pairs.", "It is long.", "- A list for it."],
        "9": ["Lesson 06: section 9 can wait."],
        "3": ["Where it hurts: section 3."],
    }
    assert slides.remarks(GUIDE, "07") == {
        "": [
            "*Lesson 07:* Ask first.",
            "In lesson 07, vote.",
            "Nobody loses.",
            "*Lesson 07:* Again.",
            "Lesson 06 is wanted before.",
            "Not for 06.",
        ]
    }
    assert slides.remarks(GUIDE, "05") == {}


def test_the_guide_says_something_of_every_lesson(slides):
    guide = slides.read_guide()
    for path in ROOT.glob("notebooks/[0-9]*.ipynb"):
        assert slides.remarks(guide, path.name[:2]), path.name


# --- the environment ------------------------------------------------------------------------------


def pins(name):
    lines = (BOOK / name).read_text().splitlines()
    lines = [line.split("#")[0].strip() for line in lines]
    return {pin.name: pin for pin in map(Requirement, filter(None, lines))}


def test_the_list_of_the_book_is_locked():
    locked = pins("requirements.txt")
    for name, wish in pins("requirements.in").items():
        version = str(locked[name].specifier).removeprefix("==")
        assert wish.specifier.contains(version), f"{wish} is not {version}: make lock"
    for pin in locked.values():
        assert re.fullmatch(r"==[0-9][0-9a-z.!]*", str(pin.specifier)), pin
    assert "://" not in (BOOK / "requirements.txt").read_text()
    assert not {"torch", "jupyterlab"} & set(locked)


def test_what_fails_is_one_sentence_and_the_old_book_stays(tmp_path, monkeypatch, capsys):
    old = tmp_path / "build" / "index.html"
    old.parent.mkdir()
    old.write_text("old")
    failing = [sys.executable, "-c", "import sys; sys.exit('a page is broken')"]
    monkeypatch.setattr(book, "set_up", lambda: None)
    monkeypatch.setattr(book, "command", lambda *_: failing)
    monkeypatch.setattr(sys, "argv", ["book.py", "book", "--out", str(old.parent)])
    with pytest.raises(SystemExit, match="The book could not be made: a page is broken"):
        book.main()
    assert old.read_text() == "old"
    assert list(tmp_path.iterdir()) == [old.parent]


def test_a_new_book_takes_the_place_of_the_old(tmp_path, monkeypatch):
    old = tmp_path / "book" / "gone.html"
    old.parent.mkdir()
    old.touch()
    writes = "import os, sys; os.mkdir(sys.argv[1]); open(sys.argv[1] + '/new.html', 'w')"
    monkeypatch.setattr(book, "command", lambda _, out, __: [sys.executable, "-c", writes, out])
    assert book.build("book", str(old.parent)) == ""
    assert [path.name for path in old.parent.iterdir()] == ["new.html"]
    assert list(tmp_path.iterdir()) == [old.parent]


def test_an_environment_of_another_list_is_made_anew_and_an_interrupted_one_too(
    tmp_path, monkeypatch
):
    """Pip is stood in for: what counts is when it is called."""
    calls = []

    class Pip:
        def __init__(self, root, python, log):
            pass

        def run(self, title, command):
            calls.append(title)
            home = tmp_path / "book" / "bin"
            home.mkdir(parents=True)
            (home / "python").symlink_to(sys.executable)

        def install(self, title, *arguments):
            calls.append(title)
            if fails:
                raise SetupError("no network")

    (tmp_path / "list.txt").write_text("sphinx==9.0.4")
    monkeypatch.setattr(book, "Pip", Pip)
    monkeypatch.setattr(book, "HOME", str(tmp_path / "book"))
    monkeypatch.setattr(book, "PYTHON", str(tmp_path / "book/bin/python"))
    monkeypatch.setattr(book, "STAMP", str(tmp_path / "book/kintsugi.json"))
    monkeypatch.setattr(book, "LOCK", str(tmp_path / "list.txt"))
    fails = True
    with pytest.raises(SetupError, match="no network"):
        book.set_up()
    fails = False
    for change, expected in (("", 2), ("", 0), ("sphinx==9.0.5", 2), ("", 0)):
        if change:
            (tmp_path / "list.txt").write_text(change)
        calls.clear()
        book.set_up()
        assert len(calls) == expected
        assert json.loads((tmp_path / "book/kintsugi.json").read_text()) == book.fingerprint()


# The files of MathJax 3.2.2 and reveal.js 5.2.1 as their authors published them.
PUBLISHED = {
    "tex-svg.js": "d4295dc33744836935c1399feece5159577b34c5c8ffb9f1c6324cd82e03a882",
    "reveal.js": "46538b52db48724192f59bf46f5e851a18e302777c46f4a34c32709d010d6a29",
    "notes.js": "df1201d19d03241a2897d39c3d38768177df1cbd4bde06327b321cb83461ae89",
}


@pytest.mark.timeout(600)
def test_the_scripts_are_those_that_their_authors_published():
    book.set_up()
    found = {}
    for path in (ROOT / ".venv" / "book").rglob("*.js"):
        if path.name in PUBLISHED and ("mathjax" in str(path) or "/revealjs/" in str(path)):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == PUBLISHED
