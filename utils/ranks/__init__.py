"""Several processes on one machine: `Ranks` for notebook cells, `launch` for programs, `nodes` for
several nodes with slow links, `slurm` for a cluster of them; `heartbeat` names the ranks that a
rank waits for in vain; `supervise` manages every child process of the workshop."""

from utils.ranks.magic import register_magic

__all__ = ["Dead", "RankError", "Ranks", "device"]


def __getattr__(name: str):
    """Import the pool, and torch with it, only when one of its names is used: `make lab` and the
    server need only the supervisor, and start a second faster without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from utils.ranks import pool

    return getattr(pool, name)


register_magic()  # `import utils.ranks` is enough to register `%%ranks`
