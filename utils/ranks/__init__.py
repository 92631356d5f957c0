"""Several processes on one machine: `Ranks` for the cells of a notebook, `launch` for programs,
`nodes` for several nodes with slow links, `slurm` for a cluster of them; `heartbeat` says for whom
a rank waits in vain; `supervise` leads every child process of the workshop."""

from utils.ranks.magic import register_magic

__all__ = ["Dead", "RankError", "Ranks", "device"]


def __getattr__(name: str):
    """Imports the pool, and torch with it, when one of its names is asked for: `make lab` and the
    server need the supervisor alone, and start without that second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from utils.ranks import pool

    return getattr(pool, name)


register_magic()  # `import utils.ranks` alone makes `%%ranks` known
