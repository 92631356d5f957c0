"""Rules for stored notebooks, beyond what nbval can check.

A rule is a function of a notebook and its path that yields complaints, one sentence each.
"""

import ast
import dis
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from urllib.parse import unquote

from utils.course.progress import names_in
from utils.workshop.notebooks import METADATA, SLIDE_TYPES, answers, read, where

TAGS = {"nbval-ignore-output", "raises-exception", "hide-input"}
MAX_LINES = 25
# A path on one machine; /proc and /dev are the same everywhere.
ABSOLUTE = re.compile(r"(?<![\w.:/~\-<*])/(?:home|root|Users|tmp|opt|usr|var|mnt|work|srv)/[\w.]")
LINK = re.compile(r"""(!?)\[([^\]\[]*)\]\(\s*<?([^)\s>]+)[^)]*\)""")
HTML_LINK = re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)\s*=\s*["']([^"']+)["']""")
HTML_IMAGE = re.compile(r"<img\b[^>]*>")
UNITS = "second|parameter|token|value|element|number"
TRANSLATED = re.compile(  # words that CONTRIBUTING.md, "Write", replaces
    r"\b(in place of|besides|mend(?:s|ed|ing)?|whole numbers?|so many|whoever|somebody|nobody|anew|"
    rf"at the most|in per cent|(?:bytes|tokens|values|seconds) an? (?:{UNITS}))\b"
)
LOADS = {"LOAD_NAME", "LOAD_GLOBAL"}
REVEALED = re.compile(r"(?m)^(\S.*)\n  prediction .*\n  theory +(.*)\n  measurement +(.*)$")


def code_cells(notebook):
    return [(i, cell) for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]


def markdown(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


def text_of(output) -> str:
    """The text of an output that a reader sees."""
    plain = output.get("data", {}).get("text/plain", "")
    return output.get("text", "") + ("" if plain.startswith("<Figure") else plain)


def is_figure(output) -> bool:
    return any(kind.startswith("image/") for kind in output.get("data", {}))


# --- rules for every notebook ---------------------------------------------------------------------


def executed(notebook, path) -> Iterator[str]:
    """Every code cell was run once, in order, in a fresh kernel."""
    for count, (index, cell) in enumerate(code_cells(notebook), start=1):
        if not cell.source.strip():
            yield f"{where(path, notebook, index)}: the cell is empty"
        elif cell.execution_count != count:
            there = cell.execution_count
            yield f"{where(path, notebook, index)}: execution count {there}, not {count}"
    if not code_cells(notebook):
        yield f"{path.name} has no code cell"


def errors(notebook, path) -> Iterator[str]:
    """Errors are stored exactly where a tag announces them."""
    for index, cell in code_cells(notebook):
        raised = [o for o in cell.outputs if o.output_type == "error"]
        if raised and "raises-exception" not in tags(cell):
            yield f"{where(path, notebook, index)}: stores the error {raised[0].ename}"
        if "raises-exception" in tags(cell) and not raised:
            yield f"{where(path, notebook, index)}: tagged raises-exception but does not raise"


def ids(notebook, path) -> Iterator[str]:
    """Cells have unique ids (a cell without one would get one from its position)."""
    seen = [cell.get("id") for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    for index, cell in enumerate(notebook.cells):
        if seen[index] != cell.id or seen.count(cell.id) > 1:
            yield f"{where(path, notebook, index)}: the id is missing or used twice"


def metadata(notebook, path) -> Iterator[str]:
    """No metadata of an editor, a run or a machine is stored: make refresh removes it."""
    if notebook.metadata != METADATA or (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        yield f"{path.name}: metadata or format is not what make refresh stores"
    folded = answers(notebook)
    for index, cell in enumerate(notebook.cells):
        allowed = {"tags"} if tags(cell) else set()
        slides = [{"slide_type": kind} for kind in SLIDE_TYPES]
        allowed |= {"slideshow"} if cell.metadata.get("slideshow") in slides else set()
        hidden = {"source_hidden"} if "hide-input" in tags(cell) else set()
        hidden |= {"outputs_hidden"} if index in folded else set()
        if (
            set(cell.metadata) - allowed - {"jupyter"}
            or set(cell.metadata.get("jupyter", {})) - hidden
        ):
            yield f"{where(path, notebook, index)}: metadata {dict(cell.metadata)}"
        elif set(cell.metadata.get("jupyter", {})) != hidden:
            yield f"{where(path, notebook, index)}: an answer lies open: make refresh"
        if set(tags(cell)) - TAGS:
            yield f"{where(path, notebook, index)}: unknown tag, {TAGS} are known: {tags(cell)}"
        for output in cell.get("outputs", []):
            if output.get("metadata"):
                yield f"{where(path, notebook, index)}: an output carries {dict(output.metadata)}"


def short_cells(notebook, path) -> Iterator[str]:
    """A cell has one idea."""
    for index, cell in code_cells(notebook):
        lines = len(cell.source.splitlines())
        if lines > MAX_LINES:
            yield f"{where(path, notebook, index)}: {lines} lines, at most {MAX_LINES}"


def findings(notebook, path) -> Iterator[str]:
    """A figure is followed by its finding in words, in the same output or in the next cell."""
    for index, cell in code_cells(notebook):
        figures = [i for i, output in enumerate(cell.outputs) if is_figure(output)]
        if not figures or any(text_of(o).strip() for o in cell.outputs[figures[-1] + 1 :]):
            continue
        follower = notebook.cells[index + 1] if index + 1 < len(notebook.cells) else None
        if follower is not None and follower.cell_type == "code":
            if follower.outputs and text_of(follower.outputs[0]).strip():
                continue
        elif follower is not None and follower.cell_type == "markdown":
            words = [li for li in follower.source.splitlines() if li and not li.startswith("#")]
            if words and not words[0].startswith(("|", "!", "<")):
                continue
        yield f"{where(path, notebook, index)}: the figure is not followed by its finding in words"


def no_local_paths(notebook, path) -> Iterator[str]:
    """Neither sources nor outputs name a path on one machine."""
    for index, cell in enumerate(notebook.cells):
        texts = [cell.source] + [text_of(output) for output in cell.get("outputs", [])]
        for output in cell.get("outputs", []):
            texts += output.get("traceback", []) + [output.get("evalue", "")]
            texts.append(str(output.get("data", {}).get("text/html", "")))
        for text in texts:
            if found := ABSOLUTE.search(text):
                line = text[found.start() : found.start() + 60].splitlines()[0]
                yield f"{where(path, notebook, index)}: names the place {line}"


def english(notebook, path) -> Iterator[str]:
    """Texts use the field's words."""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            text = re.sub(r"`[^`]*`", "", cell.source)
            for found in TRANSLATED.finditer(text):
                yield f"{where(path, notebook, index)}: “{found[0]}” (CONTRIBUTING.md, Write)"


