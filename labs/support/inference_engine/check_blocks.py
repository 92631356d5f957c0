"""Given: the contract of exercise 16c, a block allocator, and the judge behind its check cell.

The answer's Blocks and a reference get the same drawn calls: those of requests that arrive, find
shared prefixes, fork, write, grow and end.
"""

from contextlib import suppress
from copy import deepcopy
from itertools import permutations, product, takewhile
from typing import Any

from hypothesis import strategies as st

from utils.course.assertions import Wrong, described
from utils.course.properties import for_all
from utils.course.runner import Trial

SECONDS = 10.0  # until an answer counts as an endless loop


class Full(RuntimeError):
    """The reference's NoBlocks."""


class RightBlocks:
    """The reference for Blocks, which looks at every block in each call."""

    def __init__(self, size: int):
        self.readers, self.keys = [0] * size, [None] * size
        self.turns, self.turn = list(range(size)), size  # when each was released

    def free(self) -> list[int]:
        free = [block for block, readers in enumerate(self.readers) if not readers]
        return sorted(free, key=self.turns.__getitem__)

    def take(self, count: int) -> list[int]:
        taken = self.free()[:count]
        if len(taken) < count:
            raise Full
        for block in taken:
            self.readers[block], self.keys[block] = 1, None
        return taken

    def find(self, keys: list[str]) -> list[int]:
        return self.fork(list(map(self.keys.index, takewhile(self.keys.__contains__, keys))))

    def keep(self, block: int, key: str) -> None:
        if key not in self.keys:
            self.keys[block] = key

    def fork(self, table: list[int]) -> list[int]:
        for block in table:
            self.readers[block] += 1
        return list(table)

    def write(self, block: int) -> int:
        if self.readers[block] == 1:
            return block
        (copy,) = self.take(1)
        self.readers[block] -= 1
        return copy

    def release(self, table: list[int]) -> None:
        for block in reversed(table):
            self.readers[block] -= 1
            self.turns[block], self.turn = self.turn, self.turn + 1


OF_BLOCKS = {
    "take": "The free block that was released longest ago comes first; of a table, the last block "
    "is released first.\nA block with readers is not free.",
    "find": "It returns the longest prefix of the keys that is in the cache: a block is found by "
    "its key, free or not,\nuntil it is taken again; of two blocks with the same content, the "
    "first.",
    "fork": "It returns the same blocks in a new list, each with one more reader.",
    "write": "The only reader writes to the block itself; if others read it, they keep it, and a "
    "free block replaces it.",
    "release": "Each block of the table has one reader fewer. A block with readers is not free.",
    "keep": "It changes no readers.",
}


