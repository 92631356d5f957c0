"""Every slide of every deck as an instructor shows it, and the speaker's view."""

import json
import re

import pytest

from tests.browser.pages import built, chromium, missing_pictures, needs_chromium, watched
from tests.patience import patience
from utils.paths import ROOT

needs_chromium()

LESSONS = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
FRAME = {"width": 1280, "height": 720}
ARTIFACTS = ROOT / "tests" / "artifacts"
# Visits each slide, notes what it shows before a key press, reveals the rest, and reports its
# content and what overflows.
LOOKED_AT = """() => Reveal.getSlides().map(slide => {
    const { h, v } = Reveal.getIndices(slide);
    const shown = piece => piece.checkVisibility({ visibilityProperty: true });
    Reveal.slide(h, v, -1);
    const answers = '.answer, .predict ~ .piece:not(.predict), .predict ~ .extra > .piece';
    const early = [...slide.querySelectorAll(answers)].filter(shown);
    const blank = ![...slide.querySelectorAll('.piece')].some(shown);
    Reveal.slide(h, v, 99);
    const frame = slide.getBoundingClientRect();
    const outside = [...slide.querySelectorAll('.piece, .piece *')]
        .filter(element => !element.closest('mjx-assistive-mml'))
        .filter(element => {
            const box = element.getBoundingClientRect();
            return box.bottom > frame.bottom + 1 || box.right > frame.right + 1;
        });
    const pieces = [...slide.querySelectorAll('.piece')];
    return {
        place: `${h}.${v}`, blank,
        early: early.map(element => element.outerHTML.slice(0, 80)),
        outside: outside.map(element => element.outerHTML.slice(0, 80)),
        tall: slide.scrollHeight, wide: slide.scrollWidth,
        title: slide.querySelector('h2').textContent,
        hidden: pieces.filter(piece => !shown(piece)).length,
        lonely: pieces.every(piece => piece.matches('.below'))
            || (pieces.length === 1 && pieces[0].matches('.text')),
        figures: [...slide.querySelectorAll('.figure img')].map(image => image.clientHeight),
        smallest: Math.min(...pieces.map(piece =>
            parseFloat(getComputedStyle(piece.querySelector('pre, td') ?? piece).fontSize))),
    };
})"""

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return built("slides", tmp_path_factory.mktemp("slides") / "slides")


@pytest.fixture(scope="module")
def browser(slides):
    with chromium() as browser:
        yield browser


def opened(page, slides, stem):
    page.goto((slides / f"{stem}.html").as_uri())
    page.locator("body.ready").wait_for(timeout=1000 * patience(60))


def shown_cells(path):
    """The cells of a lesson, except those below "Further reading"."""
    cells, left_out = json.loads(path.read_text(encoding="utf-8"))["cells"], False
    for cell in cells:
        cell["source"] = "".join(cell["source"])
        heading = re.search(r"(?m)^## (.*)", cell["source"]) if cell["id"] else None
        if cell["cell_type"] == "markdown" and heading:
            left_out = heading[1].lower().startswith("further reading")
        if not left_out:
            yield cell


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_slide_of_a_deck(browser, slides, path):
    cells = list(shown_cells(path))
    words = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    with watched(browser, viewport=FRAME) as page:
        opened(page, slides, path.stem)
        assert missing_pictures(page) == []
        seen = page.evaluate(LOOKED_AT)
        assert page.locator("[data-mjx-error], mjx-merror").count() == 0
        notes = page.locator("section:not(.stack) > aside.notes")
        noted = "".join(notes.evaluate_all("all => all.map(note => note.innerHTML)"))
        assert notes.count() > 10
    wrong = [s for s in seen if s["outside"] or s["tall"] > 721 or s["wide"] > 1281]
    assert wrong == [], "the content of a slide does not fit its frame"
    assert 12 <= len(seen) <= 25
    row = re.search(rf"{path.stem}.*", (slides / "index.html").read_text(encoding="utf-8"))[0]
    assert f"<td>{len(seen)}</td><td>" in row and not row.endswith("<td></td></tr>")
    assert [slide["place"] for slide in seen if slide["lonely"]] == [], "a title, or one sentence"
    assert [slide["place"] for slide in seen if slide["hidden"]] == [], "hidden after all keys"
    early = [(slide["place"], piece) for slide in seen for piece in slide["early"]]
    assert early == [], "the answer to a prediction shows before a key press"
    assert [slide["place"] for slide in seen if slide["blank"]] == [], "empty before a key press"
    assert min(slide["smallest"] for slide in seen) >= 18, "too small to read from a distance"
    figures = [height for slide in seen for height in slide["figures"]]
    assert min(figures) > 150
    drawn = [c for c in cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    revealed = [c for c in drawn if re.search(r"\breveal\((?![^)]*show=)", c["source"])]
    kept = len(drawn) - len({cell["id"] for cell in revealed})
    assert len(figures) + noted.count("data:image/png") == kept, "revealed figures are a line"
    titles = re.findall(r"(?m)^##? (.+)", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words))
    said = re.sub("<[^>]*>", "", noted)
    everything = " ".join([*(slide["title"] for slide in seen), said])
    missing = [t for t in titles if re.sub(r"[`*]", "", t) not in everything and "$" not in t]
    assert [t for t in missing if not t.lower().startswith("further reading")] == []


