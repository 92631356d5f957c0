"""Given: a rank's process: it meets the others, loads its shard and calls your `loop`.

    python3 start_rank.py '{"folder": …, "rank": 0, …}'

Its standard input has the commands; its standard output takes "ready", and then the answers. What
is printed otherwise goes to standard error, so that it cannot be taken for an answer.
"""

import datetime
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist


def work(folder, rank, size, slots, meeting, seconds):
    """folder: with its files; meeting: a file where the ranks meet; seconds: for a step."""
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
        os._exit(1)  # not by way of a process group whose partner may be gone
    os._exit(0)
