"""A class in real browsers: three JupyterLabs of `make lab CLASS=…` run checks and predictions that
the instructor's page shows, even when the board is killed and restarted.

The screenshots in tests/artifacts/ are for visual inspection.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import expect, sync_playwright

from tests.browser.jupyterlab import (
    CELLS,
    CHROMIUM_FLAGS,
    FINISHED,
    FOLDERS,
    READY,
    error_outputs,
    find_chromium,
    free_ports,
)
from tests.classroom.boards import RunningBoard, environment, until
from tests.patience import patience
from utils.paths import ROOT
from utils.workshop import lab
from utils.workshop.notebooks import METADATA

pytestmark = pytest.mark.thorough

if not find_chromium() and not os.environ.get("CI"):
    pytest.skip(
        "no Chromium was found: apt-get install chromium, or CHROMIUM=/path",
        allow_module_level=True,
    )

ARTIFACTS = ROOT / "tests" / "artifacts"
CHECK, GUESS = "lab 10a by hand", "10 GB for tensor parallelism"
SOLUTION = ROOT / "labs" / "10_five_dimensions" / "solution" / "by_hand.py"
ALIASES = {"quick lynx": 40.0, "calm owl": 80.0, "<b>bold</b> heron": 160.0}
WAIT = 1000 * patience(60)  # ms


class Learner:
    """JupyterLab as `make lab CLASS=…` starts it, with its own ledger, settings and notebook.

    The notebook is in scratch/, which git ignores: the lab's root is the repository.
    """

    def __init__(self, place, port, alias, address, folder):
        self.alias, self.home = alias, folder / f"home{place}"
        self.answer = folder / f"by_hand{place}.py"
        self.port = port
        names = {name: str(folder / f"{name}{place}".lower()) for name in FOLDERS}
        names["PYTHONPATH"] = str(ROOT)  # the kernel starts in scratch/
        config = Path(names["JUPYTER_CONFIG_DIR"])
        config.mkdir()
        exposed = {"LabApp": {"expose_app_in_browser": True}}  # for this test's commands
        (config / "jupyter_lab_config.json").write_text(json.dumps(exposed))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "utils.workshop.lab", "--no-browser", "--port", str(self.port),
             "--class", address],
            cwd=ROOT, env=environment(self.home, IPYTHONDIR=str(self.home), **names),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        self.process.stdin.write(f"yes\n{alias}\n")
        self.process.stdin.close()
        self.notebook = ROOT / "scratch" / f"class-{os.getpid()}-{place}.ipynb"

    def ready(self):
        """Wait until JupyterLab is up; returns its address."""
        said = []
        for line in self.process.stdout:
            said.append(line)
            if "Ctrl-C" in line:
                self.url = next(s.strip() for s in said if s.strip().startswith("http://"))
                return
        raise AssertionError("".join(said))

    def write(self, guess):
        """Write a notebook with a lab's check and a lesson's prediction."""
        cells = [
            "from labs.support.five_dimensions import contracts\n"
            "from utils.course import ask_for_help, helped\n"
            "from utils.course.checks import check\n"
            "from utils.course.predictions import predict, reveal",
            f'predict("{GUESS}", {guess}, "GB")\n'
            f'reveal("{GUESS}", theory=80.5, measured={guess / 100 + 80}, show="text")',
            f'check("{CHECK}", contracts.by_hand, "{self.answer}")',
        ]
        cells += ['ask_for_help("Which <i>axis</i>?")'] if guess > 100 else []
        self.notebook.parent.mkdir(exist_ok=True)
        content = new_notebook(cells=[new_code_cell(cell) for cell in cells], metadata=METADATA)
        nbformat.write(content, self.notebook)

    def open(self, browser):
        """Begin to open the notebook."""
        parts = urlsplit(self.url)
        path = self.notebook.relative_to(ROOT).as_posix()
        self.page = browser.new_page()
        self.page.set_default_timeout(WAIT)
        address = f"http://{parts.netloc}/doc/tree/{path}?{parts.query}&reset"
        self.page.goto(address, wait_until="commit")

    def opened(self):
        """Wait until the notebook and its kernel are ready."""
        self.page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget")
        self.page.wait_for_function(READY)

    def run(self):
        """Run all cells; returns what they print."""
        run = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }"
        self.page.evaluate(run)  # in braces: it would wait for the command's result
        self.page.wait_for_function(FINISHED)
        cells = self.page.evaluate(CELLS)
        assert error_outputs(cells) == []
        return "".join("".join(o.get("text", "")) for c in cells for o in c.get("outputs", []))

    def end(self):
        """JupyterLab's output after Ctrl-C."""
        said = self.process.stdout.read()
        assert self.process.wait(patience(30)) == 0, said

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(2 * lab.GRACE)
            self.process.kill()
        self.process.stdout.close()
        self.notebook.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.notebook.parent.rmdir()


@pytest.fixture
def chromium():
    assert find_chromium(), "CI needs a Chromium for this test: apt-get install chromium"
    flags = [*CHROMIUM_FLAGS, "--js-flags=--max-old-space-size=512"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), headless=True, args=flags, timeout=90_000
        )
        yield browser
        browser.close()