def test_the_first_page_leads_to_every_deck(browser, slides):
    with watched(browser) as page:
        page.goto((slides / "index.html").as_uri())
        links = page.locator("td a").evaluate_all("links => links.map(a => a.getAttribute('href'))")
    assert links == [f"{path.stem}.html" for path in LESSONS]
    assert all((slides / link).is_file() for link in links)


def test_an_answer_waits_for_a_key(browser, slides):
    """Lesson 06 asks for a number and answers later, in a cell whose output is folded."""
    with watched(browser, viewport=FRAME) as page:
        opened(page, slides, "06_tensor_parallel")
        place = page.evaluate(
            """() => {
                const answer = document.querySelector('.piece.fragment');
                const { h, v } = Reveal.getIndices(answer.closest('section'));
                Reveal.slide(h, v);
                return [h, v];
            }"""
        )
        answer = page.locator("section.present .piece.fragment").first
        visible = "element => getComputedStyle(element).visibility"
        assert answer.evaluate(visible) == "hidden"
        page.keyboard.press("Space")
        assert answer.evaluate(visible) == "visible"
        assert page.evaluate("() => [Reveal.getIndices().h, Reveal.getIndices().v]") == place


def test_the_speakers_view_has_the_guide_and_the_lessons_words(browser, slides):
    guide = (ROOT / "docs/instructor.md").read_text(encoding="utf-8")
    path = ROOT / "notebooks/06_tensor_parallel.ipynb"
    words = "\n".join(cell["source"] for cell in shown_cells(path))
    paragraph = words[words.index("## 10 ·") :].split("\n\n")[1]
    with watched(browser, viewport=FRAME) as page:
        opened(page, slides, path.stem)
        page.evaluate(
            """() => Reveal.slide([...document.querySelectorAll('section.stack')].findIndex(
                part => part.querySelector('h2').textContent.startsWith('10 ·')))"""
        )
        with page.context.expect_page() as appears:
            page.keyboard.press("s")
        notes = appears.value.locator(".speaker-controls-notes .value")
        notes.get_by_text("Guide").wait_for()
        said = notes.inner_text()
        frames = appears.value.locator("iframe").count()
        appears.value.screenshot(path=ARTIFACTS / "speaker.png")
    assert frames == 2  # this slide and the next
    assert paragraph.split("`")[0].strip() in said
    row = re.search(r"Lesson 06, section 10 \| ([^|]+?) \|", guide)
    assert row is None or row[1] in said
    assert "Lesson 06" in said or "ection 10" in said


def test_the_space_bar_goes_through_all_slides_and_keeps_their_order(browser, slides):
    with watched(browser, viewport=FRAME) as page:
        opened(page, slides, "02_gradient_accumulation")
        total = page.evaluate("() => Reveal.getTotalSlides()")
        order = page.evaluate(
            """() => {
                const seen = [];
                for (let key = 0; key < 500; key++) {
                    const { h, v } = Reveal.getIndices();
                    if (seen.at(-1) !== `${h}.${v}`) seen.push(`${h}.${v}`);
                    if (Reveal.isLastSlide() && !Reveal.availableFragments().next) break;
                    Reveal.next();
                }
                return seen;
            }"""
        )
    assert len(order) == len(set(order)) == total
