"""An instructor's slides for each lesson, from the stored notebooks (`make slides`).

    .venv/bin/python utils/workshop/book.py slides        or, in the book's environment,
    python docs/book/slides.py build/slides

Nothing is written twice. A lesson becomes a deck by these rules:

- Each `##` heading begins a part of the deck, whose slides are below each other; the space bar goes
  through all of them.
- The title slide has the lesson's first figure.
- Figures, formulas, tables, lists and predictions are shown as they are stored. Of a paragraph that
  begins a part, leads to something or follows a figure or a prediction's result, the slide shows
  the first sentence and those with something in bold.
- Code that defines something is shown in sections "by hand" and "break it", in at most 12 lines
  without its imports; printed output is shown if it answers a prediction or shows a bug. The rest
  stays in the notebook. `predict(…)` becomes a call to guess; its answer, and the text after that,
  wait for a key.
- Questions are shown in full; their answers are in the speaker's notes. Further reading is omitted.
- The notes are the lesson's own paragraphs in full, and the remarks of docs/instructor.md and
  docs/instructor/lessons.md on the lesson or one of its sections.
- A cell's slideshow metadata, as set by JupyterLab's property inspector, overrides the rules:
  "slide" and "subslide" begin a slide, "fragment" waits for a key, "skip" is left out, "notes" goes
  to the notes.

slides.js divides the content of a part among slides of 1280 × 720, by its real height.
"""

import ast
import html
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[2]
STATIC = Path(__file__).with_name("slides")
GUIDES = ("docs/instructor.md", "docs/instructor/lessons.md")
MOST_LINES = 12  # of code
MOST_OUTPUT = 14  # lines of printed text
SENTENCE = re.compile(r"(?<=[.!?])([)*”]*)\s+(?=[A-Z`$*(\[“])")
COLOURS = re.compile(r"\x1b\[[\d;]*m")
PREDICT = re.compile(r"""\bpredict\(\s*(["'])(.+?)\1,\s*None(?:,\s*(["'])(.*?)\3)?""")
# The output of predict and reveal without a prediction.
UNANSWERED = re.compile(
    r"(?m)^(.*: write your .* in place of None\.|  prediction +–|No prediction was made.*)\n?"
)
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|al|Fig|No|approx)\.$")


# --- Markdown to HTML -----------------------------------------------------------------------------


def renderer() -> MarkdownIt:
    """Markdown as in the notebooks; links inside the course become plain text."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table").use(dollarmath_plugin)
    opened = []

    def link_open(self, tokens, index, options, env):
        target = tokens[index].attrGet("href")
        opened.append("://" in target)
        return f'<a href="{html.escape(target)}">' if opened[-1] else ""

    def link_close(self, tokens, index, options, env):
        return "</a>" if opened.pop() else ""

    def formula(begin, end):
        def render(self, tokens, index, options, env):
            return begin + html.escape(tokens[index].content) + end

        return render

    markdown.add_render_rule("link_open", link_open)
    markdown.add_render_rule("link_close", link_close)
    markdown.add_render_rule("math_inline", formula(r"\(", r"\)"))
    markdown.add_render_rule("math_inline_double", formula(r"\[", r"\]"))
    markdown.add_render_rule("math_block", formula(r'<p class="formula">\[', r"\]</p>"))
    return markdown


MARKDOWN = renderer()


def sentences(text: str) -> list[str]:
    """A paragraph's sentences; none ends inside code, a formula, bold text or brackets."""
    found = [""]
    for piece in SENTENCE.sub(r"\1\n", " ".join(text.split())).split("\n"):
        before = found[-1]
        whole = not ABBREVIATION.search(before) and all(
            before.count(mark) % 2 == 0 for mark in ("`", "$", "**")
        )
        if before and whole and before.count("(") <= before.count(")"):
            found.append(piece)
        else:
            found[-1] = f"{before} {piece}".strip()
    return found


def lead(text: str) -> str:
    """A paragraph's text on a slide: its first sentence, and those with something in bold."""
    first, *rest = sentences(text)
    if len(first) < 40 and rest:  # "All equal." says little on its own
        first += " " + rest.pop(0)
    return " ".join([first] + [sentence for sentence in rest if "**" in sentence])


# --- a deck ---------------------------------------------------------------------------------------


