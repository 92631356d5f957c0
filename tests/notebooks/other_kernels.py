"""Do the stored outputs hold on other machines? `make test-kernels [NB=…]`, an hour and a half.

Runs every notebook strictly against its stored outputs, once per row of SETTINGS: with torch, MKL
and oneDNN limited to the instruction sets of older processors, with one thread or two, and under
load. A processor cannot emulate what it lacks, and MKL obeys only COMPATIBLE on processors not from
Intel. If Python 3.12 is installed, models also learn from its language reference, which is
6 % longer than 3.11's (utils/data/corpus.py).
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

from utils.paths import ROOT
from utils.workshop.notebooks import asked_for, every_notebook, name

SSE = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX512 = {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
ONE, TWO = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}
SETTINGS = (  # (what is tested, the environment, processes that compute meanwhile)
    ("all that this processor has, two threads, busy", TWO, 3),
    ("SSE, compatible MKL, one thread", SSE | {"MKL_CBWR": "COMPATIBLE"} | ONE, 0),
    ("AVX2, two threads", AVX2 | {"MKL_CBWR": "AVX2"} | TWO, 0),
    ("AVX-512 without bf16, one thread", AVX512 | {"MKL_ENABLE_INSTRUCTIONS": "AVX512"} | ONE, 0),
)


def text_of_3_12(folder: str) -> dict[str, str]:
    """The environment with Python 3.12's `pydoc_data`; {} if there is no Python 3.12."""
    where = "import os, pydoc_data; print(os.path.dirname(pydoc_data.__file__))"
    try:
        found = subprocess.run(["python3.12", "-c", where], capture_output=True, text=True)
    except FileNotFoundError:
        return {}
    if found.returncode:
        return {}
    shutil.copytree(found.stdout.strip(), os.path.join(folder, "pydoc_data"))
    return {"PYTHONPATH": folder}


@contextmanager
def busy(processes: int):
    """Keep `processes` cores busy meanwhile."""
    command = [sys.executable, "-c", "while True: sum(range(10_000))"]
    others = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def passes(words: str, paths: list[str], environment: dict[str, str], others: int = 0) -> bool:
    """Run the notebooks in this environment; prints the result."""
    slow = ["--nbval-cell-timeout=1200", "-o", "timeout=1200"]  # old kernels, busy cores
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", *slow]
    begin = time.monotonic()
    with busy(others), tempfile.TemporaryDirectory() as compiled:  # not shared with other kernels
        done = subprocess.run(
            command + paths,
            cwd=ROOT,
            env=os.environ | environment | {"TORCHINDUCTOR_CACHE_DIR": compiled},
            capture_output=True,
            text=True,
        )
    count = (done.stdout.strip() or "no output").splitlines()[-1]
    print(f"{words}: {count} ({time.monotonic() - begin:.0f} s)", flush=True)
    if done.returncode:
        print(done.stdout[-20_000:] + done.stderr[-2_000:], flush=True)
    return done.returncode == 0


def main() -> None:
    paths = [name(path) for path in asked_for("Run notebooks on other kernels.", every_notebook())]
    good = [passes(words, paths, *setting) for words, *setting in SETTINGS]
    with tempfile.TemporaryDirectory() as folder:
        if text := text_of_3_12(folder):
            good.append(passes("the text of Python 3.12", paths, text))
        else:
            print("the text of Python 3.12: not tried, no python3.12 was found")
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
