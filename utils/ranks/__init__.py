"""Several processes on one machine: `Ranks` for the cells of a notebook, `launch` for programs."""

from utils.ranks.pool import RankError, Ranks, device

__all__ = ["RankError", "Ranks", "device"]
