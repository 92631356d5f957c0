"""Lesson 11's tools on a card: the allocator's record of a step, a monitor's counters against a
trace, and what Nsight Compute counts inside the kernels of lesson 12."""

import csv
import ctypes
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.bench.bench_memory import large_config, this_device
from tests.bench.memory_contenders import contender
from tests.gpu.child import row_of
from tests.gpu.machine import device
from utils.data import corpus
from utils.paths import ROOT
from utils.ranks import Ranks
from utils.training.config import TrainConfig

# ---- 1. the allocator's record of a step: tensors alive at the peak, by the line that made them

MOST = 6  # rows
SMALL = TrainConfig(layers=2, hidden=64, heads=2, batch=2, seq=64, optimizer="adamw", steps=1)


def snapshot(rehearse: bool) -> Iterator[tuple[str, dict]]:
    config = SMALL if rehearse else replace(large_config(2), precision="bf16")
    with Ranks(1, device="cpu" if rehearse else "cuda", timeout=200) as pool:
        (rows,) = pool.run(recorded, config)
    yield from rows


def recorded(config: TrainConfig) -> list[tuple[str, dict]]:
    """The rows of a step; on a CPU, those of one made-up event."""
    where = this_device()
    step, *_ = contender("ours", config, where)
    batch = [part.to(where) for part in corpus.batch(corpus.load(), 0, config.batch, config.seq)]
    step(*batch)  # fills the optimizer
    if where.type == "cpu":
        step(*batch)
        event = {"action": "alloc", "addr": 1, "size": batch[0].nbytes, "frames": []}
        return list(at_peak(0, [event]))
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(stacks="python")  # documented despite its name
    step(*batch)
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    return list(at_peak(before, events))


def at_peak(before: int, events: list[dict]) -> Iterator[tuple[str, dict]]:
    """Rows of a record: the step, then the lines whose tensors hold most at the peak."""
    held, most, where = before, before, 0
    sizes: dict[int, int] = {}
    for number, event in enumerate(events):
        held += change(event, sizes)
        if held > most:
            most, where = held, number + 1
    alive: dict[int, tuple[str, int]] = {}
    for event in events[:where]:
        if event["action"] == "alloc":
            alive[event["addr"]] = line_of(event["frames"]), event["size"]
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    made = sum(event["action"] == "alloc" for event in events)
    yield "step", {"allocations": made, "bytes_before": before, "bytes_at_peak": most}
    held_by, count = Counter(), Counter()
    for line, size in alive.values():
        held_by[line] += size
        count[line] += 1
    for line, size in held_by.most_common(MOST):
        yield line, {"bytes": size, "tensors": count[line]}


def change(event: dict, sizes: dict[int, int]) -> int:
    """The change of the memory in use, in bytes."""
    if event["action"] == "alloc":
        sizes[event["addr"]] = event["size"]
        return event["size"]
    if event["action"] == "free_completed":
        sizes.pop(event["addr"], None)
        return -event["size"]
    return 0


def line_of(frames: list[dict]) -> str:
    """The innermost line of the workshop's code that allocated memory."""
    for frame in frames:
        if frame["filename"].startswith(str(ROOT / "utils")):
            return f"{frame['filename'].removeprefix(str(ROOT) + '/')}:{frame['line']}"
    return "the backward pass" if not frames else f"{frames[0]['filename'].rpartition('/')[2]}"


# ---- 2. NVML's samples and the kernels of a trace on one time axis

EVERY = 0.1  # seconds between samples


class Monitor:
    """Reads the driver's library in a thread, as nvidia-smi does: samples are (time.time(),
    fraction of time in which a kernel ran, watts, clock in MHz)."""

    def __init__(self, rehearse: bool):
        self.samples, self._over = [], threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._nvml = self._gpu = None
        if not rehearse:
            self._nvml, self._gpu = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
            self._call("nvmlInit_v2")
            self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._gpu))

    def _call(self, name, *arguments):
        if status := getattr(self._nvml, name)(*arguments):
            raise RuntimeError(f"{name} gave status {status}")

    def _sample(self):
        if self._nvml is None:
            return 0.0, 0.0, 0
        rates, power, clock = (ctypes.c_uint * 2)(), ctypes.c_uint(), ctypes.c_uint()
        self._call("nvmlDeviceGetUtilizationRates", self._gpu, rates)
        self._call("nvmlDeviceGetPowerUsage", self._gpu, ctypes.byref(power))
        self._call("nvmlDeviceGetClockInfo", self._gpu, 1, ctypes.byref(clock))  # 1: the SMs'
        return rates[0] / 100, power.value / 1000, clock.value

    def _read(self):
        while not self._over.wait(EVERY):
            self.samples.append((time.time(), *self._sample()))

    def __enter__(self):
        self._sample()  # raises errors here instead of in the thread
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._over.set()
        self._thread.join()


