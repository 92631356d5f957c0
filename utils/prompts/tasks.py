"""Small tasks about Python with one right answer each, to measure what a language model can do.

    task = TASKS["guard"]
    for question in task.examples(seed=0, count=2):                     # to learn from
        print(question.input + question.output, question.choices)
    test = task.examples(seed=0, count=100, held_out=True)              # to be measured with

Every question is made by rule from word lists in this file, so that it is the same on every machine
and every Python, and its answer is true by construction (tests/prompts/test_tasks.py runs the
lines). Whether a question is held out follows from its own text: no question is ever on both sides.
In "kind" a held-out question is about a name that no question to learn from asks about; in the
other tasks it is the same few patterns with other names in them, which is easier to learn. The text
is written as the standard library would write it, because that is all the base model has read.
"""

import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from utils.prompts.data import Example

HELD_OUT = 4  # one question in four is for measuring only
TRIES = 2_000  # draws that bring no new question until the rule is taken to be used up


@dataclass(frozen=True)
class Question(Example):
    """An example with the answers to choose from; none: any text is an answer."""

    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """A kind of question.

    name: its key in TASKS; question: what is asked, in one sentence
    draw: makes a Question from a random.Random
    between: what separates one example from the next in a few-shot prompt
    """

    name: str
    question: str
    draw: Callable[[random.Random], Question]
    between: str = "\n"

    def examples(self, seed: int, count: int, held_out: bool = False) -> list[Question]:
        """`count` different questions; the same for the same seed, and a longer list begins with
        the shorter. Raises ValueError when the rule does not make so many."""
        if count < 0:
            raise ValueError(f"count {count} is below 0")
        rng = random.Random(f"{self.name} {seed} {held_out}")
        found, unlucky = {}, 0
        while len(found) < count:
            question = self.draw(rng)
            fresh = is_held_out(question) == held_out and question.input not in found
            unlucky = 0 if fresh else unlucky + 1
            if fresh:
                found[question.input] = question
            if unlucky > TRIES:
                side = "held-out" if held_out else "training"
                raise ValueError(
                    f"task {self.name} has only about {len(found)} {side} questions: "
                    f"ask for fewer than {count}"
                )
        return list(found.values())

    @property
    def chance(self) -> float:
        """The accuracy of guessing: one in the number of choices, 0 where any text may be given."""
        choices = self.examples(seed=0, count=1)[0].choices
        return 1 / len(choices) if choices else 0.0


def is_held_out(example: Example) -> bool:
    """Whether this question is for measuring only; one in four is, by the CRC of its input."""
    return zlib.crc32(example.input.encode()) % HELD_OUT == 0


def task(name: str) -> Task:
    """TASKS[name]; ValueError naming the tasks when there is none of that name."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not one of {', '.join(TASKS)}")
    return TASKS[name]


# ---- 1. words


def words(text: str) -> tuple[str, ...]:
    """What stands between the spaces."""
    return tuple(text.split())


NOUNS = words("""
    name value key index line text path file data size count item node table list match width
    level state token field group block frame buffer stream socket thread queue event timer signal
    module method header label option user host port mode code type color cursor column row
    page entry record message error result reason limit offset number total start stop depth
    parent child owner target source prefix suffix pattern format version locale encoding digest
    cache handle reader writer parser server client request reply address domain charset body
