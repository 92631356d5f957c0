"""Given: a rank's process. It joins the other ranks, loads its shard and calls your `loop`.

    python3 start_rank.py '{"folder": …, "rank": 0, …}'

It reads commands from standard input and writes "ready" and then the answers to standard output.
Anything else that is printed goes to standard error, so it cannot be mistaken for an answer.
"""

import datetime
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist


def work(folder, rank, size, slots, meeting, seconds):
    """folder: has its files; meeting: the ranks' rendezvous file; seconds: limit for a step."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)
    late = datetime.timedelta(seconds=2 * seconds)  # the leader notices first
    dist.init_process_group("gloo", f"file://{meeting}", late, world_size=size, rank=rank)
    from model_shard import Shard
    from rank import layer, loop

    shard = Shard(folder, rank, size, slots, layer, f"{folder}/diary-{rank}")
    print("ready", file=answers, flush=True)
    if rank:  # the leader does not listen to the others
        answers = sys.stderr
    loop(shard, sys.stdin, answers, rank)


if __name__ == "__main__":
    try:
        work(**json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # without closing the process group: its peers may be gone
    os._exit(0)
