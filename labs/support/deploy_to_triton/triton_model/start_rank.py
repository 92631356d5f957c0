"""Given: what a rank's process runs: it meets the others, loads its shard and calls your `loop`.

    python3 start_rank.py RANK SIZE SLOTS MEETING SECONDS

Standard input brings the commands. The answers go where standard output was; what is printed
otherwise goes to the log, so that it cannot be taken for an answer.
"""

import datetime
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = Path(__file__).resolve().parent


def main():
    rank, size, slots, meeting, seconds = sys.argv[1:]
    rank, size = int(rank), int(size)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}/meet",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=2 * float(seconds)),  # the leader notices first
    )
    from model_shard import Shard  # counts what is said from here on
    from rank import layer, loop

    shard = Shard(FOLDER, rank, size, int(slots), layer, FOLDER / f"diary-{rank}")
    print("ready", file=answers, flush=True)
    if rank:  # nobody listens to the others
        answers = (FOLDER / f"answers-{rank}").open("w", encoding="utf-8")
    loop(shard, sys.stdin, answers, rank)


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name} line {frame.lineno}"
        print(f"{type(error).__name__} in {place}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # not by way of a process group whose partner may be gone
    os._exit(0)
