"""AdamW on the host: how fast each implementation updates what `OffloadedOptimizer` keeps.

    python -m tests.bench.bench_offload
    python -m tests.bench.bench_offload --parameters 1e9 --threads 16

A step reads and writes 28 bytes per parameter in fp32; its bound is the speed of a copy, which is
printed too. DeepSpeedCPUAdam is compiled on first use, which needs a compiler and takes a minute.
The implementations take turns; the figure is the median of the rounds.
"""

import argparse
import statistics
import time

import torch

BYTES = 28  # read weight, gradient and two moments, write all but the gradient


def deepspeed(parameters):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(parameters, adamw_mode=True)


MAKERS = {
    "torch, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "torch, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "torch, loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "DeepSpeedCPUAdam": deepspeed,
}


def seconds(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=float, default=2**25, help="in tensors of 2**22")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    sizes = parser.parse_args()
    torch.set_num_threads(sizes.threads)
    count = max(1, round(sizes.parameters / 2**22))
    parameters = [torch.randn(2**22).requires_grad_() for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    source = torch.randn(2**24)
    target = torch.empty_like(source)
    steps = {"copy": lambda: target.copy_(source)}
    for name, make in MAKERS.items():
        try:
            steps[name] = make(parameters).step
        except Exception as error:  # whatever a missing package or compiler raises
            print(f"{name:20} absent: {type(error).__name__}: {str(error).splitlines()[0]}")
    times = {name: [] for name in steps}
    for number in range(sizes.rounds + 1):
        for name, step in steps.items():
            taken = seconds(step)
            if number:  # the first round creates the state
                times[name].append(taken)
    print(f"{count * 2**22 / 1e6:,.0f} M parameters, {sizes.threads} threads")
    for name, taken in times.items():
        size = 8 * len(source) if name == "copy" else BYTES * count * 2**22
        middle = statistics.median(taken)
        print(f"{name:20} {1e3 * middle:9.1f} ms {size / middle / 1e9:7.1f} GB/s")


if __name__ == "__main__":
    main()
