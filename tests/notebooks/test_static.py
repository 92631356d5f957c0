"""Stored notebooks are executed, clean and complete (tests/notebooks/rules.py); links resolve."""

import copy
import json
import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.notebooks.rules import (
    EVERYWHERE,
    ambiguous,
    anatomy,
    broken_links,
    jupyter_anchor,
    markdown,
    slug,
    symbols,
)
from utils.paths import ROOT
from utils.workshop.notebooks import METADATA, answers, every_notebook, name, normalise, read

NOTEBOOKS = every_notebook()
LESSONS = [path for path in NOTEBOOKS if path.parent.name == "notebooks"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_notebooks_are_there():
    names = {name(path) for path in NOTEBOOKS}
    assert names >= {
        "notebooks/00_start_here.ipynb",
        "notebooks/01_data_parallel.ipynb",
        "labs/01_data_parallel/lab.ipynb",
        "labs/01_data_parallel/solution/lab.ipynb",
    }


@pytest.mark.parametrize("rule", EVERYWHERE, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebook(path, rule):
    complaints = list(rule(read(path), path))
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("path", LESSONS, ids=name)
def test_lesson(path):
    complaints = list(anatomy(read(path), path))
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_of_pages(path):
    complaints = list(broken_links(path.read_text(encoding="utf-8"), path))
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("page", [ROOT / "README.md", LESSONS[0]], ids=name)
def test_the_table_of_lessons_is_complete(page):
    text = markdown(read(page)) if page in LESSONS else page.read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\d\d) \| \[.+?\]\((?:notebooks/)?(\w+\.ipynb)\)", text)
    assert rows == [(path.name[:2], path.name) for path in LESSONS]


# --- the rules themselves: each must find its flaw, and no other must -------------------------

FIGURE = new_output(
    "display_data", {"image/png": "AAAA", "text/plain": "<Figure size 600x300 with 1 Axes>"}
)
ANSWER = "<details><summary>Answer</summary>\n\nBecause.\n\n</details>"
ENDING = f"## Summary\n\n## Three questions\n{ANSWER}\n{ANSWER}\n{ANSWER}\n\n## Further reading"


def lesson():
    """A lesson without flaws."""
    cells = [
        new_markdown_cell("# Sums\n\n5 minutes · CPU; the same on a GPU", id="title"),
        new_markdown_cell("![three boxes in a row](page.md) and [a word](page.md#word)", id="b"),
        new_code_cell("check(1)", id="c", execution_count=1),
        new_code_cell("plot()", id="d", execution_count=2, outputs=[FIGURE]),
        new_markdown_cell("The line rises.", id="e"),
        new_markdown_cell(ENDING, id="f"),
    ]
    cells[2].outputs = [new_output("stream", name="stdout", text="[ok] 1")]
    return new_notebook(cells=cells, metadata=METADATA, nbformat_minor=5)


def bind_again(notebook):
    """The third cell rebinds x, which the second uses from the first."""
    notebook.cells[2].source, notebook.cells[3].source = "x = 1", "f = lambda: x\nf()"
    notebook.cells.insert(5, new_code_cell("x = 2", id="g", execution_count=3))


ASKED = {"source": 'predict("a", None, "MB")  # no more than 2.5 MB\nreveal("a", 2.5)'}
SHOWN = "a\n  prediction     –\n  theory        2.5 MB\n  measurement        –\n"
REVEALED = new_output("stream", name="stdout", text=SHOWN)


def ask_openly(notebook):
    """The answer is in the cell that asks; the next cell is folded correctly."""
    notebook.cells[2].update(ASKED | {"outputs": [REVEALED]})
    notebook.cells[3].metadata.update(jupyter={"outputs_hidden": True})


SAYS = new_output("stream", name="stdout", text="in /tmp/pytest/x")
WRONG = new_output("stream", name="stdout", text="[x] 1")
FLAWS = [
    ("executed", lambda nb: nb.cells[3].update(execution_count=3)),
    ("executed", lambda nb: nb.cells[3].update(execution_count=None)),
    ("executed", lambda nb: nb.cells[2].update(source=" ")),
    ("errors", lambda nb: nb.cells[2].outputs.append(new_output("error", ename="E", evalue=""))),
    ("errors", lambda nb: nb.cells[2].metadata.update(tags=["raises-exception"])),
    ("ids", lambda nb: nb.cells[2].update(id="d")),
    ("metadata", lambda nb: nb.metadata.update(widgets={})),
    ("metadata", lambda nb: nb.cells[1].metadata.update(editable=False)),
    ("metadata", lambda nb: nb.cells[2].metadata.update(tags=["skip-me"])),
    ("metadata", lambda nb: nb.cells[2].metadata.update(slideshow={"slide_type": "-"})),
    ("metadata", lambda nb: nb.cells[2].metadata.update(jupyter={"outputs_hidden": True})),
    ("metadata", lambda nb: nb.cells[2].metadata.update(execution={"iopub.status.busy": "1"})),
    ("short_cells", lambda nb: nb.cells[3].update(source="x = 1\n" * 26)),
    ("findings", lambda nb: nb.cells[4].update(source="## Next")),
    ("findings", lambda nb: nb.cells.pop(4)),
    ("no_local_paths", lambda nb: nb.cells[2].outputs.append(SAYS)),
    ("no_local_paths", lambda nb: nb.cells[3].update(source="open('/home/me/x')")),
    ("english", lambda nb: nb.cells[1].update(source="so many bytes a token")),
    ("alt_texts", lambda nb: nb.cells[1].update(source="![](page.md)")),
    ("alt_texts", lambda nb: nb.cells[1].update(source='<img src="page.md">')),
    ("links", lambda nb: nb.cells[1].update(source="[gone](gone.md)")),
    ("links", lambda nb: nb.cells[1].update(source="[gone](page.md#no-such-word)")),
    ("links", lambda nb: nb.cells[1].update(source="[only on GitHub](page.md#αβ-model)")),
    ("links", lambda nb: nb.cells[1].update(source="[case](#summary)")),
    ("links", lambda nb: nb.cells[1].update(source='<a href="../gone">x</a>')),
    ("checks_pass", lambda nb: nb.cells[2].update(outputs=[WRONG])),
    ("run_again", lambda nb: bind_again(nb)),
    ("open_predictions", lambda nb: ask_openly(nb)),
    ("anatomy", lambda nb: nb.cells[0].update(source="# Sums\n\nCPU or GPU")),
    ("anatomy", lambda nb: nb.cells[0].update(source="# Sums\n\n5 minutes")),
    ("anatomy", lambda nb: nb.cells[5].update(source=ENDING.replace("## Summary", ""))),
    ("anatomy", lambda nb: nb.cells[5].update(source=ENDING.replace(ANSWER, "", 1))),
]


def complaints(notebook, folder):
    """The names of the rules that complain about `notebook`, stored as a lab's solution."""
    path = folder / "labs" / "01" / "solution" / "lab.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "page.md").write_text(
        '# Words\n\n### <a id="word"></a>Word\n\n### α–β (model)\n'
    )
    path.write_text(json.dumps(notebook))  # nbformat would repair some flaws
    return {rule.__name__ for rule in [*EVERYWHERE, anatomy] if list(rule(read(path), path))}


