"""Ranks inside a real Jupyter kernel: the magic, interrupts, restarts, crashes."""

import os
import re
import signal
import time

import pytest
from jupyter_client.manager import start_new_kernel

from tests.patience import patience
from tests.ranks.test_pool import gone

OPEN = """
from utils.ranks import Ranks, pool
import multiprocessing.forkserver as f
pool.PATIENCE = 60.0  # no test has a rank that must be killed
ranks = Ranks(2, timeout=120)
print("PIDS", *ranks.pids, f._forkserver._forkserver_pid)
"""
# The beginning of a cell: its file shows that a rank has reached it.
BEGUN = "mark = 7\nopen(f'{folder}/{{rank}}', 'w').close()\n"


def wait_for_both(folder, seconds=60):
    """Wait until both ranks have written their file and thus are inside the cell."""
    deadline = time.monotonic() + patience(seconds)
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline, "the ranks did not begin the cell"
        time.sleep(0.05)


class Kernel:
    """A kernel and the output of its cells."""

    def __init__(self):
        self.start()

    def start(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=200)

    def execute(self, source):
        """Run a cell; return (text of stdout, the error's text or "")."""
        return self.wait(self.client.execute(source))

    def wait(self, request):
        texts, error = [], ""
        while True:
            message = self.client.get_iopub_msg(timeout=200)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                texts.append(content["text"])
            elif kind == "error":
                error = content["ename"] + "\n" + "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(texts), error

    def open_ranks(self):
        text, error = self.execute(OPEN)
        assert not error, error
        return [int(pid) for pid in re.search(r"PIDS ([\d ]+)", text)[1].split()]

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel():
    """Each test leaves it usable, except the last, which starts a new one if necessary."""
    kernel = Kernel()
    yield kernel
    kernel.end()


def test_the_magic_runs_cells_and_says_what_is_missing(kernel):
    _, error = kernel.execute("import utils.ranks")
    assert not error
    _, error = kernel.execute("%%ranks\n1")
    assert "No ranks are open" in error and "Ranks(4)" in error
    kernel.open_ranks()
    source = "t = torch.ones(1) * (rank + 1)\ndist.all_reduce(t)\nt.item()"
    text, error = kernel.execute("%%ranks\n" + source)
    assert (text, error) == ("all ranks │ 3.0\n", "")
    text, _ = kernel.execute("%%ranks 1\nrank")
    assert text == "rank 1 │ 1\n"
    text, error = kernel.execute("def double(x):\n    return 2 * x\nranks.run(double, 4)")
    assert not error
    _, error = kernel.execute("%%ranks\nif rank == 1:\n    raise KeyError('k')")
    assert "Rank 1 failed" in error and "line 2: raise KeyError('k')" in error
    assert "Traceback" not in error


def test_a_section_run_again_runs_on_its_own_ranks(kernel):
    """Even if other groups have been opened since."""
    kernel.open_ranks()
    _, error = kernel.execute("one, three = Ranks(1), Ranks(3)")
    assert not error
    for line, printed in {
        "": "all ranks │ 2\n",
        "one": "rank 0 │ 1\n",
        "three": "all ranks │ 3\n",
        "three 0,2": "ranks 0, 2 │ 3\n",
    }.items():
        assert kernel.execute(f"%%ranks {line}\nworld_size") == (printed, "")
    _, error = kernel.execute("%%ranks four\nworld_size")
    assert "no open ranks have this name; this notebook's are one, ranks, three" in error
    assert kernel.execute("one.close(), three.close()")[1] == ""


def test_interrupting_the_kernel_interrupts_the_ranks(kernel, tmp_path):
    kernel.open_ranks()
    waits = "import time\ntime.sleep(300)", "if rank == 0: dist.recv(torch.ones(1), src=1)"
    for number, source in enumerate(waits):
        folder = tmp_path / str(number)
        folder.mkdir()
        request = kernel.client.execute("%%ranks\n" + BEGUN.format(folder=folder) + source)
        wait_for_both(folder)
        start = time.monotonic()
        kernel.manager.interrupt_kernel()
        _, error = kernel.wait(request)
        assert error.startswith("KeyboardInterrupt")
        assert time.monotonic() - start < 60  # on their own they would end after 120 s or more
        text, error = kernel.execute("%%ranks\ndist.barrier()\nmark")
        assert (text, error) == ("all ranks │ 7\n", "")


def test_an_exception_in_the_notebook_leaves_the_ranks_in_order(kernel):
    pids = kernel.open_ranks()
    _, error = kernel.execute("with Ranks(2) as two:\n    others = two.pids\n    1 / 0")
    assert "ZeroDivisionError" in error
    text, _ = kernel.execute("print(*others)")
    assert gone([int(pid) for pid in text.split()])
    text, _ = kernel.execute("print(*ranks.pids)")
    assert [int(pid) for pid in text.split()] == pids[:2]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["restart", "shutdown", "SIGKILL"])
def test_no_process_outlives_its_kernel(kernel, how, tmp_path):
    """SIGKILL comes while one rank is busy and the other idle."""
    if not kernel.manager.is_alive():  # since the previous test
        kernel.end()
        kernel.start()
    pids = kernel.open_ranks()
    if how == "restart":
        kernel.manager.restart_kernel(now=False)
    elif how == "shutdown":
        kernel.manager.shutdown_kernel(now=False)
    else:
        begun = BEGUN.format(folder=tmp_path)
        kernel.client.execute(f"%%ranks\n{begun}while rank == 1:\n    pass")
        wait_for_both(tmp_path)
        os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    assert gone(pids), "ranks are still alive"