@dataclass
class Part:
    """The content below one heading: its title, and pieces of HTML in order."""

    title: str
    pieces: list[str] = field(default_factory=list)
    waits: int | None = None  # pieces added now appear with this key

    @property
    def number(self) -> str:
        found = re.match(r"\d+", self.title)
        return found[0] if found else ""

    @property
    def is_open(self) -> bool:
        """Whether text explains the piece above it: a title, a figure, a prediction's result."""
        shown = [piece.split(">", 1)[0] for piece in self.pieces if piece.startswith("<div")]
        return not shown or re.search(r"piece (below|figure)|fragment", shown[-1]) is not None

    def add(self, kind: str, content: str, more: str = "") -> None:
        """Add one piece; slides.js keeps it whole, or splits it by rows, items or lines."""
        kinds = " ".join(filter(None, ["piece", kind, more]))
        key = "" if self.waits is None else f' data-fragment-index="{self.waits}"'
        kinds += " fragment" if key else ""
        self.pieces.append(f'<div class="{kinds}"{key}>{content}</div>')

    def leave_what_leads_nowhere(self) -> None:
        """Move text that leads to a figure, table or code not on the slides to the notes."""
        below = ""
        for number in reversed(range(len(self.pieces))):
            piece = self.pieces[number]
            if not piece.startswith("<div"):
                continue
            kind = piece.split(">", 1)[0]
            led_to = re.search(r"piece (figure|table|list|math|code|output|predict)", below)
            alone = sum(other.startswith("<div") for other in self.pieces) == 1
            if "piece text leads" in kind and not (led_to or alone or "<strong>" in piece):
                words = piece.split(">", 1)[1].removesuffix("</div>")
                self.pieces[number] = f'<aside class="notes">{words}</aside>'
            elif "piece below" in kind and not re.search(r"piece (?!below|break)", below):
                self.pieces[number] = ""  # a heading without content
            else:
                below = kind

    def note(self, text: str) -> None:
        """Add Markdown for the speaker."""
        if text.strip():
            self.pieces.append(f'<aside class="notes">{MARKDOWN.render(text)}</aside>')


def deck(notebook: dict) -> list[Part]:
    """A lesson's parts; the first one has its title."""
    parts, answered = [Part("")], None
    for index, cell in enumerate(notebook["cells"]):
        kind = cell["metadata"].get("slideshow", {}).get("slide_type", "-")
        part, source = parts[-1], "".join(cell["source"])
        if kind == "skip":
            continue
        if kind == "notes":
            part.note(source)
            continue
        if kind in ("slide", "subslide"):
            part.add("break", "")
        if cell["cell_type"] == "markdown":
            part.waits = index if kind == "fragment" else answered
            add_markdown(parts, source)
            answered = None
        else:
            answer = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            answered = index if answer else None
            part.waits = index if kind == "fragment" else None
            add_code(part, cell, source, answered)
    for part in parts:
        part.waits = None
        part.leave_what_leads_nowhere()
    pictures = (piece for part in parts for piece in part.pieces if 'class="piece figure' in piece)
    if picture := next(pictures, ""):
        parts[0].pieces.insert(0, picture.replace("piece figure", "piece cover"))
    shown = [part for part in parts if not part.title.lower().startswith("further reading")]
    return [part for part in shown if part is parts[0] or part.pieces]


