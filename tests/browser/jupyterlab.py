"""JupyterLab in a headless Chromium: open a notebook, run it, take screenshots.

    python -m tests.browser.jupyterlab notebooks/00_start_here.ipynb --out lesson.png [--run]

Works on a copy of the repository, so that the browser cannot save into it.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import psutil
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.patience import patience
from utils.paths import ROOT
from utils.workshop import lab
from utils.workshop.notebooks import describe, marked, surroundings

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
VIEW = {"width": 1280, "height": 800}
TALL = {"width": 1280, "height": 4000}  # few tiles for a long notebook
FOLDERS = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"]
FOLDERS += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]

# The open notebook's kernel is ready and idle. (The toolbar says so too early.)
READY = """() => {
    const widget = window.jupyterapp?.shell?.currentWidget;
    const session = widget?.sessionContext;
    return !!session?.isReady && widget.context.isReady
        && session.session?.kernel?.status === 'idle';
}"""
OPEN = "path => { window.jupyterapp.commands.execute('docmanager:open', { path }); }"
OPENED = "path => window.jupyterapp.shell.currentWidget?.context?.path === path"
SHUTDOWN = "() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
# All cells in stored form: tests check their outputs, not a command's return value.
CELLS = "() => window.jupyterapp.shell.currentWidget.content.model.sharedModel.cells" + (
    ".map(cell => cell.toJSON())"
)
# Nothing is running: every cell has run, or one failed and the rest were cancelled.
FINISHED = """() => {
    const widget = window.jupyterapp.shell.currentWidget;
    if (widget.sessionContext.session?.kernel?.status !== 'idle') return false;
    const cells = widget.content.model.sharedModel.cells.map(cell => cell.toJSON())
        .filter(cell => cell.cell_type === 'code' && [].concat(cell.source).join('').trim());
    const failed = cells.some(cell => !(cell.metadata.tags ?? []).includes('raises-exception')
        && cell.outputs.some(output => output.output_type === 'error'));
    return failed || cells.every(cell => cell.execution_count);
}"""
PANEL = ".jp-NotebookPanel-notebook .jp-WindowedPanel-outer"


def find_chromium() -> str | None:
    """The path of an installed Chromium or Chrome (CHROMIUM=… overrides it), or None."""
    names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
    places = [os.environ.get("CHROMIUM"), *map(shutil.which, names)]
    places.append("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
    return next((place for place in places if place and Path(place).exists()), None)


def free_ports(count: int) -> list[int]:
    """Free ports below the range that the system uses for outgoing connections."""
    found = []
    for port in range(20000 + os.getpid() % 5000, 32000, 7):
        with contextlib.suppress(lab.LabError):
            lab.check_port(port)
            found.append(port)
        if len(found) == count:
            return found
    raise lab.LabError("Too few ports between 20000 and 32000 are free.")


def free_port() -> int:
    return free_ports(1)[0]


class Browser:
    """A context manager: one JupyterLab server and one Chromium for all notebooks."""

    def __enter__(self):
        self.resources = contextlib.ExitStack()
        try:
            self.start()
        except BaseException:
            self.resources.close()
            raise
        return self

    def __exit__(self, *_):
        self.resources.close()

    def start(self):
        self.around = self.resources.enter_context(surroundings())
        folder = Path(self.resources.enter_context(tempfile.TemporaryDirectory()))
        self.root = folder / "workshop"
        shown = keep_only("notebooks", "labs", "models", "docs", "README.md")
        shutil.copytree(ROOT, self.root, ignore=shown)
        self.port, self.token = free_port(), secrets.token_hex(8)
        environment = lab.environment(self.token, self.around.environment)
        environment |= {name: str(folder / name.lower()) for name in FOLDERS}
        command = lab.command(self.port, self.root, "--LabApp.expose_app_in_browser=True")
        server = lab.start(command, environment, folder / "lab.log")
        self.resources.callback(lab.stop, server)
        lab.wait_until_ready(server, self.port, self.token, patience(60))
        # supervisor and server, by PID: the supervisor also adopts processes that are left behind
        supervisor = psutil.Process(server.pid)
        self.own = {supervisor.pid, *(child.pid for child in supervisor.children())}
        playwright = self.resources.enter_context(sync_playwright())
        self.chromium = playwright.chromium.launch(
            executable_path=find_chromium(), headless=True, args=CHROMIUM_FLAGS, timeout=90_000
        )
        self.resources.callback(self.chromium.close)
        self.pages = self.chromium.new_context(viewport=VIEW)  # one cache for JupyterLab's scripts

    def left_running(self, wait: float = 30) -> list[str]:
        """Processes of notebooks that still run after `wait` seconds (on a quiet machine)."""
        deadline = time.monotonic() + patience(wait)
        while True:
            left = [p for p in marked(self.around.mark) if p.pid not in self.own]
            if not left or time.monotonic() > deadline:
                return [describe(process) for process in left]
            time.sleep(0.1)

    @contextlib.contextmanager
    def page(self, path: str, mode: str = "doc"):
        """A page on `path` (relative to the repository); mode "lab" shows all of JupyterLab."""
        page = self.pages.new_page()
        page.set_default_timeout(90_000)  # ms; the machine may be busy
        page.goto(f"http://{lab.HOST}:{self.port}/{mode}/tree/{path}?token={self.token}&reset")
        page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget")
        try:
            yield page
        finally:
            page.close()

    @contextlib.contextmanager
    def notebook(self, path: str):
        """A page on a notebook with its kernel ready; shuts the kernel down afterwards."""
        with self.page(path) as page:
            page.wait_for_function(READY)
            yield page
            page.evaluate(SHUTDOWN)

    @contextlib.contextmanager
    def opened(self, page, path: str):
        """The same in an existing page that shows all of JupyterLab."""
        page.evaluate(OPEN, path)
        page.wait_for_function(OPENED, arg=path)
        page.wait_for_function(READY)
        yield
        page.evaluate(SHUTDOWN)
        page.evaluate("() => window.jupyterapp.shell.currentWidget.dispose()")


def keep_only(*names):
    """An `ignore` for copytree: at the top only these, below them everything except caches."""

    def ignore(folder, entries):
        if Path(folder) == ROOT:
            return [entry for entry in entries if entry not in names]
        return [entry for entry in entries if entry in ("__pycache__", ".ipynb_checkpoints")]

    return ignore


def run_all(page, seconds: float = 600) -> list[dict]:
    """Clear all outputs, run all cells, wait; returns the cells.

    Raises:
        TimeoutError: names the cell that was not finished after `seconds`.
    """
    execute = "name => { window.jupyterapp.commands.execute(name); }"
    page.evaluate(execute, "notebook:clear-all-cell-outputs")
    page.wait_for_function(READY)
    page.evaluate(execute, "notebook:run-all-cells")
    deadline = time.monotonic() + seconds
    while not page.evaluate(FINISHED):
        if time.monotonic() > deadline:
            waiting = [c for c in page.evaluate(CELLS) if c.get("execution_count", 0) is None]
            raise TimeoutError(f"cell {waiting[0]['id']} was not done after {seconds:.0f} s")
        time.sleep(0.5)
    return page.evaluate(CELLS)


def picture(page, out: Path) -> list[Path]:
    """Take screenshots of the whole notebook from top to bottom; returns their paths.

    A PNG is at most 8,000 pixels high: a longer notebook gets out-2.png, out-3.png, …
    """
    page.set_viewport_size(TALL)
    panel = page.locator(PANEL).first
    panel.evaluate("panel => { panel.scrollTop = 0; }")
    tiles, top = [], 0
    while True:
        time.sleep(0.4)  # a cell is laid out when it comes into view
        tiles.append((top, Image.open(BytesIO(panel.screenshot(animations="disabled")))))
        height, total = panel.evaluate("panel => [panel.clientHeight, panel.scrollHeight]")
        if top + height >= total - 2:
            break
        panel.evaluate("(panel, top) => { panel.scrollTop = top; }", top + height)
        time.sleep(0.2)
        moved = panel.evaluate("panel => panel.scrollTop")
        if moved <= top:
            break
        top = moved
    whole = Image.new("RGB", (tiles[0][1].width, round(tiles[-1][0]) + tiles[-1][1].height))
    for top, tile in tiles:
        whole.paste(tile, (0, round(top)))
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, begin in enumerate(range(0, whole.height, 8000), start=1):
        paths.append(out if number == 1 else out.with_stem(f"{out.stem}-{number}"))
        whole.crop((0, begin, whole.width, min(begin + 8000, whole.height))).save(paths[-1])
    return paths


def error_outputs(cells: list[dict]) -> list[str]:
    """Errors in cells that are not meant to fail."""
    return [
        f"cell {cell['id']}: {output['ename']}: {output['evalue']}"
        for cell in cells
        for output in cell.get("outputs", [])
        if output["output_type"] == "error"
        and "raises-exception" not in cell["metadata"].get("tags", [])
    ]


def main():
    parser = argparse.ArgumentParser(description="Take a picture of a notebook in JupyterLab.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="the PNG to write")
    parser.add_argument("--run", action="store_true", help="run all cells first")
    options = parser.parse_args()
    if not find_chromium():
        sys.exit("No Chromium was found: install it, or name one with CHROMIUM=/path.")
    path = options.notebook.resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        sys.exit(f"{options.notebook} is no notebook of this repository.")
    with Browser() as browser, browser.notebook(path.relative_to(ROOT).as_posix()) as page:
        problems = error_outputs(run_all(page)) if options.run else []
        for written in picture(page, options.out):
            print(written)
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
