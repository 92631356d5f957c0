"""The hardware of this machine, and how much of it a process may use.

print(machine())       # cores, memory, GPUs, versions
cores()                # 2, or 1.5 in a container with that quota
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """What a process here may use. Memory in bytes; cores may be a fraction in a container."""

    processor: str
    cores: float
    threads: int  # that torch uses in one process
    memory: int
    free_memory: int
    devices: tuple[str, ...]  # GPUs by name, or ("cpu",)
    python: str
    torch: str
    system: str

    def __str__(self):
        devices = ", ".join(self.devices)
        return (
            f"{self.cores:g} cores ({self.processor}), {self.memory / GIB:.1f} GiB of memory "
            f"({self.free_memory / GIB:.1f} free), device: {devices}\n"
            f"Python {self.python}, torch {self.torch} with {self.threads} threads, {self.system}"
        )


def machine() -> Machine:
    """The machine as this process sees it; in a container or batch job, what its limits allow."""
    import psutil  # imported here: a bare GPU machine lacks it, and needs only `cores`

    memory = psutil.virtual_memory()
    limit = _first_number(
        "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    )
    total = min(memory.total, limit or memory.total)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Machine(
        processor_name(),
        cores(),
        torch.get_num_threads(),
        total,
        min(memory.available, total),
        tuple(names) or ("cpu",),
        platform.python_version(),
        torch.__version__,
        f"{platform.system()} {platform.machine()}",
    )


def cores() -> float:
    """CPU cores this process may use: the affinity mask and the container's quota both count."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota, period = _cpu_quota()
    return min(count, quota / period) if quota else count


def processor_name() -> str:
    """The processor's name if the system reports it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _cpu_quota():
    """(microseconds of CPU time, per period of microseconds), or (None, 1) without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return (None, 1) if quota == "max" else (int(quota), int(period))
    except (OSError, ValueError):
        quota = _first_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
        return quota, _first_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or 1


def _first_number(*files):
    for file in files:
        try:
            value = int(Path(file).read_text())
        except (OSError, ValueError):
            continue
        if value > 0:
            return value
    return None
