"""The GPU's properties and measured speeds."""

import platform
import subprocess
from collections.abc import Iterator

import torch

from tests.bench.bench_train import peak_of
from utils.measure import timing

DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def driver() -> str:
    """The driver's version, or why it is unknown."""
    try:
        answer = subprocess.run(DRIVER, capture_output=True, text=True, timeout=30, check=True)
        return answer.stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"


def device(rehearse: bool) -> torch.device:
    return torch.device("cpu" if rehearse else "cuda")


def machine(rehearse: bool) -> Iterator[tuple[str, dict]]:
    where = device(rehearse)
    facts = {"gpu": "CPU", "torch": torch.__version__, "python": platform.python_version()}
    if not rehearse:
        known = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": known.name,
            "count": torch.cuda.device_count(),
            "memory": known.total_memory,
            "capability": f"{known.major}.{known.minor}",
            "driver": driver(),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    yield "device", facts
    size, copied = (256, 2**22) if rehearse else (8192, 2**32)
    yield "copy", {"bytes_per_s": timing.memory_bandwidth(where, copied)}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        yield f"matmul {name}", {"flops_per_s": timing.matmul_flops(size, dtype, where)}
    # the limits of offloading: the bus, and host memory with all threads
    there = torch.ones(copied // 16, dtype=torch.float32, pin_memory=not rehearse)
    here = there.to(where, copy=True)
    for name, to, of in (("to the device", here, there), ("from the device", there, here)):
        took = timing.seconds(lambda to=to, of=of: to.copy_(of, non_blocking=True))
        yield f"bus {name}", {"bytes_per_s": there.nbytes / took}
    yield "host copy", {"bytes_per_s": timing.memory_bandwidth("cpu", copied // 4)}
    yield "data sheet", {"bf16_flops_per_s": peak_of(facts["gpu"])}
