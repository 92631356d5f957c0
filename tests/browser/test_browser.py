"""A learner's view: JupyterLab in a real browser opens the lessons and runs one of them.

The screenshots in tests/artifacts/ are for visual inspection. Without a Chromium these tests are
skipped, except on CI.
"""

import os
import re

import pytest

from tests.browser.jupyterlab import CELLS, Browser, error_outputs, find_chromium, picture, run_all
from tests.notebooks.rules import tags
from utils.paths import ROOT
from utils.workshop.notebooks import read

ARTIFACTS = ROOT / "tests" / "artifacts"
LESSON = "notebooks/08_pipeline_parallel.ipynb"  # runs here: it is short and starts ranks
OTHERS = [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
OTHERS.remove(LESSON)  # opened only; nbval runs all of them

if not find_chromium() and not os.environ.get("CI"):
    pytest.skip(
        "no Chromium was found: apt-get install chromium, or CHROMIUM=/path",
        allow_module_level=True,
    )


@pytest.fixture(scope="module")
def browser():
    assert find_chromium(), "CI needs a Chromium for this test: apt-get install chromium"
    with Browser() as browser:
        yield browser


def printed(cell):
    """A cell's stdout, without what differs from run to run."""
    texts = (o["text"] for o in cell.get("outputs", []) if o.get("name") == "stdout")
    text = "".join("".join(lines) for lines in texts)
    return re.sub(r"0x[0-9a-f]{6,}|\bpid \d+", "…", text)


def count_figures(cells):
    return sum("image/png" in o.get("data", {}) for cell in cells for o in cell.get("outputs", []))


@pytest.mark.thorough
@pytest.mark.timeout(1000)
def test_a_lesson_runs_in_the_browser(browser):
    stored = read(ROOT / LESSON)
    with browser.notebook(LESSON) as page:
        title = stored.cells[0].source.splitlines()[0].lstrip("# ")
        page.get_by_role("heading", name=title).wait_for(timeout=90_000)
        cells = run_all(page, seconds=800)
        pictures = picture(page, ARTIFACTS / "lesson.png")
    assert error_outputs(cells) == []
    assert [cell["id"] for cell in cells] == [cell.id for cell in stored.cells]
    compared = 0
    for before, now in zip(stored.cells, cells):
        if before.cell_type == "code" and "nbval-ignore-output" not in tags(before):
            assert printed(now) == printed(before), f"cell {before.id} prints something else"
            compared += bool(printed(before))
    assert compared >= 5
    assert count_figures(cells) == count_figures(stored.cells)
    assert all(file.stat().st_size > 50_000 for file in pictures[:-1])  # the last one may be short
    assert len(pictures) > 2


@pytest.fixture(scope="module")
def page(browser):
    """JupyterLab with only the README open."""
    with browser.page("README.md", mode="lab") as page:
        yield page


@pytest.mark.thorough
@pytest.mark.parametrize("path", OTHERS)
def test_a_lesson_opens_as_it_is_stored(browser, page, path):
    stored = read(ROOT / path)
    with browser.opened(page, path):
        title = stored.cells[0].source.splitlines()[0].lstrip("# ")
        page.get_by_role("heading", name=title).wait_for(timeout=90_000)
        cells = page.evaluate(CELLS)
    assert [cell["id"] for cell in cells] == [cell.id for cell in stored.cells]
    assert count_figures(cells) == count_figures(stored.cells) > 0


def test_nothing_of_a_lesson_is_left_running(browser):
    """Shutting down the kernels of the lessons above ends every process that they started."""
    assert browser.left_running() == []


def test_the_lab_opens_on_the_table_of_lessons(browser):
    with browser.page("README.md", mode="lab") as page:
        table = page.locator(".jp-MarkdownViewer table").first  # rendered, not the source
        table.wait_for(timeout=90_000)
        page.wait_for_timeout(1500)
        assert page.get_by_text("official Jupyter news").count() == 0
        page.screenshot(path=ARTIFACTS / "lab.png")
        page.locator(".jp-MarkdownViewer a[href*='00_start_here']").first.click()
        page.locator(".jp-NotebookPanel").wait_for(timeout=90_000)
        page.locator(".jp-NotebookPanel h1").first.wait_for(timeout=90_000)
        page.evaluate("() => window.jupyterapp.serviceManager.sessions.shutdownAll()")