def test_nothing_is_wrong_with_a_good_notebook(tmp_path):
    assert complaints(lesson(), tmp_path) == set()


@pytest.mark.parametrize("rule, flaw", FLAWS)
def test_a_rule_sees_its_flaw(rule, flaw, tmp_path):
    flawed = copy.deepcopy(lesson())
    flaw(flawed)
    assert complaints(flawed, tmp_path) == {rule}


def with_symbols(*rows):
    table = "| symbol | meaning |\n| --- | --- |\n" + "".join(f"| {row} |\n" for row in rows)
    return new_notebook(cells=[new_markdown_cell(f"What does it cost?\n\n{table}\n$$N$$")])


def test_a_symbol_has_one_meaning_in_all_lessons():
    first, *others = LESSONS
    assert not list(ambiguous(read(first), {name(path): symbols(read(path)) for path in others}))


def test_ambiguous_symbols_are_found():
    first = with_symbols("$N$ | **ranks**", "$b$, $s$ | rows of a **micro-batch**, its **tokens**")
    others = {
        "good": with_symbols(
            "$N, k$ | ranks; all-reduces", r"$b,\ s$ | a micro-batch's tokens | B"
        ),
        "bad": with_symbols("$N$ | parameters", "$k$ | experts"),
    }
    assert list(ambiguous(first, {name: symbols(other) for name, other in others.items()})) == [
        "bad: N is “parameters”, not ranks",
        "bad: k is in good too, and not in the first lesson",
    ]


def test_what_answers_a_prediction_is_stored_folded():
    """The section's outputs up to its reveal; in later sections, only the reveal."""
    sources = ["1", 'predict("a", None)', "2", 'predict("b", None)', "%%ranks\n3", "4"]
    sources += ['reveal("a")', "5", 'x = 6\nreveal("b", measured=x)', "7"]
    cells = [new_code_cell(source, outputs=[SAYS]) for source in sources]
    cells[5].outputs = []
    cells.insert(7, new_markdown_cell("A word.\n\n## 2 · The next section"))
    notebook = normalise(new_notebook(cells=cells))
    assert answers(notebook) == {2, 4, 6, 9}
    folded = [cell.metadata == {"jupyter": {"outputs_hidden": True}} for cell in notebook.cells]
    assert [index for index, yes in enumerate(folded) if yes] == [2, 4, 6, 9]


def test_anchors():
    assert jupyter_anchor("Exercise a · `ring` all-reduce") == "Exercise-a-·-ring-all-reduce"
    assert slug("All-reduce (ring)") == "all-reduce-ring"
    assert slug('<a id="mfu"></a>MFU, [utilization](x.md)') == "mfu-utilization"
    assert slug("`bits per byte`, α–β") == "bits-per-byte-αβ"
