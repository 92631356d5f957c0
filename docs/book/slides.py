"""An instructor's slides for each lesson, from the stored notebooks (`make slides`).

    .venv/bin/python utils/workshop/book.py slides        or, in the book's environment,
    python docs/book/slides.py build/slides

Nothing is written twice. A lesson becomes a deck by these rules:

- The title's slide has the lesson's question and its first figure.
- Each `##` heading begins a part. Its first slide has the title, large, the sentence that says what
  the part is about, and the first thing to look at.
- A slide has one thing to look at: a figure, a formula or a prediction with its answer; a table, a
  list or code only where a slide has nothing else. What leads to it is above it, the sentence that
  explains it below. Of a paragraph the slide shows the first sentence and those with something in
  bold, of a list the same of each item.
- A sentence that points at a figure goes with the figure; one that refers to what no slide shows
  ("the next cell") goes to the notes.
- All else is shown where there is room for it, and is otherwise in the speaker's notes.
- Code that defines something or runs on ranks is shown in sections "by hand" and "break it", in at
  most 12 lines without its imports. What was printed is shown there, below a prediction, and where
  a part has nothing else to look at. "Break it" shows one bug: the one whose heading is marked as a
  "slide", or else the first with a figure or a prediction.
- `predict(…)` becomes the question above it. What follows waits for a key, and so does the answer:
  a line with theory and measurement instead of the figure that `reveal` draws.
- Questions are shown whole, their answers are in the speaker's notes. A part of a single sentence,
  and one "with the library" that has only words, go to the notes of the slide before them. Of a
  part that can wait one slide is shown, of a section that can wait none. Further reading is left
  out.
- The notes are the lesson's own paragraphs in full, everything that a slide leaves out, and what
  docs/instructor/lessons.md and docs/instructor.md say of the lesson or of one of its sections, the
  latter with the programme's name.
- A cell's slideshow metadata, as JupyterLab's property inspector writes it, comes before the rules:
  "slide" and "subslide" begin a slide, and what is printed next is shown on it; "fragment" waits
  for a key, "skip" is left out, "notes" goes to the notes.

slides.js fits a slide into 1280 × 720: it shrinks a figure and moves what has no room to the notes.
"""

import ast
import html
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path

from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parents[2]
STATIC = Path(__file__).with_name("slides")
GUIDES = ("docs/instructor.md", "docs/instructor/lessons.md")
CAN_WAIT = "(can wait)"  # in a heading
MOST_LINES = 12  # of code
MOST_OUTPUT = 10  # lines of printed text
MOST_ABOVE = 240  # letters of words and formulas above a figure
MOST_TEX = 100  # letters of formulas in one line
MOST_WORDS = 4  # statements of a part with nothing else
SENTENCE = re.compile(r"(?<=[.!?])([)*”]*)\s+(?=[A-Z`$*(\[“])")
ITEM = re.compile(r"(?ms)^([-*] |\d+[.)] )(.+?)(?=\n[-*] |\n\d+[.)] |\Z)")
NUMBER = re.compile(r"^(\d+)(?= ·)")
COLOURS = re.compile(r"\x1b\[[\d;]*m")
PREDICT = re.compile(r"""\bpredict\(\s*(["'])(.+?)\1,\s*None(?:,\s*(["'])(.*?)\3)?""")
# What reveal prints: a name, three lines, and sentences that compare them.
REVEALED = re.compile(
    r"(?m)^(?:\d\d )?(.+)\n  prediction .*\n  theory +(.+)\n  measurement +(.+)"
    r"(?:\n(?:No prediction was|Your prediction is|The theory is) .*)*\n?"
)
UNANSWERED = re.compile(r"(?m)^.*: write your .* instead of None\.\n?")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|al|Fig|No|approx)\.$")
# A sentence that no slide can show by itself: it refers to a cell, a line, a picture elsewhere.
ELSEWHERE = re.compile(
    r"\b(?:next|following) cells?\b|\bcells? (?:above|below)\b|\bsee below\b|\bthe formula above\b"
    r"|\b(?:those|these) (?:two|three|four) lines\b"
    r"|^The answer is [*`$]*\w[*`$]*,|\bthe last two results\b|\bnumbered comments\b"
)
FOLLOWS = re.compile(r"(?:From then|Such|Its?|They|Then|Th[eo]se|Th[ai][ts]|The rest|So|But|And)\b")
# A sentence that points at a figure, and those of a caption that continue such a sentence.
POINTS = re.compile(
    r"^(?:Now )?(?:[Ll]ook (?:for|at)|Read (?:it|the (?:picture|figure|upper|lower))|Colours are)\b"
    r"|^(?:Left|Top):|[.?:] Look (?:for|at)\b|\bin one picture\b|^On the (?:left|right)\b"
)
CONTINUES = re.compile(r"(?:Middle|Right|Bottom):")