def blocks(source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, Markdown, words) of each block: h1, h2 …, p, ul, ol, table, math, code, html, details.

    `words` are a heading's or a paragraph's text. The content of <details> is one block, with its
    summary as words.
    """
    kinds = {"math_block": "math", "fence": "code", "html_block": "html"}
    lines, tokens = source.splitlines(), MARKDOWN.parse(source)
    folded, depth = [], 0
    for index, token in enumerate(tokens):
        if token.level or token.nesting < 0 or token.map is None:
            continue
        text = "\n".join(lines[slice(*token.map)])
        opens, closes = text.count("<details"), text.count("</details>")
        if token.type == "html_block" and (opens or depth):
            depth += opens - closes
            folded.append(text)
        elif depth:
            depth -= closes
            folded.append(text)
        else:
            kind = kinds.get(token.type, token.tag)
            yield kind, text, tokens[index + 1].content if kind[0] in "hp" and token.nesting else ""
        if folded and not depth:
            whole = "\n\n".join(folded)
            folded = []
            summary = re.search(r"(?s)<summary>(.*?)</summary>", whole)
            yield "details", re.sub(r"</?details>|<summary>.*?</summary>", "", whole), summary[1]


def add_markdown(parts: list[Part], source: str) -> None:
    """Add a Markdown cell: headings begin parts or slides, the rest goes below them."""
    for kind, text, words in blocks(source):
        part = parts[-1]
        if kind in ("h1", "h2", "h3", "h4"):
            part.waits = None
        if kind == "h1":
            part.title = words
        elif kind == "h2":
            parts.append(Part(words))
        elif kind in ("h3", "h4"):
            part.add("below", MARKDOWN.renderInline(words))
        elif kind == "p":
            shown = words if "question" in part.title.lower() else lead(words)
            leads = not re.search(r"[.!?][)*”]*$", shown) or "**Predict" in shown
            explains = part.is_open or "**" in shown or "question" in part.title.lower()
            if leads or explains:
                part.add("text", MARKDOWN.render(shown), "leads" if leads else "")
            if " ".join(words.split()) != " ".join(shown.split()) or not (leads or explains):
                part.note(words)
        elif kind == "details":
            if not words.lower().startswith("answer"):  # otherwise it is the question itself
                part.add("text", f"<p>{MARKDOWN.renderInline(words)}</p>")
            part.note(f"*{words}:* {text.strip()}")
        elif kind in ("ul", "ol"):
            part.add("list", MARKDOWN.render(text))
        elif kind in ("table", "math", "code"):
            part.add(kind, MARKDOWN.render(text))
        elif kind != "hr":
            part.add("text", MARKDOWN.render(text))


# --- code and its output --------------------------------------------------------------------------


def add_code(part: Part, cell: dict, source: str, answer: int | None) -> None:
    """Add a code cell: a call to predict, or its code and outputs. An answer waits for a key."""
    asked = PREDICT.findall(source)
    for output in cell["outputs"] if asked else []:
        if text := UNANSWERED.sub("", printed(output)).rstrip():
            part.add("output", f"<pre>{html.escape(text)}</pre>")
    for _, name, _, unit in asked:
        words = html.escape(re.sub(r"^\d\d ", "", name) + (f" ({unit})" if unit else ""))
        part.add("predict", f"<b>Predict:</b> {words}")
    if asked:
        return
    draws = any("image/png" in output.get("data", {}) for output in cell["outputs"])
    bug = "break it" in part.title.lower()
    hidden = draws or not (bug or "by hand" in part.title.lower())
    if shown := "" if hidden else code(source):
        text = highlight(shown, PythonLexer(), HtmlFormatter(nowrap=True))
        part.add("code", f"<pre>{text.rstrip()}</pre>")
    part.waits = part.waits if answer is None else answer
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            picture = "".join("".join(data["image/png"]).split())
            part.add("figure", f'<img alt="" src="data:image/png;base64,{picture}">')
        elif "text/html" in data:
            part.add("table", "".join(data["text/html"]))
        elif (answer or bug) and (text := UNANSWERED.sub("", printed(output)).rstrip()):
            part.add("output", f"<pre>{html.escape(shortened(text))}</pre>")


def printed(output: dict) -> str:
    """An output's text; an error's name and message, without the traceback."""
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    text = "".join(output.get("text") or output["data"].get("text/plain", ""))
    return COLOURS.sub("", text).rstrip()


def shortened(text: str) -> str:
    """A cell's printed output, at most MOST_OUTPUT lines of it."""
    lines = text.splitlines()
    if len(lines) > MOST_OUTPUT:
        lines[MOST_OUTPUT - 1 :] = [f"… {len(lines) - MOST_OUTPUT + 1} more lines"]
    return "\n".join(lines)


def code(source: str) -> str:
    """A cell's code without its imports, if it defines something and fits on a slide; else ""."""
    magic, _, rest = source.partition("\n") if source.startswith("%%") else ("", "", source)
    try:
        tree = ast.parse(re.sub(r"(?m)^(\s*)[%!]", r"\1# ", rest))
    except SyntaxError:
        return ""
    if not any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in tree.body):
        return ""
    gone = {
        line
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, node.end_lineno + 1)
    }
    kept = [line for number, line in enumerate(rest.splitlines(), start=1) if number not in gone]
    text = re.sub(r"\n{2,}", "\n\n", "\n".join(kept)).strip("\n")
    if len(text.splitlines()) > MOST_LINES:
        return ""
    return f"{magic}\n{text}" if magic else text


# --- the instructor guide -------------------------------------------------------------------------

LESSON = re.compile(r"\b[Ll]esson (\d\d)\b")
LAB = re.compile(r"\b[Ll]ab (\d\d)\b")
SECTIONS = re.compile(r"\b[Ss]ections? (\d+)")


def read_guide() -> str:
    """The instructor guide: its programmes, then its remarks lesson by lesson."""
    return "\n\n".join((ROOT / path).read_text(encoding="utf-8") for path in GUIDES)


