"""Context parallelism: one sequence on many ranks, each with some of its positions.

positions         which rank has which positions, and which keys its queries attend to
blocks            attention of some queries to some keys, and how such results are merged
ring              keys and values of all ranks, in turn or gathered
ulysses           trade positions for heads and back, by all-to-all
context_parallel  a model whose attention works in one of these ways; the loss of a rank's positions
"""

from utils.parallel.context.context_parallel import WAYS, context_parallel
from utils.parallel.context.positions import own_positions

__all__ = ["WAYS", "context_parallel", "own_positions"]
