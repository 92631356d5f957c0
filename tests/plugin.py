"""What every pytest run of the workshop needs; pyproject.toml loads it, whatever is selected.

A conftest.py would be read only when something of its own folder is selected: `pytest -n 2
notebooks labs` would then run without it, and cut notebooks in two.
"""

import gc
import os
import signal
import sys

import cloudpickle
import pytest

import tests
from tests.patience import SPARE, WORKER, patience

gc.disable()  # until all is imported, which takes a quarter less time so

# jsonschema takes it where it is there, to judge addresses in a schema; its grammar takes 1.5 s.
sys.modules.setdefault("rfc3987_syntax", None)

# Torch's threads sleep while they wait for one another. They would spin: beside other work on the
# same cores, that took six times the processor time. Kernels, ranks and servers inherit this.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell's background command ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("tests.labs.lab_tests")  # its asserts say what they compared, too

# Functions of tests travel to ranks by value: by name, every rank would import the test's module,
# and pytest with it.
cloudpickle.register_pickle_by_value(tests)

LONG = ("notebooks/", "labs/", "tests/browser/", "tests/labs/", "tests/training/")
WAITING = ("tests/ranks/", "tests/serving/")  # for processes that start and end: a core is idle
COMPUTING = (  # and no time matters to them: they can have the cores when nobody else wants them
    "tests/compression/", "tests/course/", "tests/data/", "tests/drawing/", "tests/kernels/",
    "tests/measure/test_divergence.py", "tests/measure/test_environment.py",
    "tests/measure/test_memory.py", "tests/measure/test_traffic.py", "tests/memory/",
    "tests/models/", "tests/notebooks/test_static.py", "tests/parallel/", "tests/planner/",
    "tests/prompts/", "tests/serving/engine/test_native.py",
    "tests/serving/engine/test_quantized.py", "tests/serving/export/",
    "tests/training/test_matrix.py", "tests/training/test_mixes.py",
    "tests/training/test_resume.py",
)


def pytest_collection_modifyitems(config, items):
    """What several processes share, the long files first, so that all are done at the same time.

    Every test has more time where others use the machine as well.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if not config.pluginmanager.has_plugin("timeout"):  # a bare GPU machine, tests/gpu
        return
    usual = float(config.getini("timeout") or 0)
    for item in items:
        own = item.get_closest_marker("timeout")
        limit = patience(own.args[0] if own else usual)
        item.add_marker(pytest.mark.timeout(limit), append=False)  # before its own: it counts


def pytest_collection_finish():
    """What is imported by now stays: the garbage collector need not look at it again each time.
    Where ranks are wanted, their forkserver imports `tests/forkserver.py`, behind all others."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if pool := sys.modules.get("utils.ranks.pool"):
        pool.PRELOADED.append("tests.forkserver")
    if WORKER == SPARE:
        os.nice(10)  # and the ranks that it starts


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Whole files to whichever process is free, in the order of collection.

    What waits comes first in the first process and last in the second: beside it this computes, and
    each server is started once. That leaves a fifth of two cores idle: a third process, which comes
    behind these two wherever all want a core, takes what can wait for one.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _assign_work_unit(self, node):
            spare = node.gateway.id == SPARE
            kind, wanted = (COMPUTING, True) if spare else (WAITING, node.gateway.id == "gw0")
            files = (file for file in self.workqueue if file.startswith(kind) == wanted)
            if file := next(files, None):
                self.workqueue.move_to_end(file, last=False)
            elif spare and len(self.nodes) > 1:
                return node.shutdown()
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.fixture(scope="module")
def one_thread():
    """Torch computes with one thread, as a rank does, and as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
