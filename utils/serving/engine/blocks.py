"""The blocks of a paged KV cache: which are free, their readers and their content. No torch.

    blocks = Blocks(64)
    mine = blocks.find(keys)               # full blocks that hold the same prefix, now shared
    mine += blocks.take(3)                 # free blocks; NoBlocks if there are fewer
    blocks.keep(mine[0], keys[0])          # the block is full: others may find it by its key
    blocks.release(mine)                   # the content stays until the block is taken again

A block has BLOCK positions, in all layers. A request's share of the cache is a list of blocks, its
table (Kwon et al., vLLM, arXiv:2309.06180). A full block is identified by a hash of all positions
up to its end, so requests with the same prefix share it; full blocks are never written to.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16  # positions


class NoBlocks(RuntimeError):
    """There are not enough free blocks."""


def blocks_for(positions: int) -> int:
    """The number of blocks that hold this many positions."""
    return -(-positions // BLOCK)


def keys_of(content: Sequence, before: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of the full blocks of a sequence, each the hash of all positions up to its end.

    content   one object per position, distinguished by its repr
    before    keys of the first blocks, if known
    """
    keys = list(before)
    for start in range(BLOCK * len(keys), len(content) - BLOCK + 1, BLOCK):
        text = repr(content[start : start + BLOCK]).encode()
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + text).digest())
    return keys


class Blocks:
    """All blocks of the cache, `size` of them."""

    def __init__(self, size: int):
        self.size = size
        self.readers = [0] * size  # number of requests with each block in their table
        self.keys = [None] * size
        self.known = {}  # key -> block
        # least recently used first, but blocks that cannot be found come before all others
        self.free = OrderedDict.fromkeys(range(size))

    @property
    def used(self) -> int:
        """Number of blocks in some request's table."""
        return self.size - len(self.free)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix, each with one more reader."""
        found = []
        for key in keys:
            if (block := self.known.get(key)) is None:
                break
            self.readers[block] += 1
            self.free.pop(block, None)
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        """Take free blocks, whatever they hold; raise NoBlocks, taking none, if too few."""
        if count > len(self.free):
            raise NoBlocks(f"{count} blocks are needed, but only {len(self.free)} are free")
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.readers[block] = 1
            self._forget(block)
        return taken

    def keep(self, block: int, key: bytes) -> None:
        """Record the key of a block that is now full; no effect if another block has that key."""
        if self.keys[block] is None and key not in self.known:
            self.keys[block], self.known[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """Remove one reader from each block. The end of a sequence is reused before its beginning,
        because more requests share the beginning."""
        for block in reversed(blocks):
            self.readers[block] -= 1
            if self.readers[block] == 0:
                self.free[block] = None
                if self.keys[block] is None:
                    self.free.move_to_end(block, last=False)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Make blocks without readers unfindable, and return them."""
        left = [block for block in blocks if not self.readers[block]]
        for block in left:
            self._forget(block)
        return left

    def clear(self) -> None:
        """Empty the cache and remove all readers."""
        self.__init__(self.size)

    def _forget(self, block):
        if (key := self.keys[block]) is not None:
            self.keys[block] = None
            del self.known[key]