# --- Markdown to HTML -----------------------------------------------------------------------------


def renderer() -> MarkdownIt:
    """Markdown as the notebooks have it; links inside the course become plain words."""
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
            return begin + html.escape(in_lines(tokens[index].content)) + end

        return render

    markdown.add_render_rule("link_open", link_open)
    markdown.add_render_rule("link_close", link_close)
    markdown.add_render_rule("math_inline", formula(r"\(", r"\)"))
    markdown.add_render_rule("math_inline_double", formula(r"\[", r"\]"))
    markdown.add_render_rule("math_block", formula(r'<p class="formula">\[', r"\]</p>"))
    return markdown


MARKDOWN = renderer()


def in_lines(tex: str) -> str:
    """Formulas side by side, in two lines where they are too wide for a slide."""
    wide = len(tex) > MOST_TEX and r"\begin" not in tex
    formulas = tex.split(r"\qquad") if wide else [tex]
    if len(formulas) == 1 or any(each.count("{") != each.count("}") for each in formulas):
        return tex
    until = [len("".join(formulas[:number])) for number in range(len(formulas))]
    half = min(range(1, len(formulas)), key=lambda number: abs(len(tex) - 2 * until[number]))
    lines = (r"\qquad".join(part) for part in (formulas[:half], formulas[half:]))
    return r"\begin{gathered}" + r" \\[6pt] ".join(lines) + r"\end{gathered}"


def sentences(text: str) -> list[str]:
    """A paragraph's sentences; none ends inside of code, a formula, bold words or brackets."""
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
    """What a slide shows of a paragraph: its first sentence, and those with something in bold.

    Nothing if what remains depends on a sentence that refers elsewhere, or says little without it.
    """
    found = sentences(text)
    found = [words for words in found if not words.startswith("(")] or found
    kept = [words for words in found if not ELSEWHERE.search(words)]
    if not kept or (kept[0] is not found[0] and FOLLOWS.match(kept[0])):
        return ""
    first, *rest = kept
    if len(first) < 40 and rest:  # "All equal." says little by itself
        first += " " + rest.pop(0)
    if len(first) < 40 and len(kept) < len(found):
        return ""
    more = [words for words in rest if "**" in words or CONTINUES.match(words)]
    return " ".join([first, *more])


def question(text: str) -> tuple[str, str]:
    """A paragraph's words before a prediction that it asks for, and that question, or ""."""
    found = sentences(text)
    begin = next((n for n, sentence in enumerate(found) if "**Predict" in sentence), len(found))
    ends = (n for n in range(begin, len(found)) if "?" in found[n])
    end = next(ends, begin) + 1
    return " ".join(found[:begin]), " ".join(found[begin:end])


# --- a deck ---------------------------------------------------------------------------------------


@dataclass
class Piece:
    """A piece of a slide, or of the speaker's notes."""

    # text, below, figure, math, predict, answer, table, list, code, output, spare, notes, break
    kind: str
    content: str  # HTML
    waits: int | None = None  # comes with this key
    leads: bool = False  # a text that leads to the next piece
    noted: bool = False  # the notes have all of it

    @property
    def html(self) -> str:
        if self.kind == "notes":
            return f'<aside class="notes">{self.content}</aside>'
        key = "" if self.waits is None else f' data-fragment-index="{self.waits}"'
        kinds = f"piece {self.kind}" + " noted" * self.noted + " fragment" * bool(key)
        return f'<div class="{kinds}"{key}>{self.content}</div>'


