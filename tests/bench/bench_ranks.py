"""How fast ranks start and answer: `utils.ranks`, ipyparallel and torchrun, in one run.

    python -m tests.bench.bench_ranks [--ranks 4] [--repeats 5]

Each figure is a median. "first start" is the time from a fresh Python process to the end of its
first all-reduce, including all imports. ipyparallel starts its engines, imports torch on them and
makes a process group; torchrun starts a script that does the same.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = """
import json, statistics, sys, time
import torch
def main():
    start = time.perf_counter()
    from utils.ranks import Ranks
    def clock(work, repeats):
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            work()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    size, repeats = int(sys.argv[1]), int(sys.argv[2])
    def reduce():  # imports, since the function travels to the ranks by value
        import torch, torch.distributed as dist
        dist.all_reduce(torch.ones(1))
    ranks = Ranks(size)
    ranks.run(reduce)
    first = time.perf_counter() - start
    group = clock(lambda: Ranks(4), repeats)
    with Ranks(2) as two:
        call = clock(lambda: two.run(reduce), 50)
        work = statistics.median(two.run(lambda: clock(reduce, 50)))
    print(json.dumps({"first start": first, "new group of 4": group, "call on 2": call,
                      "call on 2 over the work": call - work}))
if __name__ == "__main__":
    main()
"""

IPYPARALLEL = """
import json, statistics, sys, time
import torch
start = time.perf_counter()
import logging
import ipyparallel as ipp
size = int(sys.argv[1])
SETUP = '''
import os, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://%s", rank=%d, world_size=%d)
'''
def pool(size, path):
    cluster = ipp.Cluster(n=size, log_level=logging.ERROR)
    client = cluster.start_and_connect_sync(activate=False)
    waits = [client[i].execute(SETUP % (path, i, size)) for i in range(size)]
    [w.get() for w in waits]
    return cluster, client
reduce = "import torch, torch.distributed as dist; dist.all_reduce(torch.ones(1))"
cluster, client = pool(size, sys.argv[3] + "/a")
client[:].execute(reduce).get()
first = time.perf_counter() - start
cluster.stop_cluster_sync()
cluster, client = pool(2, sys.argv[3] + "/b")
times = []
for _ in range(50):
    begin = time.perf_counter()
    client[:].execute(reduce).get()
    times.append(time.perf_counter() - begin)
cluster.stop_cluster_sync()
print(json.dumps({"first start": first, "call on 2": statistics.median(times)}))
"""

TORCHRUN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def run_json(source, *args):
    """Run a Python program in its own process; return the JSON object on its last line."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(source)
        result = subprocess.run(
            [sys.executable, str(path), *map(str, args), folder],
            capture_output=True, text=True, timeout=120,
        )
    if result.returncode:
        raise SystemExit(f"a benchmark's program failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def torchrun_seconds(size):
    """Seconds of a torchrun whose `size` ranks do one all-reduce."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(TORCHRUN)
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", path]
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=120)
        return {"first start": time.perf_counter() - start}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the first start")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of each whole program")
    options = parser.parse_args()
    rows = {"utils.ranks": [], "ipyparallel": [], "torchrun": []}
    for _ in range(options.repeats):  # in turn, so that a drift of the machine affects all three
        rows["utils.ranks"].append(run_json(OURS, options.ranks, options.repeats))
        rows["ipyparallel"].append(run_json(IPYPARALLEL, options.ranks, options.repeats))
        rows["torchrun"].append(torchrun_seconds(options.ranks))
    names = list(rows["utils.ranks"][0])
    print(f"medians of {options.repeats} runs, milliseconds (first start: {options.ranks} ranks)")
    print(f"{'':26}" + "".join(f"{name:>14}" for name in rows))
    for name in names:
        cells = []
        for results in rows.values():
            values = [result[name] for result in results if name in result]
            cells.append(f"{1000 * statistics.median(values):14.1f}" if values else f"{'–':>14}")
        print(f"{name:26}" + "".join(cells))
    for peer in ("ipyparallel", "torchrun"):
        for name in rows[peer][0]:
            pairs = zip(rows["utils.ranks"], rows[peer], strict=True)
            ratio = statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)
            print(f"utils.ranks / {peer}, {name}: {ratio:.3f}")


if __name__ == "__main__":
    main()
