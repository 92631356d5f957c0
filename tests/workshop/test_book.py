"""How notebooks become slides and pages of the book, on small notebooks made here."""

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
    """docs/book/slides.py, which is not in a package."""
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


def shown(part):
    """The kinds of the pieces on each slide of a part; an extra's are in a list."""

    def kind(piece):
        return piece.kind if hasattr(piece, "kind") else [each.kind for each in piece.pieces]

    return [[kind(piece) for piece in slide] for slide in part.slides()]


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
    shown = slides.code("import a\nfrom b import (\n    c,\n)\n\ndef f(): c(a)")
    assert shown == "def f(): c(a)"
    assert slides.code("%%ranks two\nimport a\nprint(a)") == "%%ranks two\nprint(a)"
    assert slides.code("import a") == slides.code("x = 1") == ""


def test_long_code_is_for_the_notebook(slides):
    body = "\n".join(f"    x = {number}" for number in range(20))
    assert slides.code(f"def f(x):\n{body}\n") == ""


def test_a_lesson_becomes_parts(slides):
    lesson = [
        markdown("# 06 · Title\n\n**The question:** why?\n\nYou will\n\n1. see."),
        markdown(
            "## 1 · Idea\n\nA lead sentence that is surely long enough. And more.\n\n- one\n- two"
        ),
        code("import x\n\nx.draw()", FIGURE),
        markdown("What it shows, in a sentence of its own.\n\n### Below\n\nIt is so:\n\n$$a$$"),
        code("print(1)", printed("\x1b[32m1\x1b[0m\n")),
        markdown("## Questions\n\nOne sentence that is long enough for a slide. Is it?"),
        markdown("<details><summary>Why?</summary>\n\nSo.\n\n</details>"),
        markdown("## Further reading\n\n- a paper"),
    ]
    parts = slides.deck({"cells": lesson})
    assert [part.title for part in parts] == ["06 · Title", "1 · Idea", "Questions"]
    assert [part.number for part in parts] == ["06", "1", ""]
    assert [piece.kind for piece in parts[0].pieces] == ["cover", "text", "notes", "notes"]
    list_, figure = ["text", "notes", "list"], ["figure", ["text"]]
    assert shown(parts[1]) == [list_, figure, ["below", "text", "math"]]
    assert shown(parts[2]) == [["text", ["text"], "notes"]]
    for piece, words in zip(parts[2].pieces, ("Is it?", "Why?", "So.")):
        assert words in piece.content


def test_an_answer_and_the_words_behind_it_wait_for_one_key(slides):
    answer = "06 a rank's bytes\n  prediction   –\n  theory   4 bytes\n  measurement   –\n"
    lesson = [
        markdown("# 06 · Title\n\n## 1 · Idea\n\nLook. **Predict**: how many bytes? (Not bits.)"),
        code(
            """predict("06 a rank's bytes", None, "bytes")""",
            printed("06 a rank's bytes: write your number (bytes) instead of None.\n"),
        ),
        code(
            """reveal("06 a rank's bytes", theory=4)""",
            FIGURE,
            printed(answer + "No prediction was made: next time, guess before you run.\n4 = 4\n"),
            jupyter={"outputs_hidden": True},
        ),
        markdown("Four, because of this and because of that.\n\n## 2 · Next\n\nOpen again."),
    ]
    _, first, second = slides.deck({"cells": lesson})
    assert shown(first) == [["text", "predict", "notes", "answer", ["output"], ["text"]]]
    _, question, _, found, output, text = first.pieces
    assert question.content == "<p><strong>Predict</strong>: how many bytes?</p>\n"
    assert "theory <b>4 bytes</b></p>" in found.content and "4 = 4" in output.content
    assert [piece.waits for piece in (question, found, output, text)] == [None, 2, 2, 2]
    assert second.pieces[0].waits is None


def test_one_bug_is_shown_and_what_can_wait_is_in_the_notes(slides):
    lesson = [
        markdown("# 06 · Title\n\n## 1 · Break it\n\n### Bug 1\n\nThe first bug draws nothing."),
        markdown("### Bug 2\n\nThe second bug has a figure."),
        code("draw()", FIGURE),
        markdown("### Bug 3 (can wait)\n\nThe third bug has one, too."),
        code("draw()", FIGURE),
    ]
    _, bugs = slides.deck({"cells": lesson})
    assert shown(bugs) == [["notes"] * 2 + ["below", "text", "figure"] + ["notes"] * 3]


def test_the_metadata_of_a_cell_comes_first(slides):
    def says(kind):
        return {"slideshow": {"slide_type": kind}}

    lesson = [
        markdown("# 06 · Title\n\n## 1 · By hand"),
        markdown("Not for the slides.", **says("skip")),
        markdown("For the speaker.", **says("notes")),
        code("draw()", FIGURE, **says("notes")),
        code("def f(): pass", printed("1"), **says("subslide")),
        markdown("Later, at the press of a key.", **says("fragment")),
    ]
    _, part = slides.deck({"cells": lesson})
    assert shown(part) == [["notes", "notes", "code", "output", ["text"]]]
    assert part.pieces[-1].waits == 5
    assert "Not for the slides" not in "".join(piece.content for piece in part.pieces)


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
        "2": ["**A day:** *Lesson 06, sections 2 to 4:* Draw it."],
        "": [
            "**A day:** *Lab 06, exercise a:* In pairs.",
            "**A day:** It is long.",
            "- A list for it.",
        ],
        "9": ["**A day:** Lesson 06: section 9 can wait."],
        "3": ["Where it hurts: section 3."],
    }
    assert slides.remarks(GUIDE, "07") == {
        "": [
            "**A day:** *Lesson 07:* Ask first.",
            "**A day:** In lesson 07, vote.",
            "**A day:** Nobody loses.",
            "**An evening:** *Lesson 07:* Again.",
            "**An evening:** Lesson 06 is wanted before.",
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
    """With a stand-in for pip, which counts the calls."""
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


# Hashes of MathJax 3.2.2 and reveal.js 5.2.1 as published.
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