def loops(where: torch.device, rehearse: bool) -> dict[str, Callable[[], object]]:
    """Three loops that nvidia-smi calls busy, like those of lesson 11 on a core."""
    size = 64 if rehearse else 8192
    kind = torch.float32 if rehearse else torch.bfloat16
    a, b = (torch.randn(size, size, device=where, dtype=kind) for _ in range(2))
    large, tiny = torch.rand(size * size, device=where), torch.rand(64, device=where)
    return {
        "matrix products": lambda: a @ b,
        "a large vector": lambda: large.add_(1.0),
        "64 numbers": lambda: tiny.add_(1.0),
    }


def counters(rehearse: bool) -> Iterator[tuple[str, dict]]:
    try:
        yield from beside_a_trace(device(rehearse), rehearse)
    except Exception as error:
        yield "NVML", row_of(error)
    yield from inside_kernels(rehearse)


def beside_a_trace(where: torch.device, rehearse: bool) -> Iterator[tuple[str, dict]]:
    """A row per sample: `util`, NVML's figure for the time before it; `kernels`, the exact fraction
    of that time in which a kernel ran, by the trace; `launches`, the number of kernels."""
    wanted = [torch.profiler.ProfilerActivity.CPU]
    wanted += [] if rehearse else [torch.profiler.ProfilerActivity.CUDA]
    seconds, phases = (0.25, []) if rehearse else (1.0, [])
    with torch.profiler.profile(activities=wanted) as trace, Monitor(rehearse) as monitor:
        with torch.profiler.record_function("axis"):
            began = time.time()
        for name, call in loops(where, rehearse).items():
            phases.append((time.time(), name))
            while time.time() < phases[-1][0] + seconds:
                for _ in range(8 if name == "matrix products" else 64):
                    call()
                if where.type == "cuda":
                    torch.cuda.synchronize()
    events = trace.events()
    axis = next(event for event in events if event.name == "axis").time_range.start
    kernels = [
        (began + (event.time_range.start - axis) / 1e6, began + (event.time_range.end - axis) / 1e6)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
        or (rehearse and event.cpu_parent is None)
    ]
    yield from samples_beside(monitor.samples, phases, kernels)


def samples_beside(
    samples: list[tuple], phases: list[tuple], kernels: list[tuple]
) -> Iterator[tuple[str, dict]]:
    """A row per sample; `kernels` are (begin, end), and do not overlap."""
    before = phases[0][0]
    for moment, util, watts, clock in samples:
        if moment <= before:
            continue
        phase = max((start, name) for start, name in phases if start < moment)[1]
        inside = [(max(a, before), min(b, moment)) for a, b in kernels if a < moment and b > before]
        ran = sum(b - a for a, b in inside) / (moment - before)
        row = {"util": util, "kernels": ran, "launches": len(inside), "watts": watts, "mhz": clock}
        yield f"{phase}, {moment - phases[0][0]:.1f} s", row
        before = moment


# ---- 3. ncu: hardware counters inside the kernels of lesson 12

KERNELS = "adamw|rms|forward_kernel|backward_kernel"  # parts of their names
METRICS = {
    "gpu__time_duration.sum": "ns",
    "dram__bytes.sum": "bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "launch__registers_per_thread": "registers",
}


def inside_kernels(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """A row for each kernel that an AdamW step and both RMSNorm passes launch."""
    if not shutil.which("ncu"):
        yield "ncu", {"absent": "ncu is not on PATH"}
        return
    words = ["ncu", "--csv", "--print-units", "base", "--metrics", ",".join(METRICS)]
    words += ["--kernel-name", f"regex:{KERNELS}", sys.executable, "-m", __name__]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=150)
    print(done.stdout[-2000:], done.stderr[-2000:])
    if rows := dict(counted(done.stdout)):
        yield from rows.items()
    else:
        last = [line for line in (done.stdout + done.stderr).splitlines() if "ERROR" in line]
        yield "ncu", {"absent": (last or ["ncu counted no kernel"])[-1].strip("= ")}


def counted(text: str) -> Iterator[tuple[str, dict]]:
    """Parse ncu's --csv output, a line per launch; the last launch of a kernel counts."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[str, dict] = {}
    for row in csv.DictReader(lines):
        if name := METRICS.get(row["Metric Name"]):
            one = launches.setdefault(f"{row['ID']} {row['Kernel Name'].partition('(')[0]}", {})
            one[name] = float(row["Metric Value"].replace(",", ""))
    yield from ((name.partition(" ")[2], row) for name, row in launches.items())


def launch_kernels() -> None:
    """The program under ncu: a step on 100 M parameters, and RMSNorm at lesson 12's sizes."""
    from tests.gpu.kernels import ours, triton_norm

    tensors = [torch.zeros(4096, 4096, device="cuda") for _ in range(6)]
    for tensor in tensors:
        tensor.requires_grad_().grad = torch.randn_like(tensor)
    step = ours(tensors)
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):  # the second without compilation
        step()
        triton_norm(x, weight).backward(torch.ones_like(x))


if __name__ == "__main__":
    launch_kernels()
