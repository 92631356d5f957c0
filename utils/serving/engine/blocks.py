"""The blocks of a paged KV cache: which are free, who reads each, and what each holds. No torch.

    blocks = Blocks(64)
    mine = blocks.find(keys)               # full blocks that hold the same beginning, now ours too
    mine += blocks.take(3)                 # free ones; NoBlocks where there are not so many
    blocks.keep(mine[0], keys[0])          # it is full: others may find it by its key
    blocks.release(mine)                   # its content stays until somebody takes the block

A block has BLOCK positions, in all layers. What a request has of the cache is a list of blocks, its
table (Kwon et al., vLLM, arXiv:2309.06180). A full block is known by a hash of all positions up to
its end, so requests that begin alike share it; nobody writes into a full one.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

BLOCK = 16  # positions


class NoBlocks(RuntimeError):
    """There are not as many free blocks."""


def blocks_for(positions: int) -> int:
    """How many blocks hold as many positions."""
    return -(-positions // BLOCK)


def keys_of(content: Sequence, before: Sequence[bytes] = ()) -> list[bytes]:
    """Keys of the full blocks of a sequence, each the hash of all positions up to its end.

    content   what stands at each position, whatever its repr tells apart
    before    keys of the first blocks, where they are known
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
        self.readers = [0] * size  # requests that have each in their table
        self.keys = [None] * size
        self.known = {}  # key -> block
        # left longest ago is first, and those that nobody can find before all others
        self.free = OrderedDict.fromkeys(range(size))

    @property
    def used(self) -> int:
        """Blocks that some request reads."""
        return self.size - len(self.free)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the longest beginning that is in the cache, taken by one reader more."""
        found = []
        for key in keys:
            if (block := self.known.get(key)) is None:
                break
            self.readers[block] += 1
            self.free.pop(block, None)
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        """Free blocks, whatever they held; raises NoBlocks and takes none where they are fewer."""
        if count > len(self.free):
            raise NoBlocks(f"{count} blocks are wanted and {len(self.free)} are free")
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.readers[block] = 1
            self._forget(block)
        return taken

    def keep(self, block: int, key: bytes) -> None:
        """Says what a block holds that is full now. Where another one holds the same, that one is
        found."""
        if self.keys[block] is None and key not in self.known:
            self.keys[block], self.known[key] = key, block

    def release(self, blocks: Sequence[int]) -> None:
        """One reader less. The end of a sequence is taken again before its beginning, for more
        requests begin like it than go on like it."""
        for block in reversed(blocks):
            self.readers[block] -= 1
            if self.readers[block] == 0:
                self.free[block] = None
                if self.keys[block] is None:
                    self.free.move_to_end(block, last=False)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Nobody finds these blocks again, except those that are read now; returns the others."""
        left = [block for block in blocks if not self.readers[block]]
        for block in left:
            self._forget(block)
        return left

    def clear(self) -> None:
        """Nothing is in the cache any more, and no request reads any."""
        self.__init__(self.size)

    def _forget(self, block):
        if (key := self.keys[block]) is not None:
            self.keys[block] = None
            del self.known[key]
