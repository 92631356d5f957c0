"""Context parallelism: one sequence on many ranks, each with some of its positions.

positions         which rank has which positions, and who looks at whom
blocks            attention of some queries to some keys, and how such results are merged
ring              keys and values of all ranks, one after the other or gathered
ulysses           positions for heads and back, by all-to-all
context_parallel  a model whose attention goes one of these ways; the loss of a rank's positions
"""

from utils.parallel.context.context_parallel import WAYS, context_parallel
from utils.parallel.context.positions import own_positions

__all__ = ["WAYS", "context_parallel", "own_positions"]
