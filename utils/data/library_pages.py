"""A reference page of a module: the name, signature and docstring of all that is public in it.

    json.loads
    loads(s, *, cls=None, object_hook=None, parse_float=None, …)
        Deserialize ``s`` (a ``str``, ``bytes`` or ``bytearray`` instance …

`parsed_page` reads the source, without running it; `inspected_page` imports the module, for those
that are written in C. See https://docs.python.org/3/library/pydoc.html for the model of both.
"""

import ast
import importlib
import inspect
import textwrap

# ---- 1. from the source


def parsed_page(name, source):
    """The page of a module whose source is given; "" where it has nothing to say."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    entries = [*_parsed_entries(name, tree)]
    return _page(name, ast.get_docstring(tree), entries)


def _parsed_entries(prefix, node):
    """Yields (qualified name, signature, docstring or None) of a module's or a class's members."""
    seen = set()
    for member in node.body:
        if not isinstance(member, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not _is_public(member.name) or member.name in seen:
            continue
        seen.add(member.name)  # a property's setter, a second branch: the first one counts
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


# ---- 2. from the module itself


def inspected_page(name):
    """The page of a module that can only be imported; "" where there is no such module."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return ""
    return _page(name, inspect.getdoc(module), [*_inspected_entries(name, module)])


def _inspected_entries(prefix, owner):
    for short, member in sorted(vars(owner).items()):
        # written in C: a notebook and `site` add functions of their own to builtins
        if not (inspect.isclass(member) or inspect.isbuiltin(member) or _is_descriptor(member)):
            continue
        if not _is_public(short):
            continue
        if isinstance(owner, type) and short.startswith("__"):
            continue  # every type has them, with the same words
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


# ---- 3. both


def _is_public(name):
    return not name.startswith("_") or name in ("__init__", "__call__", "__enter__")


def _page(name, doc, entries):
    """The page as text; entries that say nothing but their name are left out."""
    parts = [f"module {name}\n\n{doc}\n"] if doc else [f"module {name}\n"]
    for qualified, signature, text in entries:
        body = textwrap.indent(text, "    ") + "\n" if text else ""
        parts.append(f"{qualified}\n{signature}\n{body}")
    return "\n".join(parts) if doc or entries else ""