@dataclass
class Extra:
    """Pieces that slides.js moves to the notes unless a slide has room for all of them."""

    pieces: list[Piece]
    explains: bool = False  # a figure becomes smaller for it
    caption: bool = False  # … and smaller still

    @property
    def html(self) -> str:
        notes = [piece.html for piece in self.pieces if piece.kind == "notes"]
        shown = [piece.html for piece in self.pieces if piece.kind != "notes"]
        kinds = "extra" + " explains" * self.explains + " caption" * self.caption
        return "".join([f'<div class="{kinds}">', *shown, "</div>", *notes])


# What may already be on a slide to which a figure, a formula … is added. Else the strong ones begin
# a slide, and the weak ones are extras.
STRONG = {"figure": [{"math"}, {"predict"}], "math": [{"math", "predict"}], "predict": [{"math"}]}
WEAK = {"table": [set()], "list": [set()], "code": [set()], "output": [{"code"}]}
BESIDE = STRONG | WEAK


def flat(pieces: list[Piece | Extra]) -> list[Piece]:
    """The pieces, and those of the extras."""
    return [one for piece in pieces for one in getattr(piece, "pieces", [piece])]


def words_of(piece: Piece) -> str:
    """A piece's text without its HTML."""
    return html.unescape(re.sub(r"<[^>]*>", "", piece.content)).strip()


def length(pieces: list[Piece | Extra]) -> int:
    """The letters that a slide shows of them in any case."""
    shown = [p for p in pieces if isinstance(p, Piece) and p.kind in ("text", "math", "predict")]
    return sum(len(re.sub(r"<[^>]*>", "", piece.content)) for piece in shown)


def unseen(pieces: list[Piece]) -> list[Piece]:
    """The same pieces as notes."""
    kept = [piece for piece in pieces if piece.kind != "break" and not piece.noted]
    return [Piece("notes", piece.content) for piece in kept]


def wait_in_turn(slides: list[list[Piece | Extra]]) -> None:
    """Let no piece of a slide come before one above it."""
    for slide in slides:
        key = None
        for piece in [piece for piece in flat(slide) if piece.kind != "notes"]:
            if key is not None:
                piece.waits = max(key, piece.waits or key)
            key = piece.waits


