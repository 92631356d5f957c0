"""No window opens, and no test sees the figure of another."""

import pytest

from utils.drawing.figures import plt


@pytest.fixture(autouse=True)
def no_windows():
    plt.switch_backend("agg")
    plt.close("all")  # tests of other rooms draw, too
    yield
    plt.close("all")
