"""Lab 16, exercise b: a rank of a tensor-parallel model that is served.

`start_rank.py` (given) starts a process for each rank, makes the process group (gloo), loads the
rank's shard of the weights with your `layer` in it, and calls your `loop`. The leader, which takes
the requests, writes each command to every rank, and reads the answers of rank 0.
"""

import json

import torch.distributed as dist


def layer(x, attend, mlp):
    """One layer: x (B, T, C) -> (B, T, C), the same on every rank.

    attend(x), mlp(x): this rank's part of what attention and MLP add to x, (B, T, C). The norms are
    inside. One rank alone would compute x + attend(x), and then that + mlp of that.
    """
    raise NotImplementedError("attention and MLP added to x, their parts summed up over the ranks")


def loop(shard, commands, answers, rank):
    """Obeys the commands until there are no more.

    commands  a text file, the pipe from the leader: one command a line (see ranks.py)
    answers   a text file, the pipe to the leader: rank 0 writes one line of JSON for each command,
              {"tokens": [...]} or {"error": "..."}
    shard     shard.prefill(slot, tokens) -> token;  shard.decode(slots, tokens) -> tokens
              They raise ValueError, on all ranks alike, if a request is bad.
    """
    raise NotImplementedError(
        "for each command: prefill or decode; then rank 0 answers, errors too"
    )
