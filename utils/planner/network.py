"""Seconds of messages over networks within networks.

A group of `n` ranks, `stride` apart, spans the levels of a machine (`Machine.levels`). A ring goes
through every device once, so one stream leaves each unit (a pair, a node) that holds k members of
the group, and it may use the links of all k: k · bandwidth. The slowest level sets the pace. With
one member per node (tensor parallelism fills the node) a group has one device's link; with a whole
node as members it has all eight. The ring's latency is the sum over its hops, most of which stay in
a node that holds many members.

Every link loses some of its bandwidth to headers and to the steps of the algorithm: `LINK`.
"""

import numpy as np

from utils.planner.machine import Machine
from utils.planner.strategy import Numbers

LINK = 0.8  # fraction of a link's bandwidth that large messages reach


def pace(machine: Machine, n: Numbers, stride: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """(bytes/s of a ring through the group, seconds that a step of it waits on average), arrays."""
    speed = np.full(np.broadcast(n, stride).shape, np.inf)
    latency = np.zeros_like(speed)
    inside = 1.0  # devices of the unit joined by the levels so far
    before = 0.0  # the latency of the level before
    for level in machine.levels:
        members = np.clip(inside / stride, 1.0, n)
        farther = (n - 1) * stride >= inside  # some members are in another unit
        pace_here = np.minimum(speed, members * level.bandwidth * LINK)
        speed = np.where(farther & (n > 1), pace_here, speed)
        # the steps of the ring that leave a unit: one per unit, n / members
        latency = np.where(farther & (n > 1), latency + (level.latency - before) / members, latency)
        inside, before = level.size, level.latency
    return speed, latency


def gather(machine: Machine, size: Numbers, n: Numbers, stride: Numbers) -> np.ndarray:
    """Seconds of an all-gather that ends with `size` bytes on each rank, or of a reduce-scatter
    that begins with them: n−1 steps of size/n bytes."""
    speed, latency = pace(machine, n, stride)
    return np.where(n > 1, (n - 1) * (latency + size / n / speed), 0.0)


def all_reduce(machine: Machine, size: Numbers, n: Numbers, stride: Numbers) -> np.ndarray:
    """Seconds to sum `size` bytes over all ranks: each rank sends 2 (n−1)/n of them; large groups
    use trees, so the latency grows with log2 n."""
    speed, latency = pace(machine, n, stride)
    steps = 2 * np.ceil(np.log2(np.maximum(n, 1)))
    return np.where(n > 1, 2 * (n - 1) / n * size / speed + steps * latency, 0.0)


def send(machine: Machine, size: Numbers, stride: Numbers) -> np.ndarray:
    """Seconds to send `size` bytes to the rank `stride` away, possibly in another node."""
    speed, latency = 1.0, 0.0
    inside = 1.0
    for level in machine.levels:
        farther = stride >= inside
        speed = np.where(farther, level.bandwidth * LINK, speed)
        latency = np.where(farther, level.latency, latency)
        inside = level.size
    return size / speed + latency


def all_to_all(machine: Machine, size: Numbers, n: Numbers, stride: Numbers) -> np.ndarray:
    """Seconds until each rank has sent `size` bytes, an equal part to every rank of the group: each
    level carries the parts that go beyond the level before."""
    seconds, inside = np.zeros(np.broadcast(n, stride).shape), 1.0
    for level in machine.levels:
        near = np.clip(inside / stride, 1.0, n)
        crosses = (n > 1) & (near < n)
        beyond = size * (n - near) / n / (level.bandwidth * LINK)
        seconds = np.where(crosses, np.maximum(seconds, beyond) + level.latency, seconds)
        inside = level.size
    return seconds
