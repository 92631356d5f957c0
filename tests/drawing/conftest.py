"""No window opens, and no figure of one test is seen by the next."""

import pytest

from utils.drawing.figures import plt


@pytest.fixture(autouse=True)
def no_windows():
    plt.switch_backend("agg")
    yield
    plt.close("all")