def alt_texts(notebook, path) -> Iterator[str]:
    """A static image has alt text."""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for bang, words, target in LINK.findall(cell.source):
                if bang and len(words.split()) < 3:
                    yield f"{where(path, notebook, index)}: {target} has no alt text of three words"
            for image in HTML_IMAGE.findall(cell.source):
                if not re.search(r"""\balt\s*=\s*["'][^"']{10,}""", image):
                    yield f"{where(path, notebook, index)}: {image} has no alt text"


def links(notebook, path) -> Iterator[str]:
    """Relative links lead to an existing file of the repository and an existing heading."""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for complaint in broken_links(cell.source, path):
                yield f"{where(path, notebook, index)}: {complaint}"


def checks_pass(notebook, path) -> Iterator[str]:
    """In a solution every check says [ok]; in the learner's copy, [ ] (not started)."""
    if "labs" not in path.parts:
        return
    word = "[ok]" if path.parent.name == "solution" else "[ ]"
    for index, cell in code_cells(notebook):
        if re.search(r"^check\(", cell.source, re.MULTILINE):
            printed = "".join(text_of(output) for output in cell.outputs)
            if not printed.startswith(word):
                yield f"{where(path, notebook, index)}: the check does not say {word}"


def names(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell binds, and those that it uses from earlier cells."""
    bound, taken = set(), set()

    def inside(code: CodeType) -> set[str]:
        loaded = {op.argval for op in dis.get_instructions(code) if op.opname in LOADS}
        return loaded.union(*(inside(c) for c in code.co_consts if isinstance(c, CodeType)))

    awaits = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for op in dis.get_instructions(compile(source, "cell", "exec", flags=awaits)):
        if op.opname == "STORE_NAME":
            bound.add(op.argval)
        elif op.opname in LOADS:
            taken |= {op.argval} - bound
        elif isinstance(op.argval, CodeType):
            taken |= inside(op.argval) - bound
    return bound, taken


def run_again(notebook, path) -> Iterator[str]:
    """A cell can be run again: no later cell rebinds a name that it uses from an earlier one."""
    cells = []
    for index, cell in code_cells(notebook):
        magic, lines = re.match(r"(%%\w*)?(?:.*\n)?", cell.source)[1], cell.source.splitlines()
        code = ["" if line.startswith(("%", "!")) else line for line in lines]
        cells.append((index, magic, *names("\n".join(code))))
    for index, place, _, taken in cells:
        there = [(i, bound) for i, where_, bound, _ in cells if where_ == place]
        for word in sorted(taken):
            before = [i for i, bound in there if i < index and word in bound]
            after = [i for i, bound in there if i > index and word in bound]
            if before and after:
                again = notebook.cells[after[0]].id
                yield f"{where(path, notebook, index)}: {word} is bound again in {again}"


def open_predictions(notebook, path) -> Iterator[str]:
    """A value that a reveal shows (two digits or more, with its unit) does not appear before its
    question."""
    asked = {}
    for index, cell in code_cells(notebook):
        asked |= dict.fromkeys(names_in("predict", cell.source), index)
        for name, *values in REVEALED.findall("".join(map(text_of, cell.outputs))):
            above = notebook.cells[: asked.get(name, -1) + 1]
            told = "\n".join(c.source + "".join(map(text_of, c.get("outputs", []))) for c in above)
            told = re.sub(r"(?m)^The theory is .* times the measurement.$", "", told)
            for value in {" ".join(value.split()[:2]) for value in values}:
                digits = re.sub(r"\D", "", value).strip("0")
                if len(digits) > 1 and re.search(rf"(?<![\w.,]){re.escape(value)}(?![\w.,])", told):
                    yield f"{where(path, notebook, index)}: {value} is told above its question"


EVERYWHERE = [
    executed,
    errors,
    ids,
    metadata,
    short_cells,
    findings,
    no_local_paths,
    english,
    alt_texts,
    links,
    checks_pass,
    run_again,
    open_predictions,
]


# --- rules for lessons ----------------------------------------------------------------------------


def anatomy(notebook, path) -> Iterator[str]:
    """A lesson begins with its duration and hardware, and ends with summary and questions."""
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not re.match(r"# \S", first.source):
        yield f"{path.name}: the first cell is not the title"
    opening = "\n".join(c.source for c in notebook.cells[:3] if c.cell_type == "markdown")
    if not re.search(r"\d+\s*min", opening):
        yield f"{path.name}: the first cells do not give the minutes"
    if not ("CPU" in opening and "GPU" in opening):
        yield f"{path.name}: the first cells do not say what runs on a CPU and what on a GPU"
    sections = re.split(r"(?m)^(?=##? )", markdown(notebook))
    titles = [section.splitlines()[0].lower() for section in sections if section.strip()]
    for part in ("summary", "questions", "further reading"):
        if not any(part in title for title in titles):
            yield f"{path.name}: no section has “{part}” in its heading"
    for section in sections:
        if "questions" in section.splitlines()[0].lower() if section.strip() else False:
            folded = len(re.findall(r"<details>.*?<summary>.*?</details>", section, re.DOTALL))
            if folded != 3:
                yield f"{path.name}: {folded} questions with folded answers, not 3"


# --- symbols --------------------------------------------------------------------------------------


def symbols(notebook) -> dict[str, str]:
    """{symbol: meaning} of a lesson's tables of symbols; the symbols of a row share its meaning."""
    found = {}
    for table in re.findall(r"(?m)^\| symbol \|.*\n\| ---.*\n((?:\|.*\n?)+)", markdown(notebook)):
        for row in table.splitlines():
            first, meaning = re.findall(r"\|([^|]*)\|([^|]*)", row)[0]
            names = re.sub(r"\$|\\ ", "", first).split(",")
            found |= {name.strip(): meaning.strip() for name in names}
    return found


def keywords(notebook) -> dict[str, str]:
    """{symbol: the bold word in its meaning}, matched in the order of a row's symbols."""
    found, rows = {}, symbols(notebook)
    for meaning in dict.fromkeys(rows.values()):
        names = [name for name, words in rows.items() if words == meaning]
        found |= dict(zip(names, re.findall(r"\*\*(.+?)\*\*", meaning), strict=True))
    return found


def ambiguous(first, others: dict[str, dict[str, str]]) -> Iterator[str]:
    """Complain about symbols of lessons ({name: its symbols}) that have another meaning in lesson
    `first`, or that two of them have and `first` does not."""
    shared, seen = keywords(first), {}
    for lesson, rows in others.items():
        for symbol, meaning in rows.items():
            if symbol in shared:
                if shared[symbol] not in meaning:
                    yield f"{lesson}: {symbol} is “{meaning}”, not {shared[symbol]}"
            elif seen.setdefault(symbol, lesson) != lesson:
                yield f"{lesson}: {symbol} is in {seen[symbol]} too, and not in the first lesson"


# --- links ----------------------------------------------------------------------------------------


def bare(heading: str) -> str:
    """A heading without its links and tags."""
    return re.sub(r"<[^>]+>", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip()


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", bare(heading).lower()).replace(" ", "-")


def jupyter_anchor(heading: str) -> str:
    """The anchor that JupyterLab gives a heading."""
    return re.sub(r"[`*]", "", bare(heading)).replace(" ", "-")


def anchors(path: Path, source: Path) -> set[str]:
    """The anchors of a Markdown file or a notebook that work in a link from `source`.

    In a notebook they are JupyterLab's, which GitHub's view of notebooks shares. In a Markdown
    file they are GitHub's; a link from a notebook must work in JupyterLab as well.
    """
    inside = path.suffix == ".ipynb"
    text = markdown(read(path)) if inside else path.read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^```.*?^```", "", text)
    headings = re.findall(r"(?m)^#{1,6}\s+(.+?)\s*$", text)
    found = {jupyter_anchor(heading) for heading in headings}
    if not inside:
        github = {slug(heading) for heading in headings}
        found = found & github if source.suffix == ".ipynb" else github
    return found | set(re.findall(r"""<\w+\s[^>]*\b(?:id|name)=["']([^"']+)["']""", text))


def broken_links(text: str, path: Path) -> Iterator[str]:
    """The relative links in Markdown `text` of the file `path` that lead nowhere."""
    text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
    targets = [target for _, _, target in LINK.findall(text)] + HTML_LINK.findall(text)
    for target in targets:
        if re.match(r"[a-z]+:|build/", target):  # https:, mailto:, data:, and build outputs
            continue
        file, _, anchor = unquote(target).partition("#")
        goal = (path.parent / file).resolve() if file else path
        if file.startswith("/") or not goal.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in anchors(goal, path):
            yield f"the link {target} names a heading that {goal.name} does not have"
