"""The standard library as documents: the training text of the workshop's own base model.

Every CPython carries about 10 MB of English and Python, so nothing is downloaded:

    the source of its modules;
    a reference page per module, made from its source: names, signatures and docstrings;
    reference pages of some modules that are written in C (`builtins`, `math`, …);
    the topics of the language reference (`pydoc_data.topics`).

The documents of one module stay together, so that a held-out module is held out entirely. Modules
that distributions leave out or move to other packages (test suites, tkinter, idlelib, …) are not
read, nor are generated tables. The text differs slightly between releases of Python.

    documents()       [(name of the module, text), …]
    split()           (train, held out): two texts, their documents joined with "<|end|>"
    fingerprint()     sha256, documents, bytes, Python's version

A module's reference page has the name, signature and docstring of all its public members:

    json.loads
    loads(s, *, cls=None, object_hook=None, parse_float=None, …)
        Deserialize ``s`` (a ``str``, ``bytes`` or ``bytearray`` instance …

`parsed_page` reads the source without running it; `inspected_page` imports the module, for modules
that are written in C. Both are modelled on https://docs.python.org/3/library/pydoc.html.
"""

import ast
import gc
import hashlib
import importlib
import inspect
import platform
import re
import sysconfig
import textwrap
import tokenize
from functools import cache
from pathlib import Path

END = "<|end|>"  # separates two documents
HELD_OUT = 0.05  # the last 5 % of the text, in whole modules, is never trained on

LEFT_OUT = re.compile(  # folders that distributions drop or split off, and installed packages
    r"(test|tests|idlelib|idle_test|tkinter|turtledemo|lib2to3|ensurepip|distutils|venv|msilib"
    r"|macholib|pydoc_data|__pycache__|site-packages|dist-packages|lib-dynload|config-.*)"
)
TABLES = re.compile(
    r"_sysconfigdata.*|entities|stringprep|__phello__|__hello__|sitecustomize|_distutils_.*"
)
CHARACTER_TABLE = re.compile(r"^decoding_(table|map) *=|getcodec\(", re.MULTILINE)
WRITTEN_IN_C = (  # modules that are the same on every platform
    "_collections", "_functools", "_operator", "_random", "_struct", "array", "atexit", "binascii",
    "builtins", "cmath", "gc", "itertools", "marshal", "math", "unicodedata", "zlib",
)


# ---- 1. the documents


@cache
def documents() -> tuple[tuple[str, str], ...]:
    """((name, text), …): all documents, with those of a module in sequence.

    Modules are ordered by the sha256 of their name, which is the same everywhere and shuffles them
    well. Repeated texts are left out.
    """
    modules = {"pydoc_data.topics": _topics()}
    modules.update((name, [inspected_page(name)]) for name in WRITTEN_IN_C)
    collecting = gc.isenabled()
    gc.disable()  # it would scan the syntax trees repeatedly: half of the time
    try:
        for name, source in _sources():
            modules[name] = [parsed_page(name, source), source]
    finally:
        if collecting:
            gc.enable()
    found, seen = [], set()
    for name in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        for text in modules[name]:
            text = text.strip() + "\n"
            digest = hashlib.sha256(text.encode()).digest()
            if len(text) > 1 and digest not in seen:
                seen.add(digest)
                found.append((name, text))
    return tuple(found)


@cache
def split() -> tuple[str, str]:
    """(train, held_out): the text before and after the first module that begins in the last 5 %."""
    pages = documents()
    sizes = [len((END + text).encode()) for _, text in pages]
    least, so_far = (1 - HELD_OUT) * sum(sizes), 0
    for number, (name, _) in enumerate(pages):
        if so_far >= least and name != pages[number - 1][0]:
            break
        so_far += sizes[number]
    train, held_out = pages[:number], pages[number:]
    return _joined(train) + END, _joined(held_out)


def held_out_modules() -> list[str]:
    """The names of the modules that are never trained on, in order."""
    held_out = split()[1].split(END)
    pages = documents()
    return list(dict.fromkeys(name for name, _ in pages[len(pages) - len(held_out) :]))