def remarks(guide: str, lesson: str) -> dict[str, list[str]]:
    """{section or "": [Markdown]} of the guide's remarks on a lesson such as "06".

    They are the text below a heading that names the lesson; rows of tables whose second column
    names it, with their remark; and, of other paragraphs, all below a table of this lesson alone,
    or else the sentences from one that begins with it to one that begins with another.
    """
    found: dict[str, list[str]] = {}

    def keep(text, place):
        section = SECTIONS.search(place)
        found.setdefault(section[1] if section else "", []).append(text.strip())

    below = 0  # the level of the heading that names the lesson, or 0
    tabled: set[str] = set()  # the lessons of the tables below this heading
    for kind, text, words in blocks(guide):
        if re.fullmatch("h[1-6]", kind):
            level, tabled = int(kind[-1]), set()
            names = re.match(rf"(?:Lesson )?{lesson}\b", words)
            below = level if names else (0 if level <= below else below)
        elif below:
            keep(text, text if kind == "p" else "")
        elif kind == "table":
            for row in text.splitlines()[2:]:
                _, what, remark, *_ = [cell.strip() for cell in f"{row[1:]}||".split("|")]
                named = LESSON.findall(what) + LAB.findall(what)
                tabled.update(named)
                if remark and lesson in named:
                    keep(f"*{what}:* {remark}", what)
        elif kind == "p":
            about = next(iter(tabled)) if len(tabled) == 1 else ""
            for sentence in sentences(words):
                named = LESSON.findall(sentence[:40]) + LAB.findall(sentence[:40])
                about = named[0] if named and len(tabled) != 1 else about
                if about == lesson:
                    keep(sentence, "" if LAB.search(sentence[:40]) else sentence)
    return found


# --- the pages ------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="static/reset.css">
<link rel="stylesheet" href="static/reveal.css">
<link rel="stylesheet" href="static/slides.css">
</head>
<body>
<div class="reveal"><div class="slides">
{parts}
</div></div>
<script>MathJax = {{options: {{enableMenu: false}}, startup: {{typeset: false}}}};</script>
<script src="static/tex-svg.js"></script>
<script src="static/reveal.js"></script>
<script src="static/notes.js"></script>
<script src="static/slides.js"></script>
</body>
</html>
"""

INDEX = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Kintsugi: the slides</title>
<link rel="stylesheet" href="static/slides.css">
</head>
<body class="index">
<h1>Kintsugi: the slides</h1>
<ul>
{rows}
</ul>
<p><kbd>Space</kbd> advances, <kbd>←</kbd> and <kbd>→</kbd> go from part to part, <kbd>Esc</kbd>
shows all slides, <kbd>S</kbd> opens the speaker's view with the notes, <kbd>F</kbd> fills the
screen. Add <code>?print-pdf</code> to a deck's address and print it to get a PDF.</p>
</body>
</html>
"""


def page(path: Path, guide: str) -> tuple[str, str]:
    """(title, HTML) of the deck of one lesson."""
    parts = deck(json.loads(path.read_text(encoding="utf-8")))
    said = remarks(guide, path.name[:2])
    for number, part in enumerate(parts):
        notes = said.pop("" if number == 0 else part.number or "none", [])
        if notes:  # the guide comes before the lesson's own text
            whole = Part(part.title)
            whole.note("**Guide**\n\n" + "\n\n".join(notes))
            part.pieces[:0] = whole.pieces
    shown = []
    for number, part in enumerate(parts):
        heading = f'<h2 class="title">{MARKDOWN.renderInline(part.title)}</h2>'
        kind = "first" if number == 0 else "part"
        lines = [f'<section class="{kind}">', heading, *part.pieces, "</section>"]
        shown.append("\n".join(lines))
    title = parts[0].title
    return title, PAGE.format(title=html.escape(title), parts="\n".join(shown))


def vendored(out: Path) -> None:
    """Copy the files that the decks load: reveal.js and MathJax from their packages, and ours."""
    out.mkdir(parents=True)
    reveal = "sphinx_revealjs/_static/revealjs"
    for package, file in (
        ("sphinx-revealjs", f"{reveal}/dist/reset.css"),
        ("sphinx-revealjs", f"{reveal}/dist/reveal.css"),
        ("sphinx-revealjs", f"{reveal}/dist/reveal.js"),
        ("sphinx-revealjs", f"{reveal}/plugin/notes/notes.js"),
        ("sphinx-mathjax-offline", "sphinx-mathjax-offline/static/mathjax/tex-svg.js"),
    ):
        shutil.copy(str(distribution(package).locate_file(file)), out)
    shutil.copy(STATIC / "slides.js", out)
    colours = HtmlFormatter(style="friendly").get_style_defs(".code pre")
    look = (STATIC / "slides.css").read_text(encoding="utf-8")
    (out / "slides.css").write_text(f"{look}\n{colours}\n", encoding="utf-8")


def main() -> None:
    out = Path(sys.argv[1])
    vendored(out / "static")
    guide, rows = read_guide(), []
    for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        title, text = page(path, guide)
        (out / f"{path.stem}.html").write_text(text, encoding="utf-8")
        asked = re.search(r"\*\*The question:\*\* ([^\\]+)", path.read_text(encoding="utf-8"))
        link = f'<a href="{path.stem}.html">{html.escape(title)}</a>'
        rows.append(f"<li>{link} {html.escape(asked[1])}</li>")
    (out / "index.html").write_text(INDEX.format(rows="\n".join(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
