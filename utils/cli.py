"""A frozen dataclass as a command line: every field is an option with a flag of the same name.

    @dataclass(frozen=True)
    class Config:
        steps: int = option(100, "how many steps", least=1)
        kind: str | None = option(None, "which kind", choices=("a", "b"))

        def __post_init__(self):
            check_options(self)

    Config(**parse_flags(Config, ["--steps", "5"], prog="program"))

Options are integers, numbers, texts and switches (--name, --no-name), each with a default or None.
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import Any

PATHS = ("PATH", "FOLDER", "FILE")  # the metavar of an option that names a place
WORDS = {int: "an integer", float: "a finite number", str: "text", bool: "True or False"}
OUT_OF_MEMORY = re.compile(r"[Tt]ried to allocate ([\d.]+ \w+)")  # torch's words, CPU and CUDA


def option(
    default: Any,
    help: str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of the dataclass, with its text for `--help`.

    choices        the allowed texts
    least, most    the smallest and the largest allowed number
    above          the number that it must exceed
    """
    facts = {"help": help, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=facts | {"least": least, "above": above, "most": most})


def flag(name: str) -> str:
    """The command-line flag of an option: held_out_every -> --held-out-every."""
    return "--" + name.replace("_", "-")


def check_options(config: Any) -> None:
    """Raise ValueError for the first option whose value has the wrong type, is not one of its
    choices, or is outside its range."""
    for check in (_check_type, _check_range):  # wrong types are reported before any range
        for entry in fields(config):
            value = getattr(config, entry.name)
            if value is not None or not _kind(entry)[1]:
                check(entry, value)


def _check_type(entry: Field, value: Any) -> None:
    kind, _ = _kind(entry)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{flag(entry.name)} {value!r} is not {WORDS[kind]}")
    choices = entry.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{flag(entry.name)} {value!r} is not one of {', '.join(choices)}")


def _check_range(entry: Field, value: Any) -> None:
    least, above, most = (entry.metadata[name] for name in ("least", "above", "most"))
    if least is not None and value < least:
        raise ValueError(f"{flag(entry.name)} {value} is too small: it takes {least} or more")
    if most is not None and value > most:
        raise ValueError(f"{flag(entry.name)} {value} is too large: it takes {most} or less")
    if above is not None and value <= above:
        raise ValueError(f"{flag(entry.name)} {value} must be above {above}")


def parse_flags(
    config_class: type, arguments: Sequence[str] | None = None, prog: str = "", **texts: str
) -> dict[str, Any]:
    """{option: value} for the flags in `arguments` (default: those of this process).

    prog, description, epilog   as in argparse. Invalid flags end the process with status 2.
    """
    parser = _Parser(prog=prog, allow_abbrev=False, **texts)
    for entry in fields(config_class):
        kind, optional = _kind(entry)
        shown = "" if optional or kind is bool else f" (default: {entry.default})"
        keywords = {"help": entry.metadata["help"] + shown, "default": argparse.SUPPRESS}
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords.update(
                type=path if entry.metadata["metavar"] in PATHS else kind,
                choices=entry.metadata["choices"],
                metavar=entry.metadata["metavar"] or _metavar(entry, kind),
            )
        parser.add_argument(flag(entry.name), **keywords)
    arguments = sys.argv[1:] if arguments is None else arguments
    for argument in arguments:
        if argument.startswith("--") and argument.endswith("=--"):  # argparse drops this value
            parser.error(f"{argument} gives no value")
    return vars(parser.parse_args(arguments))


def exit_status(
    program: str,
    run: Callable[[], None],
    errors: tuple[type[Exception], ...] = (ValueError,),
    stopped: str | None = None,
) -> int:
    """Run a command; print an error as one sentence on stderr.

    errors    exceptions whose message is such a sentence; others are not caught, except for torch's
              out-of-memory errors on the CPU or a GPU
    stopped   what to print on Ctrl-C; None: it is not caught
    Returns 0; 2 after an error, 130 after Ctrl-C, as shells do.
    """
    try:
        run()
    except errors as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:  # numpy's
        print(f"{program}: {error}: choose smaller sizes", file=sys.stderr)
        return 2
    except RuntimeError as error:
        wanted = OUT_OF_MEMORY.search(str(error))
        if not wanted:
            raise
        print(f"{program}: no memory for {wanted[1]}: choose smaller sizes", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if stopped is None:
            raise
        print(f"\n{program}: {stopped}", file=sys.stderr)
        return 130
    return 0


def no_arguments(program: str, does: str) -> None:
    """Exit with status 2 if a command that takes no arguments is given any."""
    _Parser(prog=f"python -m {program}", description=does).parse_args()


def port(text: str) -> int:
    """An option's text as a port number; 0 means a free port."""
    if not 0 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give one up to 65535, or 0")
    return int(text)


def path(text: str) -> str:
    """The text, if it is a usable path: no name too long, no unknown ~user, no link loop."""
    try:
        Path(text).expanduser().resolve().exists()
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{text:.40}: {reason}") from None
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message):  # one sentence, without the long list of flags
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: {message}; see {self.prog} --help\n")


def _kind(entry):
    """(type, whether it may be None) of a field, from its annotation."""
    members = getattr(entry.type, "__args__", (entry.type,))
    return members[0], len(members) > 1


def _metavar(entry, kind):
    return None if entry.metadata["choices"] else {int: "N", float: "X", str: "TEXT"}[kind]
