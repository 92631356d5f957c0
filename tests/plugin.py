"""Set-up for every pytest run of the workshop; pyproject.toml loads it, whatever is selected.

A conftest.py is read only when something in its own folder is selected: `pytest -n 2 notebooks
labs` would run without it and split notebooks between workers.
"""

import gc
import os
import signal
import sys

import cloudpickle
import pytest

import tests
from tests.patience import SPARE, WORKER, patience

gc.disable()  # until everything is imported, which saves a quarter of the time

# jsonschema would use it to validate addresses, and its grammar takes 1.5 s to load.
sys.modules.setdefault("rfc3987_syntax", None)

# Torch's threads sleep instead of spinning while they wait for one another: on shared cores
# spinning took six times the processor time. Kernels, ranks and servers inherit this.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell's background command ignores Ctrl-C, and so would every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("tests.labs.lab_tests")  # so that its asserts show their operands

# Test functions are sent to ranks by value: by name, every rank would import the test's module and
# pytest with it.
cloudpickle.register_pickle_by_value(tests)

LONG = ("notebooks/", "labs/", "tests/browser/", "tests/labs/", "tests/training/")
WAITING = ("tests/ranks/", "tests/serving/")  # for processes to start and end: a core is idle
COMPUTING = (  # not sensitive to time: they can use the cores that the others leave idle
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
    """Put long files first, so that all processes finish together; extend limits under load."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    if not config.pluginmanager.has_plugin("timeout"):  # a bare GPU machine: tests/gpu
        return
    usual = float(config.getini("timeout") or 0)
    for item in items:
        own = item.get_closest_marker("timeout")
        limit = patience(own.args[0] if own else usual)
        item.add_marker(pytest.mark.timeout(limit), append=False)  # before its own, to take effect


def pytest_collection_finish():
    """Exempt all that is imported by now from garbage collection; where ranks are needed, let their
    forkserver import `tests/forkserver.py` last."""
    gc.enable()
    gc.collect()
    gc.freeze()
    if pool := sys.modules.get("utils.ranks.pool"):
        pool.PRELOADED.append("tests.forkserver")
    if WORKER == SPARE:
        os.nice(10)  # and the ranks that it starts


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give whole files to free processes, in the order of collection.

    The first process starts with the WAITING files and the second ends with them: the second
    computes meanwhile, and each server is started once. That leaves a fifth of two cores idle: a
    third process of lower priority uses it for COMPUTING files.
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
    """Let torch compute with one thread, as on a rank."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
