"""A frozen dataclass as a command line: every field is an option and has a flag of its name.

    @dataclass(frozen=True)
    class Config:
        steps: int = option(100, "how many steps")
        kind: str | None = option(None, "which kind", choices=("a", "b"))

    Config(**parse_flags(Config, ["--steps", "5"], prog="program"))

Whole numbers, numbers, texts and switches (--name, --no-name), each with a default or None.
"""

import argparse
import math
from dataclasses import field, fields

WORDS = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False"}


def option(default, help, choices=None, metavar=None):
    """A field of the dataclass, with what `--help` says of it."""
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


def flag(name):
    """The command-line flag of an option: held_out_every -> --held-out-every."""
    return "--" + name.replace("_", "-")


def check_types(config):
    """Raises ValueError naming the first option whose value is not of its type or its choices."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        kind, optional = _kind(entry)
        if value is None and optional:
            continue
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            raise ValueError(f"{flag(entry.name)} {value!r} is not {WORDS[kind]}")
        choices = entry.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{flag(entry.name)} {value!r} is not one of {', '.join(choices)}")


def parse_flags(config_class, arguments=None, prog="", **texts):
    """{option: value} of those that are given in `arguments` (default: those of this process).

    prog, description, epilog   as argparse takes them. Wrong flags end the process with status 2.
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
                type=kind,
                choices=entry.metadata["choices"],
                metavar=entry.metadata["metavar"] or _metavar(entry, kind),
            )
        parser.add_argument(flag(entry.name), **keywords)
    return vars(parser.parse_args(arguments))


class _Parser(argparse.ArgumentParser):
    def error(self, message):  # one sentence, without the long list of flags
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: {message}; see {self.prog} --help\n")


def _kind(entry):
    """(type, may it be None?) of a field, from its annotation."""
    members = getattr(entry.type, "__args__", (entry.type,))
    return members[0], len(members) > 1


def _metavar(entry, kind):
    return None if entry.metadata["choices"] else {int: "N", float: "X", str: "TEXT"}[kind]
