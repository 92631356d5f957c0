"""Can this machine run the workshop? `make check`: five answers, in at most two minutes.

It checks the environment, then runs a few tests of the suite in turn. A success is one line; a
failure says what to do and shows the end of pytest's output.
"""

import re
import subprocess
import sys
import time

from utils.measure.environment import check_environment
from utils.paths import ROOT

# (what is tested, the tests, what to do when one fails)
STEPS = (
    (
        "two ranks start, talk to each other and end",
        "tests/ranks/test_pool.py::test_run_gives_every_ranks_result[2]",
        "a firewall or VPN on the loopback interface, or a limit of processes (ulimit -u), stops "
        "them: docs/cluster.md",
    ),
    (
        "three ranks learn what one rank learns",
        "tests/training/test_train.py::test_ranks_learn_what_one_rank_learns",
        "run `make setup`, which installs the versions that the workshop was tested with",
    ),
    (
        "a notebook runs and prints what is stored in it",
        "labs/02_gradient_accumulation/solution/lab.ipynb",
        "run `make setup` and do not change the files in solution/ (`git status` shows changes)",
    ),
    (
        "a real Triton server answers with the tokens of the model",
        "tests/serving/server/test_models.py::test_from_checkpoint_to_served_tokens_on_two_ranks",
        "only lesson and lab 17 need it: docs/serving.md says what the server wants",
    ),
)
SECONDS = 300  # per step: beyond them the machine is too slow, or something hangs


def run(tests: str) -> tuple[str, str]:
    """Run tests in their own pytest: ("ok", ""), ("note", why skipped) or ("fix", output)."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", tests]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "fix", f"not done after {SECONDS} s"
    if done.returncode:
        return "fix", (done.stdout + done.stderr).strip()
    skipped = re.search(r"^SKIPPED \[\d+\] \S+ (.*)", done.stdout, re.MULTILINE)
    return ("note", f"not tried here: {skipped[1]}") if skipped else ("ok", "")


def main() -> int:
    begin = time.monotonic()
    print("This machine and its packages:", flush=True)
    wrong = 0 if check_environment() else 1
    print("\nThe workshop on it:", flush=True)
    for words, tests, fix in STEPS:
        state, found = run(tests)
        mark = f"[{state}]".ljust(6)
        if state == "fix":
            wrong += 1
            print(f"{mark} NOT: {words} → {fix}")
            print("\n".join("       " + line for line in found.splitlines()[-15:]))
            print(f"       all of it: .venv/bin/python -m pytest {tests}")
        else:
            print(f"{mark} {words}{' – ' if found else ''}{found}", flush=True)
    seconds = f"{time.monotonic() - begin:.0f} s"
    if wrong:
        print(f"\n{wrong} of {1 + len(STEPS)} failed ({seconds}): fix what is marked [fix].")
    else:
        print(f"\nThis machine can run the workshop ({seconds}). Next: `make lab`.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
