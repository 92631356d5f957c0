"""All parts are brought to all ranks and added up there.

hint: 10 × all_gather. All ranks need the sum of the parts
"""

# ruff: noqa: F821


def layer(x, attend, mlp):
    for part_of in (attend, mlp):
        part = part_of(x).contiguous()
        parts = [part.clone() for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        x = x + sum(parts)
    return x
