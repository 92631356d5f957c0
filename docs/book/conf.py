"""The book: how Sphinx shows the stored notebooks, the README and docs/ as pages (`make book`).

Nothing is executed or fetched while it is built or read. The pages are the files of the repository
as they are: a new lesson, lab or document becomes a page without a change here. A linked file that
is not a page itself (a script, a settings file) is shown as code.
"""

import json
import os
import re
from html import escape
from importlib.metadata import distribution
from pathlib import Path

from docutils import nodes
from PIL import Image
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.util import ClassNotFound
from sphinx.addnodes import download_reference, pending_xref

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\([^)\s#]*#)([^)\s]+)(?=\))")
IMPORT = re.compile(r"(?m)^(?:import|from) ")
DEFINES = re.compile(r"(?m)^(?:def|class) ")
HTML_ID = re.compile(r"""<a\s[^>]*\b(?:id|name)=["']([^"']+)["']""")

LINKS = re.compile(r"(?m)^\*\*\[Read lesson 00\].*\n")  # the book has doors instead
DOORS = """\
<div class="doors">
<a href="notebooks/00_start_here.html"><b>Start reading</b> Lesson 00: what is in a machine?</a>
<a href="#start"><b>Run it</b> One clone, two commands, no GPU</a>
<a href="docs/instructor.html"><b>Teach</b> Programmes, the room, lesson by lesson</a>
<a href="docs/serving.html"><b>Deploy</b> The engine and its Triton server</a>
<a href="docs/glossary.html"><b>Look up</b> The words of the field, one line each</a>
</div>

"""
TEACH = re.compile(r"docs/(instructor|class)\b")  # an instructor's pages

project = html_title = "Kintsugi"
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "AGENTS.md",
    "docs/**.md",
    "notebooks/[0-9]*.ipynb",
    "labs/[0-9]*/lab.ipynb",  # the learner's copy: the worked answers stay in the repository
    "models/base/README.md",
]
exclude_patterns = [".*", "build", "runs", "scratch", "tests", "utils"]  # not searched

extensions = ["myst_nb"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
suppress_warnings = [
    "misc.highlighting_failure",  # %%ranks is not Python, a rank's message is not a traceback
    "myst.header",  # the glossary jumps from # to ###
]

_mathjax = distribution("sphinx-mathjax-offline")
_tex_svg = _mathjax.locate_file("sphinx-mathjax-offline/static/mathjax/tex-svg.js")
html_static_path = ["static", str(_tex_svg)]
mathjax_path = "tex-svg.js"  # one file without fonts to load, so that it also works from a folder
mathjax3_config = {"options": {"enableMenu": False}}  # the menu would load more

highlight_language = "none"  # for blocks without a language
html_theme = "sphinx_book_theme"
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_favicon = "static/favicon.svg"
html_copy_source = html_show_copyright = False
html_context = {"default_mode": "auto"}  # dark or light like the reader's system
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],  # the sidebar has a search field
    "footer_content_items": [],
}

shown_as_code: set[Path] = set()  # the files and folders that pages link to


# --- the input of a page --------------------------------------------------------------------------


def slug(anchor: str) -> str:
    """GitHub's anchor for a heading; a notebook's links have JupyterLab's."""
    return re.sub(r"[^\w\- ]", "", anchor.lower()).replace(" ", "-")


def relinked(text: str, file: str) -> str:
    """Markdown of `file` with links to the anchors of this book."""
    text = text.replace("](#", f"]({file}#")  # so that they also find anchors written as HTML
    return LINK.sub(lambda found: found[1] + slug(found[2]), text)


