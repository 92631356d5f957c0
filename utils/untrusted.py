"""Files from untrusted sources: reading them ends, and their content has the expected form.

    header = read_json(path, {"weight_map": {str: str}})    # a dict, or ValueError with the reason
    file = inside(folder, name)                             # a name read from such a file
"""

import json
from pathlib import Path
from typing import Any

LARGEST = 2**27  # bytes of a JSON file: the tokenizers of the largest vocabularies have 40 MB
DEEPEST = 32


def regular(path: Path | str) -> Path:
    """The path. Raises ValueError if it exists but is not a file: reading a FIFO may not end."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    return path


def inside(folder: Path, name: str) -> Path:
    """The file of that name directly in the folder."""
    if Path(name).name != name:
        raise ValueError(f"{name!r:.60} is not a file name")
    return regular(folder / name)


def read_text(path: Path | str, most: int = LARGEST) -> str:
    """A file's text. Raises ValueError if it is too large or not a file; OSError as `open` does."""
    size = regular(path).stat().st_size
    if size > most:
        raise ValueError(f"it has {size:,} bytes, but at most {most:,} are read")
    with open(path, "rb") as file:
        return file.read(size).decode()  # no more: files of /proc may be longer


def read_json(path: Path | str, form: Any = dict) -> Any:
    """The JSON value in a file; see `parse_json`."""
    return parse_json(read_text(path), form)


def parse_json(text: str, form: Any = dict) -> Any:
    """The value of a JSON text of this `form`; ValueError with the reason for any other."""
    try:
        value = json.loads(text)
        _check_depth(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check(value, form)
    return value


def _check_depth(value, left=DEEPEST):
    if not left:
        raise RecursionError
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        if isinstance(each, (dict, list)):
            _check_depth(each, left - 1)


def check(value: Any, form: Any, where: str = "it") -> None:
    """Raise ValueError, naming the first part of a JSON value that has another form.

    form   a type, or a tuple of types; [form of each entry]; {key: form} for keys that are present,
           where {str: form} is for all others
    """
    kinds = type(form) if isinstance(form, (list, dict)) else form
    fits = type(value) in (kinds if isinstance(kinds, tuple) else (kinds,))
    if not fits or (type(value) is int and value.bit_length() > 63):
        raise ValueError(f"{where} {value!r:.40} is not of the expected type")
    if isinstance(form, list):
        for each in value:
            check(each, form[0], where)
    elif isinstance(form, dict):
        for key, each in value.items():
            if key in form or str in form:
                check(each, form.get(key, form.get(str)), f"{key:.60}")
