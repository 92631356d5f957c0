"""Each test has its own folder for the learner's progress."""

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