@dataclass
class Part:
    """What is below one `##` heading: its title, and pieces in their order."""

    title: str
    pieces: list[Piece] = field(default_factory=list)
    waits: int | None = None  # what is added now comes with this key
    asked: bool = False  # a question waits for the call to predict
    cell: int = 0  # the number of the cell that is added
    pending: bool = False  # a question waits for its answer
    marked: bool = False  # a cell says that a slide begins here

    @property
    def number(self) -> str:
        found = re.match(r"\d+", self.title)
        return found[0] if found else ""

    def is_about(self, words: str) -> bool:
        return words in self.title.lower()

    def add(self, kind: str, content: str, **how) -> None:
        """A piece; between a question and its answer it waits for a key."""
        if kind in ("predict", "below", "answer"):
            self.pending = kind == "predict"
        elif self.waits is None and self.pending:
            self.pieces.append(Piece(kind, content, self.cell, **how))
            return
        self.pieces.append(Piece(kind, content, self.waits, **how))

    def note(self, text: str) -> None:
        """Markdown for the speaker."""
        if text.strip():
            self.pieces.append(Piece("notes", MARKDOWN.render(text)))

    def leave_out(self) -> None:
        """What can wait goes to the notes, and all bugs but one.

        That one is marked, or else the first with something to look at.

        What else was printed is shown where there is nothing else to look at.
        """
        bare = not {piece.kind for piece in self.pieces} & set(BESIDE)
        if bare and not self.is_about("with the library"):
            for piece in self.pieces:
                piece.kind = "output" if piece.kind == "spare" else piece.kind
        self.pieces = [piece for piece in self.pieces if piece.kind != "spare"]
        groups: list[list[Piece]] = [[]]  # by heading
        for piece in self.pieces:
            if piece.kind == "below":
                marked = [old.kind for old in groups[-1][-1:]] == ["break"]
                groups.append([groups[-1].pop()] if marked else [])
            groups[-1].append(piece)
        below = groups[1:]
        bugs = below if self.is_about("break it") else []
        marked = [bug for bug in bugs if bug[0].kind == "break"]
        seen = [bug for bug in bugs if {"figure", "predict"} & {piece.kind for piece in bug}]
        gone = [group for group in bugs if group is not (marked or seen or bugs)[0]]
        gone += [group for group in below if any(CAN_WAIT in p.content for p in group[:2])]
        self.pieces = [p for group in groups for p in (unseen(group) if group in gone else group)]

    def next_kind(self, number: int) -> str:
        """The kind of the piece after this one."""
        return next((p.kind for p in self.pieces[number + 1 :] if p.kind != "notes"), "")

    def chosen(self) -> Iterator[Piece | Extra]:
        """The pieces; of the texts, those that open a part, lead to something or explain it."""
        plain = not {piece.kind for piece in self.pieces} & set(BESIDE)
        after, words = "title", 0
        for number, piece in enumerate(self.pieces):
            comes = self.next_kind(number)
            leads = comes == "math" or (piece.leads and comes in BESIDE)
            words += piece.kind == "text"
            points = piece.kind == "text" and POINTS.search(words_of(piece))
            if points and after == "figure":
                yield Extra([piece], explains=True, caption=True)
                after = "text"
                continue
            if points and comes == "figure":
                piece.leads = leads = True
            elif points and after not in ("answer", "output", "table", "list", "code"):
                yield from unseen([piece])
                continue
            if plain and (piece.kind == "below" or words > MOST_WORDS):
                yield from unseen([piece])
            elif piece.kind != "text" or leads or after in ("title", "below"):
                yield piece
            elif after in ("figure", "answer", "output") and not piece.leads:
                yield Extra([piece], explains=True)
            elif (plain or "<strong>" in piece.content) and not piece.leads:
                yield Extra([piece])
            else:
                yield from unseen([piece])
            after = after if piece.kind == "notes" or (plain and after == "text") else piece.kind

    def slides(self) -> list[list[Piece | Extra]]:
        """The pieces, dealt out to slides."""
        slides: list[list[Piece | Extra]] = [[]]
        waiting: list[Piece | Extra] = []  # what goes with the next thing to look at
        seen: set[str] = set()  # what there is to look at on the last slide
        below = None  # the heading in force
        for piece in self.chosen():
            kind = "text" if isinstance(piece, Extra) else piece.kind
            joins = any(seen <= beside for beside in BESIDE.get(kind, []))
            if kind == "figure" and seen and length(slides[-1] + waiting) > MOST_ABOVE:
                joins = False
            if kind == "notes":
                (waiting or slides[-1]).append(piece)
            elif kind == "answer" or getattr(piece, "explains", False):
                slides[-1].append(piece)
                seen |= {kind} - {"text"}
            elif kind == "below":
                if below in waiting:  # there is nothing to look at below it
                    begin = waiting.index(below)
                    waiting[begin:] = unseen(flat(waiting[begin:]))
                waiting.append(piece)
                below = piece
            elif kind == "text":
                waiting.append(piece)
            elif kind == "break" and any(old.kind != "notes" for old in flat(slides[-1])):
                slides.append([])
                seen = set()
            elif kind == "break":
                pass
            elif kind == "output" and "figure" in seen:
                slides[-1] += unseen([piece])
            elif kind in WEAK and not joins:
                extra = Extra([*flat(waiting), piece])
                math = self.next_kind(self.pieces.index(piece)) == "math"  # its symbols
                waiting = [extra] if math else []
                slides[-1] += [] if math else [extra]
            else:
                if not joins:
                    repeated = below and below not in waiting
                    slides.append([replace(below, waits=None)] if repeated else [])
                    seen = set()
                slides[-1] += [*waiting, piece]
                seen.add(f"second {kind}" if kind in seen else kind)
                waiting = []
        if waiting:
            slides[-1] += waiting if not seen else [Extra(flat(waiting))]
        if self.is_about(CAN_WAIT):
            slides = [slides[0] + unseen(flat(chain(*slides[1:])))]
        slides = [slide for slide in slides if slide]
        wait_in_turn(slides)
        return slides


