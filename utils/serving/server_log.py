"""What a server's log says about a failure: the model's own reason, out of much else.

reasons(text)        # ["gpt_engine version 1: LoadError: rank-0-of-2.safetensors is cut short"]
tail(path, 20)       # the last lines
"""

import re
from pathlib import Path

END = 200_000  # bytes from the end of a log that are read

PATTERNS = [
    re.compile(r"failed to load '(?P<name>[^']+ version \d+)': (?P<why>.*)", re.DOTALL),
    re.compile(r"failed to load model '(?P<name>[^']+)': (?P<why>.*)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<name>[^']+)': (?P<why>.*)", re.DOTALL),
    re.compile(r"failed to start (?P<name>\w+) service: (?P<why>.*)", re.DOTALL),
]
VERSION = re.compile(r"' version (\d+): ")  # Triton quotes the name alone
CONFIG = re.compile(r"Error parsing text-format inference.ModelConfig: (?P<why>.*)")
BEGIN = re.compile(r'^[IWEF]\d{4} \S+ +\d+ \S+\] "?')  # E1122 07:45:40.050702 22841 file.cc:12] "
STATUS = re.compile(r"^(Internal|Invalid argument|Unavailable|Not found|Unsupported)(: | - )")
STATE = re.compile(r"version (\d+) is at UNAVAILABLE state: (.*?);\s*(?=version|$)", re.DOTALL)
TABLE = ("+-", "| ")  # how lines of Triton's tables begin


def end_of(path) -> str:
    """The end of the log as text; "" when there is none yet."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - END))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def tail(path, lines: int = 20) -> str:
    """The last lines of the log, without its tables of options."""
    all_lines = end_of(path).splitlines()
    kept = [line for line in all_lines if BEGIN.sub("", line) and not line.startswith(TABLE)]
    return "\n".join(kept[-lines:])


def reasons(text: str) -> list[str]:
    """Why models could not be loaded or a port not be opened, each reason once, in order."""
    found, details = [], ""
    for line in text.splitlines():
        if match := CONFIG.search(line):
            details = f": {match['why']}"  # the parser's words come before the server's
        message = VERSION.sub(r" version \1': ", BEGIN.sub("", line))
        for pattern in PATTERNS:
            if match := pattern.search(message):
                found.append(f"{match['name']}: {own_words(match['why'])}{details}")
                details = ""
                break
    return list(dict.fromkeys(found))


def load_reason(model: str, text: str) -> str:
    """The same from the answer to a request to load a model."""
    found = [f"{model} version {match[1]}: {own_words(match[2])}" for match in STATE.finditer(text)]
    return "\n".join(found) or text


def own_words(text: str) -> str:
    """A reason without Triton's status, the traceback and the quotes around it."""
    text = text.replace("\\n", "\n").partition("\n\nAt:")[0]
    return STATUS.sub("", text.strip().strip('"').strip())


def port_was_taken(text: str) -> bool:
    """Whether another program had one of the server's ports."""
    return "already in use" in text
