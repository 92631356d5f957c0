"""The repository's structure: rooms import only from rooms below them, and no file exists twice."""

import ast
import hashlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from utils.paths import ROOT

ROOMS = sorted(path.parent for path in ROOT.glob("utils/*/__init__.py"))


def tracked() -> list[Path]:
    """The tracked files that exist, without links."""
    names = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True).stdout
    if not names:
        pytest.skip("not a git repository")
    paths = [ROOT / name for name in names.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_no_arrow_leads_up_and_none_in_a_circle():
    """The layers are in pyproject.toml; `make lint` runs the same."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", ROOMS, ids=[room.name for room in ROOMS])
def test_a_room_says_what_it_is_for(room):
    assert (room / "__init__.py").read_text().startswith('"""')


def untyped(body: list[ast.stmt], inside: str = "") -> Iterator[str]:
    """Public functions, methods and constructors that lack a type."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from untyped(node.body, f"{inside}{node.name}.")
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if node.name.startswith("_") and node.name not in ("__init__", "__call__"):
            continue
        if "triton.jit" in map(ast.unparse, node.decorator_list):
            continue  # Triton's compiler takes the types of arguments from each launch
        given = node.args
        first = "self", "cls", "ctx"
        names = [one for one in (*given.posonlyargs, *given.args) if one.arg not in first]
        names += [*given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        if not node.returns and node.name != "__init__":
            yield f"{inside}{node.name} -> ?"
        yield from (f"{inside}{node.name}({one.arg}: ?)" for one in names if not one.annotation)


def test_a_public_signature_carries_its_types():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.glob("utils/**/*.py"))
        for name in untyped(ast.parse(path.read_text()).body)
    ]
    assert not found, "\n".join(found)


def test_no_file_stands_twice():
    found = defaultdict(list)
    for path in tracked():
        content = path.read_bytes()
        if content.count(b"\n") > 10:
            found[hashlib.sha256(content).digest()].append(str(path.relative_to(ROOT)))
    twice = [names for names in found.values() if len(names) > 1]
    assert not twice, f"each of these is one file: {twice}"
