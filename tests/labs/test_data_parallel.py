"""Lab 01: the answers that its checks must accept and reject, and its support code."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.checks import check

LAB = Lab(
    "01_data_parallel",
    {
        "data_parallel": ("contracts", "data_parallel", "data_parallel.py"),
        "ring": ("contracts", "ring", "ring.py"),
        "bucketed": ("contracts", "bucketed", "bucketed.py"),
        "tree_all_reduce": ("contracts", "tree", "tree_all_reduce.py"),
        "crossover": ("contracts", "crossover", "tree_all_reduce.py"),
        "asynchronous_ring": ("contracts", "asynchronous_ring", "asynchronous_ring.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


def test_the_file_is_read_afresh_for_each_check(tmp_path, monkeypatch, capsys):
    from labs.support.data_parallel.contracts import ring

    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    for given in LAB.solution.glob("*.py"):
        (tmp_path / given.name).write_text(given.read_text())
    right, file = LAB.source("ring"), tmp_path / "ring.py"
    wrong = LAB.answer("ring", "calls_all_reduce").source
    for source, mark in (
        (wrong, "[x] ring: "),
        (right, "[ok] ring: "),
        (f"{right}\n)", "[x] ring: ring.py line"),
    ):
        file.write_text(source)
        check("ring", ring, file)
        assert capsys.readouterr().out.startswith(mark)


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_timeline():
    from labs.support.data_parallel.timeline import timeline
    from utils.course.messages import Note

    def blocking(*messages):  # ("isend", other), …: each is waited on at once
        return [note for number, (name, other) in enumerate(messages)
                for note in (Note(name, other, 2 * number), Note("wait", None, 2 * number))]

    assert timeline([[], []]) == 0
    assert timeline([blocking(("isend", 1)), blocking(("irecv", 0))]) == 1
    star = [blocking(*(("irecv", r) for r in (1, 2, 3))), *[blocking(("isend", 0))] * 3]
    assert timeline(star) == timeline(star, at_once=False) == 3
    swap = [[Note("irecv", other, 0), Note("isend", other, 1), Note("wait", None, 0),
             Note("wait", None, 1)] for other in (1, 0)]
    assert timeline(swap) == 1 and timeline(swap, at_once=False) == 2
    with pytest.raises(ValueError, match="not sent"):
        timeline([blocking(("irecv", 1)), []])


def test_the_digits_are_scikit_learns_and_the_gradient_is_right():
    import numpy as np
    from sklearn.datasets import load_digits

    from labs.support.data_parallel import digits

    images, labels = digits.load()
    theirs = load_digits()
    assert (images * 16 == theirs.data).all() and (labels == theirs.target).all()
    parameters, step = digits.new_parameters(0), 1e-6
    loss, gradient = digits.loss_and_gradient(parameters, images[:9], labels[:9])
    assert gradient.shape == (digits.SIZE,) and loss > 0
    for place in (0, 100, 2100, 2405):
        moved = parameters + step * (np.arange(digits.SIZE) == place)
        slope = (digits.loss_and_gradient(moved, images[:9], labels[:9])[0] - loss) / step
        assert slope == pytest.approx(gradient[place], abs=1e-5)
    assert not digits.loss_and_gradient(parameters, images[:0], labels[:0])[1].any()


def test_crossing():
    from labs.support.data_parallel.ring_against_tree import crossing

    sizes = [100, 200, 400]
    assert crossing(sizes, {"ring": [3, 4, 5], "tree": [1, 2, 3]}) is None
    assert crossing(sizes, {"ring": [1, 2, 3], "tree": [3, 4, 5]}) == 100
    assert 200 < crossing(sizes, {"ring": [3, 3, 3], "tree": [1, 2, 5]}) < 400