def row(page, alias):
    """A learner's row in the grid: {exercise: cell}."""
    names = page.locator("#grid thead th").all_inner_texts()[1:]
    found = page.locator("#grid tbody tr").filter(has=page.get_by_role("rowheader", name=alias))
    return dict(zip(names, found.locator("td").all()))


@pytest.mark.timeout(300)
def test_three_labs_report_to_the_instructors_page(chromium, tmp_path):
    learners = []
    asked = []  # the requests of the instructor's page
    with contextlib.ExitStack() as stack:
        board = stack.enter_context(RunningBoard(tmp_path / "board.sqlite", "--minutes", "90"))
        ports = free_ports(len(ALIASES))  # the board already has its own
        for place, (alias, guess) in enumerate(ALIASES.items()):
            learners.append(Learner(place, ports[place], alias, board.join, tmp_path))
            stack.callback(learners[-1].close)
            learners[-1].write(guess)
        right, wrong, last = learners
        shutil.copy(SOLUTION, right.answer)
        wrong.answer.write_text("def optimizer_states(:\n")
        shutil.copy(SOLUTION, last.answer)
        instructor = chromium.new_context(
            viewport={"width": 1600, "height": 1000}, color_scheme="light"
        )
        page = instructor.new_page()
        page.set_default_timeout(WAIT)
        page.on("request", lambda request: asked.append(request.url))
        errors = []
        page.on("pageerror", lambda error: errors.append(error))
        page.set_content(f'<a href="{board.open}">the board</a>')  # as in an e-mail or a wiki
        page.get_by_text("the board").click()
        page.wait_for_url(f"http://127.0.0.1:{board.port}/")  # the token is gone
        expect(page.locator("#left")).to_have_text("90 min left", timeout=WAIT)

        for learner in learners:
            learner.ready()
            learner.open(chromium)
        for learner in learners:
            learner.opened()
        expect(page.locator("#grid tbody tr")).to_have_count(3, timeout=WAIT)
        page.select_option("#lab", "lab 10 five dimensions")
        assert "[ok] lab 10a by hand" in right.run()
        expect(row(page, right.alias)[CHECK]).to_have_class("done", timeout=WAIT)

        board.kill()
        said = wrong.run()  # the lab is not affected
        assert "[x] lab 10a by hand" in said and "ask_for_help()" in said
        expect(page.locator("#trouble")).to_contain_text("does not answer", timeout=WAIT)
        board.start()
        expect(row(page, wrong.alias)[CHECK]).to_have_class("tried", timeout=WAIT)
        assert "line 1 is not valid Python" in row(page, wrong.alias)[CHECK].inner_text()
        expect(page.locator("#trouble")).to_be_hidden(timeout=WAIT)

        assert f"{last.alias} asks for help" in last.run()
        hand = page.locator("#asking li")
        expect(hand).to_contain_text(f"{last.alias}Which <i>axis</i>?", timeout=WAIT)
        assert page.locator("#grid b, #asking i, #grid script").count() == 0  # text stays text
        counts = page.locator("#shares .count").first
        expect(counts).to_have_text("2 done · 1 tried · 0 not started", timeout=WAIT)

        page.select_option("#prediction", GUESS)
        expect(page.locator("#said")).to_contain_text("3 predictions · median 80 GB", timeout=WAIT)
        assert page.locator("#histogram line.measured").count() == 0
        page.check("#reveal")
        expect(page.locator("#said")).to_contain_text("theory 80.5 GB", timeout=WAIT)
        expect(page.locator("#said")).to_contain_text("measured 80.8 GB (median of 3", timeout=WAIT)
        ARTIFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTIFACTS / "class.png", full_page=True)

        hand.get_by_role("button", name="helped").click()
        expect(page.locator("#hands")).to_be_hidden(timeout=WAIT)
        page.fill("#minutes", "4")
        page.get_by_role("button", name="set").click()
        expect(page.locator("#left")).to_have_text("4 min left", timeout=WAIT)
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name=f"remove {last.alias}").click()
        expect(page.locator("#grid tbody tr")).to_have_count(2, timeout=WAIT)
        page.click("#names")
        assert right.alias not in page.locator("#grid").inner_text()
        page.click("#theme")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
        page.screenshot(path=ARTIFACTS / "class-dark-phone.png")

        for learner in learners:
            learner.process.send_signal(signal.SIGINT)
        for learner in learners:
            learner.end()
        assert errors == []
        assert {urlsplit(url).netloc for url in asked} == {f"127.0.0.1:{board.port}"}
        until(lambda: not reporters(tmp_path))
        ledger = json.loads((wrong.home / "ledger.json").read_text())
        assert ledger["tries"][CHECK]["count"] == 1 and time.time() > ledger["tries"][CHECK]["at"]


def reporters(folder):
    """Reporter processes whose ledger is under this folder."""
    import psutil

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("KINTSUGI_HOME", "").startswith(str(folder)):
                found.append(process)
    return found