def fingerprint() -> dict[str, str | int]:
    """{"sha256", "documents", "bytes", "python"} of the whole text, equal only for equal texts."""
    data = "".join(split()).encode()
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "documents": len(documents()),
        "bytes": len(data),
        "python": platform.python_version(),
    }


def _joined(pages):
    return END.join(text for _, text in pages)


def _topics():
    """The topics of the language reference, without those contained in another."""
    from pydoc_data import topics

    kept = []
    for name in sorted(topics.topics, key=lambda name: (-len(topics.topics[name]), name)):
        text = topics.topics[name].strip()
        if not any(text in other for other in kept):
            kept.append(text)
    return kept


def _sources():
    """Yield (dotted name, source) of every module that is read, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if any(LEFT_OUT.fullmatch(part) for part in parts[:-1]) or TABLES.fullmatch(parts[-1]):
            continue
        try:
            with tokenize.open(file) as opened:  # in the encoding that the file declares
                source = opened.read()
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        if parts[0] == "encodings" and CHARACTER_TABLE.search(source):
            continue
        if END in source:
            continue
        yield ".".join(part for part in parts if part != "__init__"), source


# ---- 2. a module's page, from its source


def parsed_page(name: str, source: str) -> str:
    """The page of a module whose source is given; "" if it has no content."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    entries = [*_parsed_entries(name, tree)]
    return _page(name, ast.get_docstring(tree), entries)


def _parsed_entries(prefix, node):
    """Yield (qualified name, signature, docstring or None) of a module's or a class's members."""
    seen = set()
    for member in node.body:
        if not isinstance(member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not _is_public(member.name) or member.name in seen:
            continue
        seen.add(member.name)  # a property's setter, a second branch: only the first counts
        name = f"{prefix}.{member.name}"
        if isinstance(member, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in member.bases)
            signature = f"class {member.name}({bases})" if bases else f"class {member.name}"
        else:
            word = "async " if isinstance(member, ast.AsyncFunctionDef) else ""
            returns = f" -> {ast.unparse(member.returns)}" if member.returns else ""
            signature = f"{word}{member.name}({ast.unparse(member.args)}){returns}"
        yield name, signature, ast.get_docstring(member)
        if isinstance(member, ast.ClassDef):
            yield from _parsed_entries(name, member)


# ---- 3. a module's page, from the module itself


def inspected_page(name: str) -> str:
    """The page of a module that can only be imported; "" if there is no such module."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return ""
    return _page(name, inspect.getdoc(module), [*_inspected_entries(name, module)])


def _inspected_entries(prefix, owner):
    for short, member in sorted(vars(owner).items()):
        # only those in C: a notebook and `site` add their own functions to builtins
        if not (inspect.isclass(member) or inspect.isbuiltin(member) or _is_descriptor(member)):
            continue
        if not _is_public(short):
            continue
        if isinstance(owner, type) and short.startswith("__"):
            continue  # every type has them, with the same text
        name, doc = f"{prefix}.{short}", inspect.getdoc(member)
        if inspect.isclass(member):
            if member.__module__ != getattr(owner, "__name__", None):
                continue
            signature = f"class {short}({', '.join(base.__name__ for base in member.__bases__)})"
            yield name, signature, member.__doc__ and inspect.cleandoc(member.__doc__)
            yield from _inspected_entries(name, member)
        else:
            yield name, short + _signature(member), doc


def _is_descriptor(member):
    return inspect.ismethoddescriptor(member) and not inspect.isclass(member)


def _signature(member):
    try:
        text = str(inspect.signature(member))
    except (ValueError, TypeError):
        return "(...)"
    return "(...)" if " at 0x" in text else text


# ---- 4. both


def _is_public(name):
    return not name.startswith("_") or name in ("__init__", "__call__", "__enter__")


def _page(name, doc, entries):
    """The page as text; "" without docstring and entries."""
    parts = [f"module {name}\n\n{doc}\n"] if doc else [f"module {name}\n"]
    for qualified, signature, text in entries:
        body = textwrap.indent(text, "    ") + "\n" if text else ""
        parts.append(f"{qualified}\n{signature}\n{body}")
    return "\n".join(parts) if doc or entries else ""
