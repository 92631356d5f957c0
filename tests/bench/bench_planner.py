"""How many strategies the planner evaluates per second; 10,000 are promised.

    python -m tests.bench.bench_planner

Each line is one search: every valid strategy is enumerated and checked, and its memory and time are
computed; the figure is the best of five runs on one thread. The last lines evaluate given
strategies, as a list and one at a time.
"""

import time

from utils.planner import MACHINES, MODELS, Strategy, plan, plan_all, search
from utils.planner.search import candidates

CASES = (  # model, machine, devices
    ("gpt3-13b", "dgx-a100", 64),
    ("gpt3-175b", "dgx-a100", 1024),
    ("1t", "frontier", 3072),
    ("llama3-405b", "dgx-h100", 16384),
    ("mixtral-8x7b", "dgx-h100", 256),
)
PROMISED = 10_000


def best(function, repeats=5):
    """Seconds of the fastest call."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def rates():
    """Return [(what, strategies, strategies per second)]."""
    rows = []
    for name, machine, gpus in CASES:
        model, where = MODELS[name], MACHINES[machine]
        count = len(candidates(model, where, gpus))
        seconds = best(lambda model=model, where=where, gpus=gpus: search(model, where, gpus))
        rows.append((f"{name} on {gpus} x {machine}", count, count / seconds))
    model, where = MODELS["gpt3-175b"], MACHINES["dgx-a100"]
    strategy = Strategy(16, 8, 8, global_batch=1536, recompute="full")
    many = [strategy] * 2000
    rows.append(("plan_all, a list", 2000, 2000 / best(lambda: plan_all(model, many, where))))
    rows.append(("plan, one at a time", 1, 1 / best(lambda: plan(model, strategy, where), 50)))
    return rows


def main():
    print(f"{'search':<36}{'strategies':>12}{'a second':>12}")
    for what, count, rate in rates():
        print(f"{what:<36}{count:>12,}{rate:>12,.0f}")
    print(f"promised: {PROMISED:,} strategies a second")


if __name__ == "__main__":
    main()
