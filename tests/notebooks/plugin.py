"""Makes strict nbval reliable for this workshop; pyproject.toml loads it into every pytest run.

nbval 0.11 runs each code cell of each notebook as a test and compares its output with the stored
one. This plugin replaces nbval's classes with its own, which

- start the kernel as `make refresh` does: fixed set order, an empty folder for the learner's
  progress, without pytest's variables (with them ipykernel drops what subprocesses print);
- run cells with history, so that `plt.plot(...);` shows no value, as in JupyterLab;
- notice a dead kernel at once, not at the cell's time limit;
- fail a cell that was stored without being run (nbval lets it pass);
- skip the rest of a notebook after a failing cell, and name that cell;
- end each notebook with a test that its kernel stops and leaves no process behind.
"""

import os
import time
from pathlib import Path
from queue import Empty

import pytest
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, RunningKernel, start_new_kernel
from nbval.plugin import IPyNbCell, IPyNbFile, NbCellError

from tests.notebooks.warm import use_warm_kernels
from tests.patience import patience
from utils.workshop.notebooks import describe, surroundings, where

SANITIZE = Path(__file__).with_name("nbval_sanitize.cfg")


class Kernel(RunningKernel):
    """A kernel with its own environment; its death is noticed within a second."""

    def __init__(self, name, cwd, startup_timeout, environment, warm):
        use_warm_kernels(warm)
        with open(os.devnull, "w") as devnull:
            self.km, self.kc = start_new_kernel(
                startup_timeout, name, stderr=devnull, cwd=cwd, env=environment
            )
        self._ensure_iopub_up()

    def execute_cell_input(self, source, allow_stdin=None):
        return self.kc.execute(
            source, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
        )

    def get_message(self, stream, timeout=None):
        """The next message; raises Empty at the time limit, RuntimeError when the kernel died."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 0.5 if deadline is None else min(0.5, max(0.0, deadline - time.monotonic()))
            try:
                return super().get_message(stream, timeout=left)
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("The kernel died") from None
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def stop(self):
        """Kill only the kernel: a shutdown would also end the processes that it left behind."""
        if hasattr(self, "km"):
            self.kc.stop_channels()
            self.km.provisioner.process.kill()
            self.km.provisioner.process.wait()
            self.km.cleanup_resources()
            del self.km


class Notebook(IPyNbFile):
    """A notebook, run in the surroundings that `make refresh` gives it."""

    failed = None  # the failed cell; the cells after it are skipped
    around = None

    def setup(self):
        self.context = surroundings()
        self.around = self.context.__enter__()
        option = self.config.option
        if option.nbval_current_env:
            name = CURRENT_ENV_KERNEL_NAME
        else:
            name = option.nbval_kernel_name or self.nb.metadata.kernelspec.name
        self.kernel = Kernel(
            name,
            cwd=str(self.path.parent),
            startup_timeout=option.nbval_kernel_startup_timeout,
            environment=self.around.environment,
            warm=not any("TRITON_INTERPRET" in cell.source for cell in self.nb.cells),
        )
        self.setup_sanitize_files()

    def get_sanitize_files(self):
        given = self.config.option.nbval_sanitize_with
        return [given or str(SANITIZE)]

    def collect(self):
        found = list(super().collect())
        code = [i for i, cell in enumerate(self.nb.cells) if cell.cell_type == "code"]
        for index, cell in zip(code, found):
            yield Cell.from_parent(
                self,
                name=cell.name,
                cell_num=cell.cell_num,
                cell=cell.cell,
                options=cell.options,
                index=index,
            )
        if found:
            yield NotebookEnd.from_parent(self, name="no process left")

    def teardown(self):
        if self.kernel is not None:
            self.kernel.stop()
        if self.around is not None:
            self.context.__exit__(None, None, None)


class Cell(IPyNbCell):
    """A code cell; `index` is its position among all cells."""

    def __init__(self, *arguments, index, **named):
        super().__init__(*arguments, **named)
        self.index = index

    def setup(self):
        if self.parent.failed:
            pytest.skip(f"not run, because this failed: {self.parent.failed}")

    def runtest(self):
        if self.cell.source.strip() and self.cell.execution_count is None:
            self.parent.failed = self.place()
            self.raise_cell_error("The cell was stored without being run: make refresh")
        try:
            super().runtest()
        except pytest.skip.Exception:
            raise
        except BaseException:
            self.parent.failed = self.place()
            raise

    def place(self):
        return where(self.parent.path, self.parent.nb, self.index)

    def repr_failure(self, excinfo):
        if isinstance(excinfo.value, NbCellError):
            return f"{self.place()}\n{super().repr_failure(excinfo)}"
        return f"{self.place()}\n{excinfo.value}\n\n{self.cell.source}"

    def reportinfo(self):
        return self.path, 0, f"{self.parent.name}: cell {self.cell.get('id', self.cell_num)}"


class NotebookEnd(pytest.Item):
    """The test after the last cell: the kernel stops and no process outlives it."""

    def runtest(self):
        self.parent.kernel.stop()
        left = self.parent.around.leftovers(patience(10))
        assert not left, (
            f"{self.parent.name} left {len(left)} process(es) behind, close what it starts: "
            + "; ".join(map(describe, left))
        )

    def repr_failure(self, excinfo):
        return str(excinfo.value)

    def reportinfo(self):
        return self.path, 0, f"{self.parent.name}: no process left"


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Collect notebooks with our class instead of nbval's."""
    collected = yield
    return [
        Notebook.from_parent(parent, path=file.path) if type(file) is IPyNbFile else file
        for file in collected
    ]