def deck(notebook: dict) -> list[Part]:
    """A lesson's parts, the first one of which has its title, its question and its picture."""
    parts, answered = [Part("")], None
    for index, cell in enumerate(notebook["cells"]):
        kind = cell["metadata"].get("slideshow", {}).get("slide_type", "-")
        part, source = parts[-1], "".join(cell["source"])
        begins, before = kind in ("slide", "subslide"), len(part.pieces)
        part.cell = index
        if kind == "skip":
            continue
        if cell["cell_type"] == "markdown" and kind == "notes":
            part.note(source)
        elif cell["cell_type"] == "markdown":
            part.waits = index if kind == "fragment" else answered
            add_markdown(parts, source)
            answered = None
            if parts[-1] is not part:  # a part begins a slide anyway: the mark is for its first bug
                part = parts[-1]
                before = next((n for n, p in enumerate(part.pieces) if p.kind == "below"), 0)
            if begins:
                part.pieces.insert(before, Piece("break", ""))
                part.marked = True
        else:
            if begins:
                part.add("break", "")
                part.marked = True
                before += 1
            answer = cell["metadata"].get("jupyter", {}).get("outputs_hidden", False)
            answered = index if answer else None
            part.waits = index if kind == "fragment" else None
            add_code(part, cell, source, answered)
            if kind == "notes":
                part.pieces[before:] = unseen(part.pieces[before:])
    asked = [piece for piece in parts[0].pieces if piece.kind == "text"][:1]
    pictures = [p for part in parts for p in part.pieces if p.kind == "figure"][:1]
    covers = [Piece("cover", picture.content) for picture in pictures]
    parts[0].pieces = covers + asked + unseen([p for p in parts[0].pieces if p not in asked])
    shown = [part for part in parts if not part.is_about("further reading")]
    for part in shown:
        part.leave_out()
    return [part for part in shown if part is parts[0] or part.pieces]


