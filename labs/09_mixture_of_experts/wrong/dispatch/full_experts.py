"""Drops what is more than a fair share.

hint: way.loads is
"""

_dispatch = dispatch  # noqa: F821


def dispatch(tokens, chosen, experts):
    rows, way = _dispatch(tokens, chosen, experts)
    fair = -(-sum(way.loads) // len(way.loads))
    kept = [part[:fair] for part in rows.split(way.loads)]
    way.loads = [len(part) for part in kept]
    return torch.cat(kept), way  # noqa: F821
