"""A site of local files in a headless Chromium, without a network."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.jupyterlab import CHROMIUM_FLAGS, find_chromium
from tests.patience import patience
from utils.paths import ROOT

PHONE = {"width": 390, "height": 800}
OWN = ("file:", "data:", "blob:", "about:")


def needs_chromium() -> None:
    """Skip the calling module if there is no Chromium, except on CI."""
    if not find_chromium() and not os.environ.get("CI"):
        reason = "no Chromium was found: apt-get install chromium, or CHROMIUM=/path"
        pytest.skip(reason, allow_module_level=True)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """One Chromium for a test file."""
    assert find_chromium(), "CI needs a Chromium for this test: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=CHROMIUM_FLAGS, timeout=90_000
        )
        yield browser
        browser.close()


def built(kind: str, out: Path) -> Path:
    """Run `make book` or `make slides` into folder `out`, with its set-up if that is missing."""
    command = [sys.executable, "utils/workshop/book.py", kind, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(400))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr, done.stdout
    assert done.stdout.splitlines()[-1].endswith("index.html")
    return out


@contextlib.contextmanager
def watched(browser: Browser, host: str = "file:", **how) -> Iterator[Page]:
    """A page in its own window; at the end asserts that it asked no host except `host`, that
    nothing was missing and that no script failed."""
    context = browser.new_context(**how)
    problems = []
    own = (host, *OWN)
    context.on("request", lambda r: r.url.startswith(own) or problems.append(f"asks for {r.url}"))
    context.on("requestfailed", lambda r: problems.append(f"has not got {r.url}"))
    context.on("weberror", lambda e: problems.append(f"fails: {e.error}"))
    page = context.new_page()
    page.set_default_timeout(1000 * patience(20))
    page.on("console", lambda m: m.type == "error" and problems.append(f"says {m.text}"))
    try:
        yield page
        assert not problems, problems
    finally:
        context.close()


def missing_pictures(page: Page) -> list[str]:
    """The addresses of images that failed to load."""
    return page.evaluate(
        """async () => {
            const shown = await Promise.all([...document.images].map(async image => {
                image.loading = 'eager';
                try { await image.decode(); } catch { return image.src.slice(0, 200); }
                return image.naturalWidth ? '' : image.src.slice(0, 200);
            }));
            return shown.filter(Boolean);
        }"""
    )