def blocks(source: str) -> Iterator[tuple[str, str, str]]:
    """(kind, Markdown, words) of each block: h1, h2 …, p, ul, ol, table, math, code, html, details.

    `words` are a heading's or a paragraph's text. What stands inside of <details> is one block,
    with its summary as words.
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
    """A Markdown cell: headings begin parts, the rest goes below them."""
    for kind, text, words in blocks(source):
        part = parts[-1]
        if kind in ("h1", "h2", "h3", "h4"):
            part.waits, part.pending = None, False
        if kind == "h1":
            part.title = words
        elif kind == "h2":
            parts.append(Part(words, cell=part.cell))
        elif kind in ("h3", "h4"):
            part.add("below", f"<p><b>{MARKDOWN.renderInline(words)}</b></p>")
        elif kind == "p" and part.is_about("question"):
            part.add("text", MARKDOWN.render(words))
        elif kind == "p":
            before, asked = question(words)
            shown = lead(before) if before else ""
            noted = " ".join(words.split()) != shown
            if shown:
                leads = bool(asked) or not re.search(r"[.!?][)*”]*$", shown)
                part.add("text", MARKDOWN.render(shown), leads=leads, noted=noted)
            if asked:
                part.add("predict", MARKDOWN.render(asked), noted=True)
                part.asked = True
            if noted:
                part.note(words)
        elif kind == "details":
            if not words.lower().startswith("answer"):  # then it is the question itself
                part.add("text", f"<p>{MARKDOWN.renderInline(words)}</p>", noted=True)
            part.note(f"*{words}:* {text.strip()}")
        elif kind in ("ul", "ol"):
            whole = part.is_about("question")
            shown = text if whole else ITEM.sub(lambda i: i[1] + (lead(i[2]) or i[2]), text)
            part.add("list", MARKDOWN.render(shown), noted=shown != text)
            if shown != text:
                part.note(text)
        elif kind in ("table", "math", "code"):
            part.add(kind, MARKDOWN.render(text))
        elif kind != "hr":
            part.add("text", MARKDOWN.render(text))


# --- code and what it printed ---------------------------------------------------------------------


def add_code(part: Part, cell: dict, source: str, answer: int | None) -> None:
    """A code cell: a call to predict, or its code and its outputs. An answer waits for a key."""
    asked = PREDICT.findall(source)
    for _, name, _, unit in asked if not part.asked else []:
        words = html.escape(re.sub(r"^\d\d ", "", name) + (f" ({unit})" if unit else ""))
        part.add("predict", f"<p><b>Predict:</b> {words}</p>")
    part.asked = part.asked and not asked
    if asked:
        return
    pictures = [o["data"]["image/png"] for o in cell["outputs"] if "image/png" in o.get("data", {})]
    bug = part.is_about("break it")
    by_hand = part.is_about("by hand")
    if shown := code(source) if (bug or by_hand) and not pictures else "":
        text = highlight(shown, PythonLexer(), HtmlFormatter(nowrap=True))
        part.add("code", f"<pre>{text.rstrip()}</pre>", noted=not bug)
    part.waits = part.waits if answer is None else answer
    text = "\n".join(filter(None, (printed(output) for output in cell["outputs"])))
    for name, theory, measured in REVEALED.findall(text):
        both = zip(("theory", "measurement"), (theory, measured))
        known = [f"{kind} <b>{html.escape(value)}</b>" for kind, value in both if value != "–"]
        values = " · ".join(known)
        part.add("answer", f'<p><span class="name">{html.escape(name)}: </span>{values}</p>')
    if pictures and re.search(r"\breveal\((?![^)]*show=)", source):
        drawn = re.search(r"\b(?:figures|pictures|planner)\.", source)
        pictures.pop(-1 if drawn and drawn.start() < source.index("reveal(") else 0)
    for picture in pictures:
        source = "data:image/png;base64," + "".join("".join(picture).split())
        part.add("figure", f'<img alt="" style="max-width: 100%" src="{source}">')
    for output in cell["outputs"]:
        if "text/html" in output.get("data", {}):
            part.add("table", "".join(output["data"]["text/html"]))
    text = UNANSWERED.sub("", REVEALED.sub("", text)).strip("\n")
    if text:
        kind = "output" if answer or bug or by_hand or part.marked else "spare"
        part.add(kind, f"<pre>{html.escape(shortened(text))}</pre>")
        part.marked = False


def printed(output: dict) -> str:
    """An output's text; an error's name and message, without the way to it."""
    if output["output_type"] == "error":
        return f"{output['ename']}: {output['evalue']}"
    if "image/png" in output.get("data", {}) or "text/html" in output.get("data", {}):
        return ""
    text = "".join(output.get("text") or output["data"].get("text/plain", ""))
    return COLOURS.sub("", text).rstrip()


def shortened(text: str) -> str:
    """What a cell printed, shortened."""
    lines = text.splitlines()
    if len(lines) > MOST_OUTPUT:
        lines[MOST_OUTPUT - 1 :] = [f"… {len(lines) - MOST_OUTPUT + 1} lines more"]
    return "\n".join(lines)


def code(source: str) -> str:
    """A cell's code without its imports, if it defines something and fits on a slide; else ""."""
    magic, _, rest = source.partition("\n") if source.startswith("%%") else ("", "", source)
    try:
        tree = ast.parse(re.sub(r"(?m)^(\s*)[%!]", r"\1# ", rest))
    except SyntaxError:
        return ""
    defines = any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in tree.body)
    if not defines and not magic.startswith("%%ranks"):
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
    """The instructor guide: its programmes, then what it says lesson by lesson."""
    return "\n\n".join((ROOT / path).read_text(encoding="utf-8") for path in GUIDES)


