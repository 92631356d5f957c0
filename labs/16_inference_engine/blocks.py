"""Lab 16, exercise c: an allocator for the blocks of a paged cache.

The cache has `size` blocks, numbered 0 … size-1; each holds the keys and values of the same number
of positions. A request has a list of blocks, its *table*. Requests can share blocks: the *readers*
of a block are the requests that have it in their table. A block without readers is free, and keeps
its content until it is taken.

    blocks = Blocks(64)
    table = blocks.find(["a", "ab", "abc"])   # full blocks that hold the same prefix
    table += blocks.take(3)                   # free ones
    blocks.keep(table[0], "a")                # it is full now: others may find it by this key
    copy = blocks.fork(table)                 # a second request continues from here
    copy[-1] = blocks.write(copy[-1])         # it writes: a block of its own
    blocks.release(table)                     # the request is over

The key of a full block identifies its content and everything that precedes it: blocks with the same
key hold the same. A full block is never written to; a block that is not full has no key.
"""


class NoBlocks(RuntimeError):
    """Not enough blocks are free. Nothing was taken."""


class Blocks:
    """readers: a list, how many requests read each block."""

    def __init__(self, size):
        self.readers = [0] * size
        raise NotImplementedError("keep track of the free blocks and of the keys")

    def take(self, count):
        """A list of `count` free blocks, each with one reader; raises NoBlocks if fewer are free.

        The block released longest ago is taken first; those never used come before all others, the
        lowest first. The content of a taken block is gone: its key no longer finds it.
        """
        raise NotImplementedError("take the free blocks that were released longest ago")

    def find(self, keys):
        """The blocks of the longest prefix of `keys` that is in the cache, free or not, as a list;
        each gets one more reader."""
        raise NotImplementedError("look up the keys in turn until one is missing")

    def keep(self, block, key):
        """From now on `key` finds this block, which is full and has no key yet. If the key already
        finds another block, it still does."""
        raise NotImplementedError("remember the key, unless it is known")

    def fork(self, table):
        """A copy of the table for one more request: each of its blocks gets one more reader."""
        raise NotImplementedError("count one more reader for each block")

    def write(self, block):
        """The block that a request with `block` in its table may write to: the same one if the
        request is its only reader; otherwise a free one, which takes its place in the table (the
        engine copies the content). Raises NoBlocks if none is free."""
        raise NotImplementedError("copy on write")

    def release(self, table):
        """A request has ended: each of its blocks has one reader fewer. The last block of the table
        is released first: requests share their beginnings, not their ends."""
        raise NotImplementedError(
            "count one reader fewer for each block, from the last to the first"
        )
