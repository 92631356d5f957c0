"""The hardware: peaks, memory and links of a device, and the number of devices per node.

    MACHINES["dgx-a100"].peak                  # 312e12 FLOP/s
    measured(ranks)                            # this machine, measured as in lesson 00

Peaks, sizes and bandwidths are the hardware's own, from its data sheet. `sustained` is not: large
matrix products reach it. Latencies, `launch` and the host's values are typical ones; `attention`
and `overlaps` belong to the software.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch
    from utils.ranks import Ranks

GB = 1e9
ANY = math.inf
HERE = "here"  # the name of the machine that `measured` measures


@dataclass(frozen=True)
class Level:
    """A network: among `size` neighbours, each device sends `bandwidth` bytes/s, one way, while it
    receives as many; each message takes another `latency` seconds."""

    size: float
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """One device of a cluster, and its share of the node's resources.

    peak        FLOP/s in the training format (16 bits on GPUs), dense
    sustained   fraction of it that a very large matrix product reaches under the power limit
    processors  multiprocessors, which divide the tiles of a matrix product
    bandwidth   bytes/s of the device's memory;  memory: its bytes
    levels      networks from the nearest to the farthest; the last one is unlimited
    host_link   bytes/s between device and host memory, one way
    host_memory, host_bandwidth, host_flops   the device's share of the host's bytes, bytes/s
    launch      seconds between two kernels
    fp8_peak, fp8_sustained   the same for products of 8-bit values; 0: no fp8
    attention, overlaps   defaults, as in Megatron at the machine's time: attention's core in the
                GPT layout, fields of `Strategy` that are on
    """

    name: str
    peak: float
    sustained: float
    processors: int
    memory: float
    bandwidth: float
    levels: tuple[Level, ...]
    host_link: float
    host_memory: float
    host_bandwidth: float
    launch: float = 4e-6
    tile: int = 128 * 256  # values of the result that one processor computes at a time
    precision: str = "bf16"
    fp8_peak: float = 0.0
    fp8_sustained: float = 0.0
    attention: str = "scores"
    overlaps: tuple[str, ...] = ()
    source: str = ""

    @property
    def node(self) -> int:
        """Devices per node: the size of the second farthest network."""
        return int(self.levels[-2].size) if len(self.levels) > 1 else 1


# NVIDIA and AMD print peaks at clocks that a device cannot sustain while all its matrix units work.
# `sustained` is the fraction that large products reach: one value per device, for all models and
# strategies. An A100's is near 0.8; newer devices run into their power limit. Those of the A100 and
# of the H100 are fitted to one half of the runs in `published`.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "dgx-a100", 312e12, 0.80, 108, 80 * GB, 2039 * GB,
            (Level(8, 300 * GB, 3e-6), Level(ANY, 25 * GB, 15e-6)),
            host_link=16 * GB, host_memory=250 * GB, host_bandwidth=25 * GB,
            source="DGX A100 80GB data sheet: NVLink 3 with switch, 8 x HDR 200 Gb/s",
        ),
        Machine(
            "dgx-h100", 989e12, 0.64, 132, 80 * GB, 3350 * GB,
            (Level(8, 450 * GB, 3e-6), Level(ANY, 50 * GB, 15e-6)),
            host_link=50 * GB, host_memory=250 * GB, host_bandwidth=60 * GB,
            fp8_peak=1979e12, fp8_sustained=0.68, attention="fused",
            overlaps=("overlap_tp", "overlap_pp", "overlap_grad_reduce", "overlap_param_gather"),
            source="DGX H100 data sheet: NVLink 4 with switch, 8 x NDR 400 Gb/s",
        ),
        Machine(
            "dgx-v100", 125e12, 0.80, 80, 32 * GB, 900 * GB,
            (Level(8, 150 * GB, 4e-6), Level(ANY, 6.25 * GB, 15e-6)),
            host_link=12 * GB, host_memory=64 * GB, host_bandwidth=16 * GB, tile=128 * 128,
            source="DGX-1 V100 32GB data sheet: NVLink 2, 4 x EDR 100 Gb/s for 8 GPUs",
        ),
        Machine(
            "frontier", 191.5e12, 0.50, 110, 64 * GB, 1638 * GB,
            (Level(2, 200 * GB, 4e-6), Level(8, 50 * GB, 6e-6), Level(ANY, 12.5 * GB, 15e-6)),
            host_link=36 * GB, host_memory=64 * GB, host_bandwidth=25 * GB, tile=128 * 128,
            source="a GCD (half an MI250X) counts as a GPU; 4 x Slingshot 25 GB/s for 8 GCDs",
        ),
        Machine(
            "aws-p4d", 312e12, 0.80, 108, 40 * GB, 1555 * GB,
            (Level(8, 300 * GB, 3e-6), Level(ANY, 6.25 * GB, 15e-6)),
            host_link=16 * GB, host_memory=140 * GB, host_bandwidth=25 * GB,
            source="A100 40GB, EFA 400 Gb/s for 8 GPUs",
        ),
        Machine(
            "laptop", 0.1e12, 0.9, 1, 4 * GB, 10 * GB,
            (Level(ANY, 1 * GB, 300e-6),),
            host_link=10 * GB, host_memory=4 * GB, host_bandwidth=10 * GB,
            launch=5e-6, tile=64 * 64, precision="fp32",
            source="one core of a laptop as a rank, joined by gloo; `measured` uses your own",
        ),
    )
}


def measured(ranks: "Ranks | None" = None, cores: float = 1) -> Machine:
    """This machine as lesson 00 measures it, each rank one core: FLOP/s, bytes/s and the link.

    ranks: an open `utils.ranks.Ranks` of two or more, for the link; None keeps a typical link.
    """
    from utils.measure import timing

    here = timing.machine()
    machine = replace(
        MACHINES["laptop"],
        name=HERE,
        peak=timing.matmul_flops(1024) * cores / max(1, here.threads),
        sustained=1.0,
        bandwidth=timing.memory_bandwidth(),
        memory=here.memory / max(1, int(here.cores)),
        source=f"measured: {here.processor}",
    )
    if ranks is None:
        return machine
    link = timing.link(ranks)
    return replace(machine, levels=(Level(ANY, 1 / max(link.beta, 1e-15), link.alpha),))