""")


# ---- 2. one rule a task


GUARDS = {  # conditions, by what is wrong where they hold
    "TypeError": (
        "not isinstance({a}, str)",
        "isinstance({a}, (list, tuple))",
        "not callable({a})",
        "not hasattr({a}, '{b}')",
        "type({a}) is not int",
    ),
    "ValueError": (
        "{a} < 0",
        "{a} <= {b}",
        "len({a}) != 2",
        "not {a}",
        "{a} not in ('{b}', 'r')",
        "{a} > 65535",
    ),
}


def draw_guard(rng: random.Random) -> Question:
    kind, a, b = rng.choice(tuple(GUARDS)), *rng.sample(NOUNS, 2)
    test = rng.choice(GUARDS[kind]).format(a=a, b=b)
    return chosen(f"    if {test}:\n        raise", kind, GUARDS)


RAISES = {  # lines, by what one expects them to raise
    "KeyError": (
        "{a} = self.{b}s[{a}_{c}]",
        "del self._{b}s[{a}]",
        "return self._{b}_{c}[{a}]",
        "{a} = {b}_{c}.pop({a})",
    ),
    "ValueError": (
        "{a} = int({b})",
        "{a}, {b} = {c}.split('=', 1)",
        "self._{a}s.remove({b})",
        "{a} = float({b}_{c})",
    ),
    "ImportError": (
        "import _{a}{b}",
        "from _{a}{b} import {c}",
        "import {a}_{b}",
        "from {a}_{b} import {c}",
    ),
    "OSError": (
        "os.unlink({a}_{b})",
        "{a} = open({b}_{c}, 'rb')",
        "os.mkdir({a})",
        "{a} = os.stat({b}_{c})",
    ),
    "AttributeError": (
        "{a} = {b}.{c}_{a}",
        "return self._{a}_{b}",
        "{a} = {b}._{c}s",
        "{a} = getattr({b}, '{c}')",
    ),
}


def draw_except(rng: random.Random) -> Question:
    kind, a, b, c = rng.choice(tuple(RAISES)), *rng.sample(NOUNS, 3)
    line = rng.choice(RAISES[kind]).format(a=a, b=b, c=c)
    return chosen(f"        try:\n            {line}\n        except", kind, RAISES)


CLOSING = {"(": ")", "[": "]", "{": "}"}


def draw_brackets(rng: random.Random) -> Question:
    """A line with one to three brackets open, and perhaps some inside them closed again."""
    kind, opened = rng.choice(tuple(CLOSING)), ""
    while opened[-1:] != kind:  # so that the three answers come up alike
        text, opened = f"        self.{rng.choice(NOUNS)} = ", ""
        for _ in range(rng.choice((1, 2, 3))):
            opened += rng.choice(tuple(CLOSING))
            word = rng.choice(NOUNS)
            text += f"{{{word!r}: " if opened[-1] == "{" else word + opened[-1]
            if len(opened) > 1 and rng.random() < 0.4:
                text += f"{rng.choice(NOUNS)}{CLOSING[opened[-1]]} + "
                opened = opened[:-1]
    return Question(text + rng.choice(NOUNS), CLOSING[kind], choices=tuple(CLOSING.values()))


TYPES = ("int", "float", "str", "list", "tuple", "dict")


def draw_type(rng: random.Random) -> Question:
    kind = rng.choice(TYPES)
    return Question(f">>> type({literal(rng, kind)})\n<class '", kind, choices=TYPES)


def literal(rng: random.Random, kind: str) -> str:
    """A value of that type, as Python writes it."""
    if kind == "int":
        return str(rng.randrange(10_000))
    if kind == "float":
        return f"{rng.randrange(100)}.{rng.randrange(100)}"
    if kind == "str":
        return repr(" ".join(rng.sample(NOUNS, rng.choice((1, 2)))))
    names = [repr(noun) for noun in rng.sample(NOUNS, rng.choice((1, 2, 3)))]
    items = rng.choice((names, [str(rng.randrange(100)) for _ in names]))
    if kind == "list":
        return f"[{', '.join(items)}]"
    if kind == "tuple":
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    return "{" + ", ".join(f"{name}: {item}" for name, item in zip(names, items)) + "}"


KINDS = {
    "keyword": words(
        """
        False None True and as assert async await break class continue def del elif else except
        finally for from global if import in is lambda nonlocal not or pass raise return try while
        with yield
        """
    ),
    "function": words(
        """
        abs all any ascii bin callable chr compile delattr dir divmod enumerate eval exec filter
        format getattr globals hasattr hash help hex id input isinstance issubclass iter len
        locals map max min next oct open ord pow print range repr reversed round setattr sorted
        sum vars zip
        """
    ),
    "exception": words(
        """
        ArithmeticError AssertionError AttributeError BlockingIOError BrokenPipeError BufferError
        ChildProcessError ConnectionAbortedError ConnectionError ConnectionRefusedError
        ConnectionResetError EOFError FileExistsError FileNotFoundError FloatingPointError
        ImportError IndentationError IndexError InterruptedError IsADirectoryError KeyError
        LookupError MemoryError ModuleNotFoundError NameError NotADirectoryError
        NotImplementedError OSError OverflowError PermissionError ProcessLookupError
        RecursionError ReferenceError RuntimeError SyntaxError SystemError TabError TimeoutError
        TypeError UnboundLocalError UnicodeDecodeError UnicodeEncodeError UnicodeError ValueError
        ZeroDivisionError
        """
    ),
    "module": words(
        """
        abc argparse array ast asyncio atexit base64 bisect builtins bz2 calendar cmath codecs
        collections colorsys configparser contextlib copy csv ctypes curses dataclasses datetime
        decimal difflib dis doctest email enum errno fcntl filecmp fnmatch fractions ftplib
        functools gc getopt getpass gettext glob gzip hashlib heapq hmac html http imaplib
        importlib inspect io ipaddress itertools json keyword linecache locale logging lzma
        mailbox math mimetypes mmap multiprocessing netrc numbers operator optparse os pathlib pdb
        pickle pkgutil platform plistlib poplib pprint profile pstats pty pydoc queue quopri
        random re readline reprlib resource sched secrets select selectors shelve shlex shutil
        signal site smtplib socket sqlite3 ssl stat statistics string struct subprocess symtable
        sys tarfile tempfile termios textwrap threading time timeit token tokenize trace traceback
        tracemalloc tty turtle types typing unicodedata unittest urllib uuid venv warnings wave
        weakref webbrowser xml zipapp zipfile zipimport zlib
        """
    ),
}


def draw_kind(rng: random.Random) -> Question:
    kind = rng.choice(tuple(KINDS))
    return chosen(f"{rng.choice(KINDS[kind])} ->", kind, KINDS)


def draw_init(rng: random.Random) -> Question:
    names = rng.sample(NOUNS, rng.choice((2, 3, 4)))
    lines = "".join(f"        self.{name} = {name}\n" for name in names[:-1])
    return Question(
        f"    def __init__(self, {', '.join(names)}):\n{lines}        self.{names[-1]} =",
        f" {names[-1]}",
    )


def chosen(text: str, answer: str, names: Iterable[str]) -> Question:
    """A question whose answer is one of some names, behind a space."""
    return Question(text, f" {answer}", choices=tuple(f" {name}" for name in names))


_ALL = (
    Task("guard", "Which exception fits the condition?", draw_guard),
    Task("except", "Which exception does the line raise?", draw_except, "\n            pass\n"),
    Task("brackets", "Which bracket closes the innermost one?", draw_brackets),
    Task("type", "Of which type is the literal?", draw_type, "'>\n"),
    Task("kind", "What kind of name is it?", draw_kind),
    Task("init", "Which argument is kept here?", draw_init, "\n\n"),
)
TASKS = {task.name: task for task in _ALL}
