"""Every page of the book, opened from its folder without a network."""

import re
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote

import pytest

from tests.browser.pages import PHONE, built, chromium, missing_pictures, needs_chromium, watched
from tests.notebooks.rules import HTML_LINK, LINK
from utils.paths import ROOT
from utils.workshop import book as maker
from utils.workshop.notebooks import read

needs_chromium()

LESSONS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
LABS = sorted(ROOT.glob("labs/[0-9]*/lab.ipynb"))
DOCS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "models/base/README.md"]
DOCS += [ROOT / f"{name}.md" for name in ("CONTRIBUTING", "CHANGELOG", "AGENTS")]
FORMULA = re.compile(r"(?<![\\$`])\$[^$`\n]+\$")
ARTIFACTS = ROOT / "tests" / "artifacts"

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    return built("book", tmp_path_factory.mktemp("book") / "book")


@pytest.fixture(scope="module")
def browser(book):
    with chromium() as browser:
        yield browser


def name(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix(".html").as_posix()


class Links(HTMLParser):
    """A page's links, images, ids and next page."""

    def __init__(self, path: Path):
        super().__init__()
        self.targets, self.ids, self.next = [], set(), None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        have = dict(attributes)
        self.ids |= {have.get("id"), have.get("name")} - {None}
        for place in ("href", "src", "poster", "action"):
            if have.get(place) is not None:
                self.targets.append((tag, have[place]))
        if tag == "a" and "right-next" in (have.get("class") or ""):
            self.next = have["href"]


@pytest.fixture(scope="module")
def links(book):
    pages = [path.resolve() for path in book.rglob("*.html") if "_static" not in path.parts]
    return {path: Links(path) for path in pages}


def test_a_second_set_up_does_no_work(book, monkeypatch):
    def run(*_):
        raise AssertionError("pip is called again")

    monkeypatch.setattr(maker.Pip, "run", run)
    assert maker.ready()
    maker.set_up()


def test_every_lesson_lab_and_document_is_a_page_and_no_worked_answer_is(book):
    pages = {path.relative_to(book).as_posix() for path in book.rglob("*.html")}
    assert len(LESSONS) >= 16 and len(LABS) >= 15
    assert {name(path) for path in [*LESSONS, *LABS, *DOCS]} <= pages
    assert not [page for page in pages if "/solution/" in page]
    assert (book / "index.html").read_bytes() == (book / "README.html").read_bytes()
    assert "name not set" not in (book / "index.html").read_text()  # the theme's line on authors


def test_no_link_is_dead(links, book):
    dead, looked_at = [], 0
    for path, page in links.items():
        for tag, target in page.targets:
            file, _, anchor = unquote(target.split("?")[0]).partition("#")
            if re.match(r"[a-z]+:", target):
                if tag not in ("a",) and not target.startswith("data:"):
                    dead.append(f"{path.name} loads {target}")
                continue
            looked_at += 1
            goal = (path.parent / file).resolve() if file else path
            if not goal.is_file() or not goal.is_relative_to(book.resolve()):
                dead.append(f"{path.relative_to(book.resolve())}: {target}")
            elif anchor and tag == "a" and anchor not in links[goal].ids:
                dead.append(f"{path.relative_to(book.resolve())}: {target}, no such place")
    assert dead == []
    assert looked_at > 5000


def test_every_link_of_a_source_is_a_link_of_its_page(book):
    """Sphinx would render a link that it does not understand as plain text, which is not dead."""
    lost = []
    for path in [*LESSONS, *LABS, *DOCS]:
        if path.suffix == ".ipynb":
            cells = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
            text = "\n\n".join(cells)
        else:
            text = path.read_text(encoding="utf-8")
        text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
        wanted = [target for bang, _, target in LINK.findall(text) if not bang]
        page = (book / name(path)).read_text(encoding="utf-8")
        article = page[page.index('<article class="bd-article"') : page.index("</article>")]
        article = article.replace('class="headerlink" href', "")
        given = [target for target in HTML_LINK.findall(article) if not target.startswith("data")]
        if len(given) < len(wanted):
            lost.append(f"{path.name}: {len(wanted)} links, {len(given)} in the book")
    assert lost == []


def test_next_goes_through_all_pages_each_lab_behind_its_lesson(links, book):
    here, order = (book / "README.html").resolve(), []
    while (further := links[here].next) and len(order) < 200:
        here = (here.parent / further).resolve()
        order.append(here.relative_to(book.resolve()).as_posix())
    read_in_order = sorted([*LESSONS, *LABS], key=lambda p: re.findall(r"/(\d\d)_", str(p))[-1])
    assert order[: len(read_in_order)] == [name(path) for path in read_in_order]
    assert sorted(order[len(read_in_order) :]) == sorted(name(path) for path in DOCS[1:])


@pytest.mark.parametrize("path", [*LESSONS, *LABS, *DOCS], ids=name)
def test_a_page_on_a_phone(browser, book, path):
    """It loads nothing from elsewhere, is complete, renders its formulas and fits the screen."""
    with watched(browser, viewport=PHONE) as page:
        page.goto((book / name(path)).as_uri())
        page.evaluate("() => window.MathJax?.startup?.promise")
        assert missing_pictures(page) == []
        width = page.evaluate("() => document.documentElement.scrollWidth")
        assert width <= PHONE["width"], f"{width} pixels wide"
        assert page.locator("[data-mjx-error], mjx-merror").count() == 0
        assert page.locator("article h1").count() == 1
        if path.suffix != ".ipynb":
            return
        stored = read(path)
        outputs = [output for cell in stored.cells for output in cell.get("outputs", [])]
        figures = sum("image/png" in output.get("data", {}) for output in outputs)
        assert page.locator("article .cell_output img").count() == figures
        cells = [cell for cell in stored.cells if cell.cell_type == "code"]
        assert page.locator("article div.cell").count() == len(cells)
        words = "\n".join(c.source for c in stored.cells if c.cell_type == "markdown")
        formulas = len(FORMULA.findall(words))
        assert page.locator("article mjx-container").count() >= formulas
        file = path.relative_to(ROOT).as_posix()
        hint = page.locator(".open-here").inner_text()
        assert "make lab" in hint and file in hint


def test_what_is_shown_as_code_on_a_phone(browser, book):
    pages = sorted((book / "_code").rglob("*.html"))
    assert len(pages) > 40
    for path in (book / "_code/utils/compression.html", book / "_code/docs/cluster/job.yaml.html"):
        with watched(browser, viewport=PHONE) as page:
            page.goto(path.as_uri())
            assert page.evaluate("() => document.documentElement.scrollWidth") <= PHONE["width"]
            assert page.locator("article").inner_text().strip()


def test_an_answer_is_folded_until_it_is_asked_for(browser, book):
    path = next(p for p in LESSONS if p.name.startswith("06"))
    folded = [c for c in read(path).cells if c.metadata.get("jupyter", {}).get("outputs_hidden")]
    assert folded
    with watched(browser) as page:
        page.goto((book / name(path)).as_uri())
        answers = page.locator("article details.hide:not(.above-input)")
        assert answers.count() == len(folded)
        output = answers.first.locator(".output").first
        assert not output.is_visible()
        answers.first.locator("summary").click()
        assert output.is_visible()


def test_a_word_leads_to_the_glossary(browser, book):
    with watched(browser) as page:
        page.goto((book / "notebooks/06_tensor_parallel.html").as_uri())
        page.locator("article a[href$='glossary.html#conjugate-pair']").first.click()
        page.wait_for_url("**/docs/glossary.html#conjugate-pair")
        heading = page.locator("#conjugate-pair > :is(h2, h3)")
        assert heading.inner_text().strip().startswith("conjugate pair")
        page.wait_for_function(
            """() => {
                const box = document.querySelector('#conjugate-pair').getBoundingClientRect();
                return box.top > 0 && box.top < innerHeight;
            }"""
        )


def test_the_search_finds_a_lesson_and_the_section(browser, book):
    with watched(browser) as page:
        page.goto((book / "search.html").as_uri() + "?q=bubble")
        page.locator("#search-results li a[href*='08_pipeline_parallel']").first.wait_for()
    handler = partial(SimpleHTTPRequestHandler, directory=book)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_port}/"
        with watched(browser, host) as page:
            page.goto(f"{host}search.html?q=rendezvous")
            page.locator("#search-results a[href^='notebooks/10_five_dimensions.html#']").wait_for()
        server.shutdown()


def test_dark_and_light(browser, book):
    """First the system's setting, then the reader's choice, which the next page keeps."""

    def brightness(page):
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3

    with watched(browser, color_scheme="dark", viewport={"width": 1280, "height": 900}) as page:
        page.goto((book / "index.html").as_uri())
        assert brightness(page) < 60
        page.screenshot(path=ARTIFACTS / "book.png")
        page.locator("button.theme-switch-button:visible").click()
        page.locator("button.theme-change-button[data-mode=light]:visible").click()
        assert brightness(page) > 200
        page.goto((book / name(LESSONS[1])).as_uri())
        assert brightness(page) > 200
        page.evaluate("() => window.MathJax.startup.promise")
        page.screenshot(path=ARTIFACTS / "book-lesson.png")