class Cache:
    """Requests that arrive, fork, write and end in the answer's Blocks and in the reference."""

    def __init__(self, answer, size: int):
        self.answer, self.told = answer, [f"Blocks({size})"]
        self.mine, self.right = answer.Blocks(size), RightBlocks(size)
        self.requests: list[tuple[str, list[int]]] = []  # text (a letter per full block), table

    def call(self, name: str, *given: Any) -> Any:
        """Call both. Returns the right result, or raises Full; raises Wrong if the answer
        differs."""
        self.told.append(f"{name}({', '.join(map(repr, given))})")
        before, free = list(self.right.readers), self.right.free()
        mine, error = deepcopy(given), None
        try:
            right = getattr(self.right, name)(*given)
        except Full as full:
            right, error = None, full
        try:
            got = getattr(self.mine, name)(*mine)
        except self.answer.NoBlocks:
            self.expect((not error, f"NoBlocks, but {len(free)} are free."))
            got = None
        else:
            self.expect((error, f"{described(got)}, and NoBlocks is right: {len(free)} are free.\n"
                         f"{OF_BLOCKS[name]}"))
        taken = got if name == "take" and isinstance(got, list) else []
        read = [block for block in taken if block not in free]
        after = list(self.mine.readers)
        self.expect(
            (mine != given, "it changes the list that it is given, which is the caller's."),
            (read, f"{got} are taken, but a request reads block {read[:1]}: it is not free."),
            (right is not None and got != right, f"{described(got)}, and {right} is right.\n"
             f"{OF_BLOCKS[name]}"),
            (error and after != before, f"NoBlocks, but readers, {before} before, is {after}: "
             "nothing should be taken."),
            (after != self.right.readers, f"readers is then {after}, and {self.right.readers} is "
             f"right.\n{OF_BLOCKS[name]}"),
        )
        if isinstance(got, list):
            got.clear()  # it is the caller's
        self.expect((mine != given, "the list that was given is returned: return a new one."))
        if error:
            raise error
        return right

    def expect(self, *wrong: tuple[Any, str]) -> None:
        """Raise Wrong with the words of the first pair whose condition is true."""
        for what, words in wrong:
            if what:
                raise Wrong(f"{', '.join(self.told)}: {words}")

    def play(self, calls: list[tuple[str, Any]]) -> None:
        for name, what in calls:
            with suppress(Full):
                if name in ("come", "look"):
                    getattr(self, name)(what)
                elif self.requests:
                    getattr(self, name)(what % len(self.requests))
        while self.requests:
            self.go(0)
        self.call("take", len(self.right.readers))

    def rest(self, number: int) -> None:
        """Do nothing."""

    def look(self, keys: list[str]) -> None:
        """A request that ends at once."""
        self.call("release", self.call("find", keys))

    def come(self, text: str) -> None:
        """A new request: full blocks, some of which may be cached, and one that is not full."""
        keys = [text[:end] for end in range(1, len(text) + 1)]
        table = self.call("find", keys)
        try:
            table = table + self.call("take", len(keys) - len(table) + 1)
        except Full:
            self.call("release", table)
            raise
        for block, key in zip(table, keys):
            if self.right.keys[block] is None:
                self.call("keep", block, key)
        self.requests.append((text, table))

    def fork(self, number: int) -> None:
        text, table = self.requests[number]
        self.requests.append((text, self.call("fork", table)))

    def write(self, number: int) -> None:
        _, table = self.requests[number]
        table[-1] = self.call("write", table[-1])

    def grow(self, number: int) -> None:
        """A request's last block is full, and it continues in another."""
        text, table = self.requests[number]
        self.write(number)
        self.call("keep", table[-1], f"{text}a")
        self.requests[number] = f"{text}a", table
        try:
            table += self.call("take", 1)
        except Full:  # the request ends here
            self.go(number)

    def go(self, number: int) -> None:
        _, table = self.requests.pop(number)
        self.call("release", table)


TEXTS = ("", "a", "b", "aa", "ab", "ba", "bb", "aaa", "aab")
# an unnecessary call shrinks to the first one
CALLS = [("rest", 0), *product(("fork", "write", "grow", "go"), range(4))]
CALLS += product(("come",), TEXTS)
CALLS += product(("look",), map(list, permutations(("a", "aa", "b"))))


def stories(answer, seed: int) -> None:
    """In one process: play drawn stories."""
    calls = st.lists(st.sampled_from(CALLS), min_size=20, max_size=20)
    drawn = st.tuples(st.integers(1, 9), calls)
    for_all(seed, drawn, lambda story: Cache(answer, story[0]).play(story[1]), examples=200)


def blocks(trial: Trial) -> str:
    """Judge `Blocks`."""
    trial.forbid(("utils", "vllm"))
    trial.alone("in one process", stories, trial.new_seed(), seconds=SECONDS)
    return (
        "drawn requests arrive, share prefixes, fork, write, grow and end in 1 to 9 blocks: the\n"
        "right blocks in the right order, the right readers after each call, a copy on write only\n"
        "if a block is shared; if too few are free, NoBlocks is raised, and nothing is taken."
    )
