"""A library that an exercise forbids, trapped where it is used: on the rank, at run time.

`expect.by_hand` reads the file. A name that is put together only when the file runs
(`importlib.import_module(".".join(…))`) shows here: a line of the answer that gets at a trapped
module raises `Wrong`; torch's own files and the judge's get it as ever.
"""

import importlib.abc
import inspect
import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from utils.course.expect import Wrong

LIBRARY = os.path.dirname(os.__file__) + os.sep  # Python's own; it may hold others' packages


def trap(names: Iterable[str], folder: Path) -> None:
    """From now on the files in `folder` cannot use these modules, nor modules inside of them.

    names: full names of modules, imported already or not. Once in a process: a second call does
    nothing.
    """
    if not names or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    finder = _Finder(tuple(names), folder)
    sys.meta_path.insert(0, finder)
    for name, module in list(sys.modules.items()):
        if finder.forbids(name):
            trapped = _Trapped(module, folder)
            sys.modules[name] = trapped
            parent, _, last = name.rpartition(".")
            if getattr(sys.modules.get(parent), last, None) is module:
                setattr(sys.modules[parent], last, trapped)


class _Trapped(types.ModuleType):
    """Stands for a module."""

    def __init__(self, module: types.ModuleType, folder: Path):
        super().__init__(module.__name__)
        object.__setattr__(self, "behind", (module, folder))

    def __getattribute__(self, name):
        module, folder = object.__getattribute__(self, "behind")
        if name == "__dict__" or not name.startswith("__"):  # `import` asks for the latter itself
            _expect_other(inspect.currentframe().f_back, folder, module.__name__)
        return getattr(module, name)

    def __setattr__(self, name, value):
        setattr(object.__getattribute__(self, "behind")[0], name, value)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds no module: it looks at who imports one for the first time."""

    def __init__(self, names: tuple[str, ...], folder: Path):
        self._names, self._folder = names, folder

    def forbids(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{forbidden}.") for forbidden in self._names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if self.forbids(fullname):
            _expect_other(inspect.currentframe().f_back, self._folder, fullname)


def _expect_other(frame: types.FrameType | None, folder: Path, name: str) -> None:
    """Raises Wrong if `frame` runs a file in `folder`, or what such a file executes or has Python's
    own library do (`importlib`, `pkgutil`, `pydoc`, `runpy` …)."""
    while frame and _is_pythons(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None and Path(frame.f_code.co_filename).parent == folder:
        raise Wrong(
            f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno} uses {name}: that is the "
            "library, and this exercise is to be done by hand."
        )


def _is_pythons(file: str) -> bool:
    """Whether it is no file ("<string>", a made-up name), or one of the standard library."""
    return not os.path.isabs(file) or (file.startswith(LIBRARY) and "-packages" not in file)
