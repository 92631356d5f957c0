"""Lab 17: the answers that its checks must accept and reject, against a real server."""

import psutil
import pytest

from labs.support.deploy_to_triton import lab_server, measurements
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience
from tests.serving.processes import until
from utils.paths import ROOT
from utils.serving.server import ServerError, server_available
from utils.workshop import labs

pytestmark = [
    pytest.mark.timeout(patience(600)),  # some wrong answers take all their time
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
]

LAB = Lab(
    "17_deploy_to_triton",
    {
        "config": ("contracts", "config", "config.py"),
        "model": ("served", "model", "model.py"),
        "client": ("served", "client", "client.py"),
        "goal": ("served", "goal", "settings.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    for name in ("config.py", "settings.py"):
        (tmp_path / name).write_text(labs.generated(LAB.solution / name, ROOT))
    assert measurements.loads(str(tmp_path / "settings.py")) is None
    assert measurements.together(str(tmp_path / "config.py")) is None
    learners = LAB.solution.parent  # the engine of lab 16 is not written there
    written = tmp_path / "17_deploy_to_triton"
    written.mkdir()
    (written / "config.py").write_text((LAB.solution / "config.py").read_text())
    (tmp_path / "16_inference_engine").symlink_to(learners.with_name("16_inference_engine"))
    assert measurements.together(str(written / "config.py")) is None
    assert lab_server._here["server"] is None, "a server was started for nothing"


def test_a_load_that_does_not_come_to_an_end_is_ended_and_the_lab_goes_on(
    monkeypatch, tmp_path
):
    """It ends within its time limit, with one sentence, and leaves no process."""
    blank, hangs, head = tmp_path / "blank.py", tmp_path / "hangs.py", "class TritonPythonModel:\n"
    blank.write_text(f"{head}    def execute(self, requests):\n        return []\n")
    hangs.write_text(f"{head}    def initialize(self, args):\n        while True: pass\n")
    config = 'backend: "python"\ninstance_group { kind: KIND_CPU count: 1 }'
    monkeypatch.setattr(lab_server, "LOAD", 3.0)
    before = set(psutil.Process().children(recursive=True))
    try:
        lab_server.server()
        with pytest.raises(ServerError, match=r"^the model is not loaded after 3 s\. .*an end\?$"):
            lab_server.put(config, model=hangs)
        until(lambda: not set(psutil.Process().children(recursive=True)) - before)
        monkeypatch.undo()
        lab_server.put(config, model=blank)
        assert lab_server.server().versions(lab_server.NAME) == [1]
    finally:
        lab_server.close()
