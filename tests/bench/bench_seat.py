"""Measure what one learner of a hub needs, and compute how many fit on a machine.

    python -m tests.bench.bench_seat              lessons 01, 08, 15, 17, alone and three at once
    python -m tests.bench.bench_seat --all        every lesson and every lab's solution, alone

A seat is what a hub starts for a learner: a copy of the workshop, a home, a temporary folder and a
JupyterLab server like that of `make lab`. All seats use one `.venv`. A notebook runs from top to
bottom in a kernel of that server, over REST and a websocket as from a browser. The server and the
processes below it are sampled four times per second. Sampling memory costs milliseconds per
process, so it has a separate run and is less frequent where it would take more than half a core.
`--all`, and `--once` for named notebooks, leave out the other run; their times are therefore long.

memory   PSS, of which `private` is what the seat alone holds (anonymous and shared memory) and
         `files` its share of mapped files: seats that map the same file divide it. RSS counts a
         shared page in every process. Unmapped pages of the file cache are not counted.
CPU      of all processes of the seat, including those that have ended
threads  what process limits count: Linux's pids limit and TasksMax count each thread
disk     growth of the seat's folders: the peak, and at the end

It needs Linux. /dev/shm belongs to the whole machine, and other processes that map the same files
take a share of them: measure on an idle machine, times above all.
"""

import argparse
import json
import math
import os
import re
import secrets
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import psutil
import websocket

from tests.browser.jupyterlab import free_port, keep_only
from tests.patience import CORES
from tests.workshop.test_guide import readme_minutes
from utils.paths import ROOT
from utils.workshop import lab
from utils.workshop.notebooks import first_line, surroundings, written_notebooks

LESSONS = [  # 15 needs the most memory
    ROOT / "notebooks" / f"{name}.ipynb"
    for name in (
        "01_data_parallel",
        "08_pipeline_parallel",
        "15_compression",
        "17_deploy_to_triton",
    )
]
KEPT = ("notebooks", "labs", "models", "docs", "README.md", "utils", "triton_model_repo")
EVERY = 0.25  # seconds between two samples
PATIENCE = 900.0  # seconds without a message from the kernel
GIB, MIB = 2**30, 2**20

BEGIN, END = "<!-- measured -->", "<!-- end of what is measured -->"

# The arithmetic of `fit`
MACHINES = [(8, 32), (16, 64), (32, 128), (64, 256)]  # cores, GiB
SYSTEM = 2 * GIB  # for the system and the hub's own processes
FREE = 0.1  # fraction of the memory that stays free
SLOWER = 2  # how many times as long a cell may take when all run it at once
REPEATS = 3  # times that a learner runs each cell
BUSY = 0.5  # fraction of the cores in use, on average, if cells run at different moments


# ---- a seat, and what it holds


@dataclass(frozen=True)
class Look:
    """A sample of a seat's processes: bytes, CPU seconds so far, counts."""

    at: float
    private: int
    files: int
    rss: int
    cpu: float
    processes: int
    threads: int

    @property
    def pss(self) -> int:
        return self.private + self.files


def look(pid: int, memory: bool) -> Look:
    """Sample `pid` and its descendants that do not end meanwhile; 0 bytes without `memory`."""
    top = psutil.Process(pid)
    held = dict.fromkeys(("Pss", "Pss_File", "Rss"), 0)
    cpu, threads, count = 0.0, 0, 0
    found = [top, *top.children(recursive=True)]
    for process in found:  # quickly: one that ends now is counted neither here nor at its parent
        with suppress(psutil.Error, OSError):
            cpu += sum(process.cpu_times()[:4])  # its own, and that of children that have ended
            threads += process.num_threads()
            count += 1
    at = time.monotonic()
    for process in found if memory else []:
        with suppress(OSError, TypeError):  # a process that has ended has no lines
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            for name in held:
                held[name] += 1024 * int(re.search(rf"^{name}:\s+(\d+)", text, re.M)[1])
    private = held["Pss"] - held["Pss_File"]
    return Look(at, private, held["Pss_File"], held["Rss"], cpu, count, threads)


