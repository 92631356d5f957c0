"""Tests open no windows and see no other test's figures."""

import pytest

from utils.drawing.figures import plt


@pytest.fixture(autouse=True)
def no_windows():
    plt.switch_backend("agg")
    plt.close("all")  # tests of other rooms draw as well
    yield
    plt.close("all")
