"""Lab 18: the decisions that its checks must accept and reject. The worked decisions run in the
lab's notebook; tests that train or serve again belong to `make test-all`."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience
from utils.serving.server import server_available

FOLDER, FILE = "18_final_project", "project.py"


class TestDecisions(LabTests):
    lab = Lab(
        FOLDER,
        {"plan": ("contracts", "the_plan", FILE), "format": ("contracts", "compressed", FILE)},
    )


@pytest.mark.thorough
@pytest.mark.timeout(patience(600))
class TestRuns(LabTests):
    lab = Lab(FOLDER, {"rehearsal": ("contracts", "rehearsal", FILE)})


@pytest.mark.thorough
@pytest.mark.timeout(patience(600))
@pytest.mark.skipif(server_available() is not None, reason=str(server_available()))
class TestServer(LabTests):
    lab = Lab(FOLDER, {"promise": ("contracts", "promise", FILE)})