def size(folder: Path) -> int:
    """Bytes on disk of everything in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += 512 * os.lstat(os.path.join(place, name)).st_blocks
    return total


class Kernel:
    """A server's kernel for a notebook, used as from a browser."""

    def __init__(self, port: int, token: str, path: str) -> None:
        self._base, self._token = f"{lab.HOST}:{port}/api", token
        self.cells = [
            cell
            for cell in self._ask(f"contents/{path}")["content"]["cells"]
            if cell["cell_type"] == "code" and cell["source"].strip()
        ]
        wanted = {"path": path, "name": path, "type": "notebook", "kernel": {"name": "python3"}}
        self._session = self._ask("sessions", wanted)
        self._socket = websocket.create_connection(
            f"ws://{self._base}/kernels/{self._session['kernel']['id']}/channels",
            header={"Authorization": f"token {token}"},
            timeout=PATIENCE,
        )

    def _ask(self, what: str, content: dict | None = None) -> dict:
        data = None if content is None else json.dumps(content).encode()
        headers = {"Authorization": f"token {self._token}"}
        request = urllib.request.Request(f"http://{self._base}/{what}", data, headers)
        no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with no_proxy.open(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def run(self, cell: dict) -> str:
        """Run a cell to its end; return the error that it was not meant to raise, or ''."""
        header = {"msg_id": secrets.token_hex(16), "msg_type": "execute_request", "version": "5.3"}
        header |= {"session": self._session["id"], "username": "learner"}
        content = {"code": cell["source"], "silent": False, "allow_stdin": False}
        message = {"channel": "shell", "header": header, "content": content}
        self._socket.send(json.dumps({**message, "parent_header": {}, "metadata": {}}))
        waiting, problem = {"execute_reply", "idle"}, ""
        while waiting:
            said = self._socket.recv()
            if isinstance(said, bytes):  # a message with buffers, for display
                continue
            message = json.loads(said)
            kind, content = message["msg_type"], message["content"]
            state = content.get("execution_state")
            if state in ("restarting", "dead"):
                return "the kernel died"
            if message["parent_header"].get("msg_id") == header["msg_id"]:
                waiting -= {kind, state}
                if kind == "error":
                    problem = f"{content['ename']}: {first_line(content['evalue'])}"
        meant = "raises-exception" in cell["metadata"].get("tags", [])
        return "" if meant or not problem else f"cell {cell['id']}: {problem}"

    def close(self) -> None:
        self._socket.close()


@dataclass
class Seat:
    """A learner's folder and server, until `resources` are closed; `measure` adds `looks`."""

    resources: ExitStack
    memory: bool  # whether to sample it
    looks: list[Look] = field(default_factory=list)
    grown: int = 0  # peak growth of its folder in bytes
    kept: int = 0  # growth at the end
    seconds: float = math.nan  # duration of the cells
    problem: str = ""

    def __post_init__(self) -> None:
        around = self.resources.enter_context(surroundings())
        temporary = tempfile.TemporaryDirectory(prefix="seat-")
        self.folder = Path(self.resources.enter_context(temporary))
        root, home, scratch = (self.folder / name for name in ("workshop", "home", "tmp"))
        shutil.copytree(ROOT, root, ignore=keep_only(*KEPT))
        home.mkdir()
        scratch.mkdir()
        own = {"HOME": str(home), "TMPDIR": str(scratch), "PYTHONPATH": str(root)}
        own |= {"KINTSUGI_HOME": str(root / ".kintsugi"), "XDG_CACHE_HOME": str(home / ".cache")}
        self.port, self.token = free_port(), secrets.token_hex(16)
        environment = lab.environment(self.token, around.environment | own)
        self.server = lab.start(lab.command(self.port, root), environment, self.folder / "lab.log")
        self.resources.callback(lab.stop, self.server)
        lab.wait_until_ready(self.server, self.port, self.token)
        self.before = size(self.folder)
        self.alone = self.look()

    def look(self) -> Look:
        return look(self.server.pid, self.memory)

    def learn(self, path: Path, gate: threading.Barrier) -> None:
        """Run a notebook once all at the gate have a kernel; stop at the first problem."""
        kernel = Kernel(self.port, self.token, path.relative_to(ROOT).as_posix())
        gate.wait(PATIENCE)
        self.began = self.look()
        for number, cell in enumerate(kernel.cells):
            self.problem = kernel.run(cell)
            if self.problem:
                break
            if number == 0:  # a lesson's first cell imports
                self.imported = self.look()
        self.ended = self.look()  # the learner keeps reading, the kernel stays
        self.seconds = self.ended.at - self.began.at
        self.kept = size(self.folder) - self.before
        kernel.close()

    @property
    def core_seconds(self) -> float:
        return self.ended.cpu - self.began.cpu

    def most(self, name: str) -> int:
        """The largest value of a field over all looks."""
        return max(getattr(one, name) for one in self.looks)

    def busiest_second(self) -> float:
        """Mean cores in use over the busiest second."""
        spent = list(accumulate((one.cpu for one in self.looks), max))  # see `look`: it only grows
        found = 0.0
        for one, before in zip(self.looks, spent):
            later = (i for i, two in enumerate(self.looks) if two.at - one.at >= 1)
            if (i := next(later, None)) is not None:
                found = max(found, (spent[i] - before) / (self.looks[i].at - one.at))
        return found


def measure(path: Path, count: int, memory: bool) -> tuple[list[Seat], int]:
    """Run a notebook on `count` seats at once; return the seats and the growth of /dev/shm."""
    gate, shm = threading.Barrier(count), []
    with ExitStack() as stack:
        seats = [Seat(stack, memory) for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            runs = [pool.submit(seat.learn, path, gate) for seat in seats]
            while not all(run.done() for run in runs):
                begin = time.monotonic()
                shm.append(shutil.disk_usage("/dev/shm").used)
                for seat in seats:
                    seat.looks.append(seat.look())
                    if memory:
                        seat.grown = max(seat.grown, size(seat.folder) - seat.before)
                took = time.monotonic() - begin
                time.sleep(max(took, EVERY - took))
            for run in runs:
                run.result()
    return seats, max(shm) - shm[0]


# ---- how many fit


@dataclass(frozen=True)
class Need:
    """One learner's needs in one lesson: bytes of memory, CPU and wall seconds, minutes."""

    private: int
    files: int
    core_seconds: float
    seconds: float
    minutes: float


def fit(many_cores: int, memory: int, need: Need) -> dict[str, int]:
    """How many learners fit on a machine with `many_cores` cores and `memory` bytes.

    memory       all hold their peak of `private` at once; the mapped files count once
    same moment  all start the same lesson at once, and it may take SLOWER times as long as alone:
                 in that time the cores must supply the core-seconds of all
    spread       each runs every cell REPEATS times, at any moment of the lesson's minutes, and
                 a fraction BUSY of the cores is in use on average
    """
    left = (1 - FREE) * memory - SYSTEM - need.files
    given = {"same moment": SLOWER * need.seconds, "spread": BUSY * 60 * need.minutes / REPEATS}
    by_cores = {how: int(many_cores * time / need.core_seconds) for how, time in given.items()}
    return {"memory": int(left / need.private), **by_cores}


def need(path: Path, weighed: Seat, timed: Seat) -> Need:
    """What this notebook needed alone, in the memory run and in the time run."""
    lesson, lab_of_it = readme_minutes()[number(path)]
    return Need(
        private=weighed.most("private"),
        files=weighed.most("files"),
        core_seconds=timed.core_seconds,
        seconds=timed.seconds,
        minutes=lesson if path.parent.name == "notebooks" else lab_of_it,
    )


# ---- what is printed


def number(path: Path) -> str:
    return re.search(r"/(\d\d)_", path.as_posix())[1]


def title(path: Path) -> str:
    """`01`, or `lab 01`."""
    return ("" if path.parent.name == "notebooks" else "lab ") + number(path)


def table(heads: str, rows: list[list[object]]) -> str:
    """Return a Markdown table; `heads` are separated by |."""
    names = heads.split("|")
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def gib(size: float) -> str:
    return f"{size / GIB:.2f}"


ALONE = "lesson|server|imported|peak|private|files|RSS|at the end|core-seconds|seconds|mean cores|"
ALONE += "busiest second|processes|threads|disk, MiB|kept, MiB|/dev/shm, MiB"


def alone(path: Path, weighed: Seat, timed: Seat, shm: int) -> list[object]:
    """A row of the table ALONE; memory in GiB, from `peak` to `RSS` each at its own peak."""
    peaks = map(weighed.most, ("pss", "private", "files", "rss"))
    memory = [weighed.alone.pss, weighed.imported.pss, *peaks, weighed.ended.pss]
    return [
        title(path),
        *map(gib, memory),
        f"{timed.core_seconds:.0f}",
        f"{timed.seconds:.0f}",
        f"{timed.core_seconds / timed.seconds:.1f}",
        f"{timed.busiest_second():.1f}",
        timed.most("processes"),
        timed.most("threads"),
        round(weighed.grown / MIB),
        round(weighed.kept / MIB),
        round(shm / MIB),
    ]


TOGETHER = "lesson|seats|memory of all, GiB|by arithmetic|private of one|files of one|seconds|"
TOGETHER += "times as long as alone|by arithmetic|processes|threads|/dev/shm, MiB"


def together(
    path: Path, weighed: list[Seat], timed: list[Seat], shm: int, one: Need
) -> list[object]:
    """A row of the table TOGETHER, next to what the arithmetic of `fit` says for as many seats."""
    count, slowest = len(timed), max(seat.seconds for seat in timed)
    at_once = [sum(look.pss for look in looks) for looks in zip(*(s.looks for s in weighed))]
    return [
        title(path),
        count,
        gib(max(at_once)),
        gib(count * one.private + one.files),
        *(gib(sum(s.most(name) for s in weighed) / count) for name in ("private", "files")),
        f"{slowest:.0f}",
        f"{slowest / one.seconds:.1f}",
        f"{max(1, count * one.core_seconds / (CORES * one.seconds)):.1f}",
        sum(seat.most("processes") for seat in timed),
        sum(seat.most("threads") for seat in timed),
        round(shm / MIB),
    ]


def fits(needs: dict[Path, Need]) -> str:
    """The table of how many learners fit, in each way for the most demanding lesson."""
    rows = []
    for many_cores, memory in MACHINES:
        found = {title(path): fit(many_cores, memory * GIB, one) for path, one in needs.items()}
        least = {}
        for how in ("memory", "same moment", "spread"):
            least[how] = min((one[how], name) for name, one in found.items())
        row = [f"{many_cores} cores, {memory} GiB"]
        row += [f"{count} ({name})" for count, name in least.values()]
        for how in ("same moment", "spread"):
            row.append(min(least["memory"], least[how])[0])
        rows.append(row)
    heads = (
        "machine|by memory|by cores, same moment|by cores, spread|a guided class|at their own pace"
    )
    return table(heads, rows)


def into(page: Path, text: str) -> None:
    """Put the tables into a page, between its two comments."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="instead of 01, 08, 15, 17")
    parser.add_argument("--once", action="store_true", help="one run each, alone, for memory")
    parser.add_argument("--all", action="store_true", help="so every lesson and lab's solution")
    parser.add_argument("--seats", type=int, nargs="+", default=[3], help="how many at once, too")
    parser.add_argument("--page", type=Path, help="put the tables into it: docs/class/fit.md")
    options = parser.parse_args()
    if options.page and BEGIN not in options.page.read_text(encoding="utf-8"):
        parser.error(f"{options.page} has no {BEGIN}")
    once = options.once or options.all
    named = [path.resolve() for path in options.notebooks]
    paths = named or (written_notebooks() if options.all else LESSONS)
    rows, more, needs, problems = [], [], {}, []
    for path in paths:
        for count in [1] if once else sorted({1, *options.seats}):
            begin, load = time.monotonic(), os.getloadavg()[0]
            weighed, shm = measure(path, count, memory=True)
            timed = weighed if once else measure(path, count, memory=False)[0]
            found = [f"{title(path)}: {s.problem}" for s in [*weighed, *timed] if s.problem]
            print(
                f"{title(path)}, {count} at once: {'; '.join(found) or 'ok'}",
                f"in {time.monotonic() - begin:.0f} s; load before: {load:.1f};",
                f"peak: {gib(max(seat.most('pss') for seat in weighed))} GiB",
                file=sys.stderr,
                flush=True,
            )
            problems += found
            if found:
                break
            if count == 1:
                needs[path] = need(path, weighed[0], timed[0])
                rows.append(alone(path, weighed[0], timed[0], shm))
            else:
                more.append(together(path, weighed, timed, shm, needs[path]))

    from utils.measure.machine import processor_name  # late: maps torch, which seats share

    memory = psutil.virtual_memory().total / GIB
    machine = f"{processor_name()}, {CORES} cores, {memory:.0f} GiB"
    tables = [f"A seat alone ({machine}):\n", table(ALONE, rows)]
    if not once and not problems:
        tables += ["Several at once:\n", table(TOGETHER, more)]
        tables += ["How many learners fit, by arithmetic from the first table:\n", fits(needs)]
    print(text := "\n".join(tables))
    if options.page and not problems:
        into(options.page, text)
    print("\n".join(problems) or "every cell of every seat did what it should")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
