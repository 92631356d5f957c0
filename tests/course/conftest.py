"""What a learner has done is kept in a folder of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