def contents() -> str:
    """The table of contents: each lesson followed by its lab, then the reference pages."""
    lessons = {path.stem: path for path in ROOT.glob("notebooks/[0-9]*.ipynb")}
    labs = {path.parent.name: path for path in ROOT.glob("labs/[0-9]*/lab.ipynb")}
    stems = sorted({*lessons, *labs})
    read = [found[stem] for stem in stems for found in (lessons, labs) if stem in found]
    docs = sorted(ROOT.glob("docs/**/*.md"), key=lambda path: path.with_suffix(""))
    teach = [path for path in docs if TEACH.match(path.relative_to(ROOT).as_posix())]
    others = [path for path in docs if path not in teach]
    others += [ROOT / "models/base/README.md"]
    others += [ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "AGENTS")]
    parts = []
    for caption, paths in (
        ("Lessons and labs", read), ("To look up", others), ("For instructors", teach)
    ):
        names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in paths]
        parts += ["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]
    return "\n".join(parts)


def source_read(app, docname: str, source: list[str]) -> None:
    """Convert links to this book's anchors, and fold the answers that JupyterLab folds."""
    file = app.env.doc2path(docname)
    if file.suffix != ".ipynb":
        source[0] = relinked(source[0], file.name)
        if docname == root_doc:
            source[0] = LINKS.sub(DOORS, source[0]) + "\n\n" + contents()
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = relinked("".join(cell["source"]), file.name)
            continue
        tags = cell["metadata"].setdefault("tags", [])
        if cell["metadata"].get("jupyter", {}).get("outputs_hidden"):
            tags.append("hide-output")
        code = "".join(cell["source"])
        if len(IMPORT.findall(code)) >= 5 and not DEFINES.search(code):
            tags.append("hide-input")  # plumbing: one click away
    source[0] = json.dumps(notebook)


# --- additions to a page --------------------------------------------------------------------------


def doctree_read(app, doctree: nodes.document) -> None:
    """Handle anchors written as HTML, links to files that are not pages, and how to open a page."""
    docname = app.env.docname
    slugs = app.env.metadata[docname].setdefault("myst_slugs", {})
    for raw in list(doctree.findall(nodes.raw)):
        names = HTML_ID.findall(raw.astext())
        slugs.update({name: (raw.line or 0, name, name) for name in names})
        if isinstance(raw.parent, nodes.title) and (names or raw.astext() == "</a>"):
            raw.parent.parent["ids"] += names  # the theme expects no raw HTML in a heading
            raw.parent.remove(raw)
    here = (ROOT / docname).parent
    for link in [*doctree.findall(download_reference), *doctree.findall(pending_xref)]:
        path = Path(os.path.normpath(here / link["reftarget"].partition("#")[0]))
        is_file = isinstance(link, download_reference) and path.is_file()
        is_page = path == here or path.with_suffix(".md").is_file()  # docs/class: class.md, too
        if path.is_relative_to(ROOT) and (is_file or (path.is_dir() and not is_page)):
            link.replace_self(code_link(app, docname, path, *link.children))
    if docname.startswith(("notebooks/", "labs/")):
        title = next(doctree.findall(nodes.title))
        title.parent.insert(title.parent.index(title) + 1, how_to_open(app, docname))
        describe_figures(doctree)


def describe_figures(doctree) -> None:
    """Set each figure's alternative text to the first two sentences below it."""
    figures = []
    for node in doctree.findall(lambda node: isinstance(node, (nodes.image, nodes.paragraph))):
        if isinstance(node, nodes.image):
            figures.append(node)
        elif words := node.astext().strip():
            for image in figures:
                image["alt"] = " ".join(re.split(r"(?<=[.?!])\s", words)[:2])
            figures = []


def code_link(app, docname: str, path: Path, *children: nodes.Node) -> nodes.reference:
    """A link to the page that shows a file or folder."""
    shown_as_code.add(path)
    page = f"_code/{path.relative_to(ROOT).as_posix()}"
    return nodes.reference("", "", *children, refuri=app.builder.get_relative_uri(docname, page))


def how_to_open(app, docname: str) -> nodes.container:
    """How to run this page, and the files that a lab asks for."""
    file = app.env.doc2path(docname, base=False)
    words = nodes.paragraph("", "To run this page: ")
    start = app.builder.get_relative_uri(docname, root_doc) + "#start"
    words += [nodes.reference("", "", nodes.literal("", "make lab"), refuri=start)]
    words += [nodes.Text(", then open ")]
    words += [nodes.literal("", str(file)), nodes.Text(" in JupyterLab.")]
    files = sorted((ROOT / file).parent.glob("*.py")) if docname.startswith("labs/") else []
    for before, path in zip([" You write ", *[", "] * len(files)], files):
        name = nodes.literal("", path.name)
        words += [nodes.Text(before), code_link(app, docname, path, name)]
    words += nodes.Text("." if files else "")
    return nodes.container("", words, classes=["open-here"])


def code_pages(app):
    """A page for each file or folder that a page links to: Sphinx's html-collect-pages."""
    for path in list(shown_as_code):
        if path.is_dir():
            shown_as_code.update(path.glob("*.py"))
    for path in sorted(shown_as_code):
        name = path.relative_to(ROOT).as_posix()
        body = f"<h1>{escape(name)}</h1>\n" + (listing(path) if path.is_dir() else code(path))
        context = {"title": name, "body": body, "toc": "", "display_toc": False, "parents": []}
        yield f"_code/{name}", context, "page.html"


def listing(folder: Path) -> str:
    """A folder's modules, each with the first line of its docstring."""
    rows = []
    for path in sorted(folder.glob("*.py")):
        first = path.read_text(encoding="utf-8").lstrip('"').splitlines()[0].rstrip('"')
        page = f"{folder.name}/{path.name}.html"
        rows.append(f'<li><a href="{page}">{path.name}</a>: {escape(first)}</li>')
    return f"<ul>{''.join(rows)}</ul>"


def code(path: Path) -> str:
    """A file's text, highlighted by its file type."""
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    text = highlight(path.read_text(encoding="utf-8"), lexer, HtmlFormatter(nowrap=True))
    return f'<div class="highlight"><pre>{text}</pre></div>'


def build_finished(app, error: Exception | None) -> None:
    """Make the README the folder's index page, too, and the folder a fifth smaller."""
    if error is None:
        out = Path(app.outdir)
        (out / "index.html").write_bytes((out / f"{root_doc}.html").read_bytes())
        for path in out.glob("_static/**/*.map"):  # for debugging the theme
            path.unlink()
        for path in out.glob("_images/*.png"):  # a figure has few colours
            with Image.open(path) as image:
                if image.mode == "RGBA":
                    few = image.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                    few.save(path, optimize=True)


def setup(app) -> None:
    """Sphinx calls this."""
    app.connect("source-read", source_read)
    app.connect("doctree-read", doctree_read, priority=400)  # before links to files are collected
    app.connect("html-collect-pages", code_pages)
    app.connect("build-finished", build_finished)