def remarks(guide: str, lesson: str) -> dict[str, list[str]]:
    """{section or "": [Markdown]} of what the guide says of a lesson such as "06".

    What stands below a heading that names the lesson; rows of tables whose second column names it,
    with their remark; and of other paragraphs all below a table of this lesson alone, or else the
    sentences from one that begins with it to one that begins with another. A row and a sentence
    have the name of their programme, the `##` heading, before them.
    """
    found: dict[str, list[str]] = {}

    def keep(text, place, programme=""):
        section = SECTIONS.search(place)
        said = f"**{programme}:** {text.strip()}" if programme else text.strip()
        found.setdefault(section[1] if section else "", []).append(said)

    programme = ""
    below = 0  # the level of the heading that names the lesson, or 0
    tabled: set[str] = set()  # the lessons of the tables below this heading
    for kind, text, words in blocks(guide):
        if re.fullmatch("h[1-6]", kind):
            level, tabled = int(kind[-1]), set()
            programme = words if level == 2 else programme
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
                    keep(f"*{what}:* {remark}", what, programme)
        elif kind == "p":
            about = next(iter(tabled)) if len(tabled) == 1 else ""
            for sentence in sentences(words):
                named = LESSON.findall(sentence[:40]) + LAB.findall(sentence[:40])
                about = named[0] if named and len(tabled) != 1 else about
                if about == lesson:
                    keep(sentence, "" if LAB.search(sentence[:40]) else sentence, programme)
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
<meta name="color-scheme" content="light dark">
<title>Kintsugi: the slides</title>
<link rel="stylesheet" href="static/slides.css">
</head>
<body class="index">
<h1>Kintsugi: the slides</h1>
<p><kbd>Space</kbd> goes on, <kbd>←</kbd> and <kbd>→</kbd> go from part to part, <kbd>Esc</kbd>
shows all slides, <kbd>S</kbd> opens the speaker's view with the notes, <kbd>F</kbd> fills the
screen. Add <code>?print-pdf</code> to a deck's address and print it to get a PDF.</p>
<table>
<thead>
<tr><th>lesson</th><th>the question it answers</th><th>slides</th><th>minutes</th></tr>
</thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""


def page(path: Path, guide: str) -> tuple[str, str, int]:
    """(title, HTML, number of slides) of the deck of one lesson."""
    parts = deck(json.loads(path.read_text(encoding="utf-8")))
    said = remarks(guide, path.name[:2])
    stacks: list[tuple[str, list[list]]] = []  # a part's heading and slides
    for number, part in enumerate(parts):
        notes = said.pop("" if number == 0 else part.number or "none", [])
        if notes:  # the guide comes before the lesson's own words
            words = MARKDOWN.render("**Guide**\n\n" + "\n\n".join(notes))
            part.pieces.insert(0, Piece("notes", words))
        heading = MARKDOWN.renderInline(part.title)
        seen = [piece for piece in part.pieces if piece.kind != "notes"]
        short = len(seen) < 2 or part.is_about("with the library")
        if number and short and {piece.kind for piece in seen} <= {"text", "below"}:
            title = Piece("notes", f"<p><b>{heading}</b></p>")
            stacks[-1][1][-1] += [title, *unseen(part.pieces)]
        else:
            stacks.append((heading, part.slides() if number else [part.pieces]))
    lines = []
    for number, (heading, slides) in enumerate(stacks):
        heading = NUMBER.sub(r'<span class="number">\1</span>', heading)
        lines.append('<section class="stack">')
        for place, slide in enumerate(slides):
            kind = "again" if place else "part" if number else "first"
            lines += [f'<section class="{kind}">', f'<h2 class="title">{heading}</h2>']
            lines += [*(piece.html for piece in slide), "</section>"]
        lines.append("</section>")
    title, number = parts[0].title, sum(len(slides) for _, slides in stacks)
    return title, PAGE.format(title=html.escape(title), parts="\n".join(lines)), number


def vendored(out: Path) -> None:
    """What the decks load, beside them: reveal.js and MathJax out of their packages, and ours."""
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
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in sorted(ROOT.glob("notebooks/[0-9]*.ipynb")):
        title, text, number = page(path, guide)
        (out / f"{path.stem}.html").write_text(text, encoding="utf-8")
        asked = re.search(r"\*\*The question:\*\* ([^\\]+)", path.read_text(encoding="utf-8"))
        minutes = re.search(rf"(?m)^\| {title[:2]} \|(?:[^|]*\|){{2}} ([^|]*) \|", table)
        link = f'<a href="{path.stem}.html">{html.escape(title)}</a>'
        cells = (link, html.escape(asked[1]), str(number), minutes[1] if minutes else "")
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    (out / "index.html").write_text(INDEX.format(rows="\n".join(rows)), encoding="utf-8")


if __name__ == "__main__":
    main()
