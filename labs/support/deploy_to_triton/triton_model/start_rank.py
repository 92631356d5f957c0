"""Given: where the ranks' processes come from: each meets the others, loads its shard and calls
your `loop`.

    python3 start_rank.py SOCKET

is a *forkserver*: it has imported torch, which takes a second or two, and then makes a rank, a fork
of itself, for each connection to its socket. That connection is the rank's pipe. The first line
says who the rank is, the others are commands. The rank says its process id, then "ready", then its
answers. What is printed otherwise goes to its log, so that it cannot be taken for an answer.
"""

import datetime
import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def serve(address):
    """A rank for each connection, until this process is ended."""
    gc.freeze()  # no rank need look through what the imports have made
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank's exit status
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        while True:
            with door.accept()[0] as pipe:
                if os.fork() == 0:
                    door.close()
                    begin(pipe)


def begin(pipe):
    """The life of a rank."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    commands = pipe.makefile("r", encoding="utf-8")
    answers = pipe.makefile("w", encoding="utf-8")
    given = json.loads(commands.readline())
    with open(f"{given['folder']}/log-{given['rank']}", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    print(os.getpid(), file=answers, flush=True)
    try:
        work(commands, answers, **given)
    except BaseException as error:
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name} line {frame.lineno}"
        print(f"{type(error).__name__} in {place}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # not by way of a process group whose partner may be gone
    os._exit(0)


def work(commands, answers, folder, rank, size, slots, meeting, seconds):
    """folder: of the version; meeting: a file where the ranks meet; seconds: for a step."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=2 * seconds),  # the leader notices first
    )
    sys.path.insert(0, folder)
    from model_shard import Shard
    from rank import layer, loop

    shard = Shard(folder, rank, size, slots, layer, f"{folder}/diary-{rank}")
    print("ready", file=answers, flush=True)
    if rank:  # nobody listens to the others
        answers = open(f"{folder}/answers-{rank}", "w", encoding="utf-8")  # noqa: SIM115
    loop(shard, commands, answers, rank)


if __name__ == "__main__":
    serve(sys.argv[1])
