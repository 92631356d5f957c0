"""Resolve requirements.in into requirements.txt: `make lock` (`make lock UPGRADE=1` for newer).

There are two lists: the workshop's, and in docs/book/ that of the book and the slides.

One lock serves every supported machine. It is resolved for all platforms and then reduced to ours:
a line that applies nowhere is dropped, and so is a condition that holds everywhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from utils.paths import ROOT

# An Intel Mac gets no torch (it has no wheel), but the conditions include it.
PLATFORMS = [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64")]
PYTHONS = ["3.11.0", "3.11.9", "3.12.0", "3.12.9"]

# Torch's packages for CUDA. Torch's own metadata pins these exactly, and its CPU build has none.
# Triton is one of them, but lesson 12 needs the same version with the CPU build too.
CUDA_PACKAGE = re.compile(r"(nvidia-(?!pytriton)|cuda-)")

# Narrows uv's target environments; uv reads this only from a project's file.
SUPPORTED = """\
[tool.uv]
environments = ["python_version < '3.13' and sys_platform != 'win32'"]
"""

HEADER = """\
# Made by `make lock` from requirements.in; do not edit.
#
# For Python 3.11 and 3.12 on Linux (x86-64, aarch64) and macOS (arm64).
# Torch's CUDA packages are left out on purpose: torch's own metadata pins each of them exactly,
# so a machine with an NVIDIA GPU gets them with torch, and a CPU build of torch needs none. Triton
# alone is here, in the version that torch pins: its compiler and interpreter need no GPU.
"""

BOOK_HEADER = "# Made by `make lock` from requirements.in, for Python 3.11 and 3.12; do not edit.\n"


def environments() -> Iterator[dict[str, str]]:
    """Every supported machine, as the variables of an environment marker (PEP 508)."""
    for system, machine in PLATFORMS:
        for python in PYTHONS:
            yield {
                "sys_platform": system,
                "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
                "platform_machine": machine,
                "os_name": "posix",
                "python_version": python.rpartition(".")[0],
                "python_full_version": python,
                "implementation_name": "cpython",
                "platform_python_implementation": "CPython",
            }


def applies(requirement: Requirement, environment: dict) -> bool:
    """Whether this line applies to that machine."""
    return requirement.marker is None or requirement.marker.evaluate(environment)


def where(requirement: Requirement) -> list[bool]:
    """Whether this line applies to each of `environments()`."""
    return [applies(requirement, environment) for environment in environments()]


def shortest(requirement: Requirement) -> Requirement:
    """The requirement without conditions that make no difference on our machines."""
    clauses = str(requirement.marker).split(" and ") if requirement.marker else []
    name = str(requirement).split(";")[0].strip()
    if any(" or " in clause for clause in clauses):
        return Requirement(name) if all(where(requirement)) else requirement
    for clause in list(clauses):
        rest = [other for other in clauses if other != clause]
        shorter = Requirement(f"{name} ; {' and '.join(rest)}" if rest else name)
        if where(shorter) == where(requirement):
            clauses, requirement = rest, shorter
    return requirement


def reduce_to_supported(lines: list[str]) -> list[str]:
    """Drop CUDA packages, lines that apply to no supported machine, and needless conditions."""
    requirements = [Requirement(line) for line in lines]
    kept = [r for r in requirements if any(where(r)) and not CUDA_PACKAGE.match(r.name)]
    return [str(shortest(requirement)).replace("; ", " ; ") for requirement in kept]


def resolve(source: Path, previous: Path, upgrade: bool) -> list[str]:
    """The pins of all platforms, one per line; those of `previous` are kept unless `upgrade`."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "requirements.txt"
        if previous.exists():
            shutil.copy(previous, target)
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal"]
        command += ["--python-version", "3.11", "--no-header", "--no-annotate"]
        (Path(folder) / "pyproject.toml").write_text(SUPPORTED)
        command += ["--upgrade"] if upgrade else []
        command += [str(source), "-o", str(target)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"No lock was found; requirements.txt is unchanged:\n{done.stderr}")
        return target.read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description="Resolve requirements.in into requirements.txt.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args()
    for folder, header in ((ROOT, HEADER), (ROOT / "docs" / "book", BOOK_HEADER)):
        target = folder / "requirements.txt"
        lines = reduce_to_supported(resolve(folder / "requirements.in", target, options.upgrade))
        beside = target.with_suffix(".txt.tmp")
        beside.write_text(header + "\n" + "\n".join(lines) + "\n")
        beside.replace(target)
        print(f"{target.relative_to(ROOT)}: {len(lines)} pins.")


if __name__ == "__main__":
    main()
