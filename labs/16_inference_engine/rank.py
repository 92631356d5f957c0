"""Lab 16, exercise a: a rank of a tensor-parallel model that is served.

`start_rank.py` (given) starts a process for each rank, makes the process group (gloo), loads the
rank's shard of the weights with your `layer` in it, and calls your `loop`. The leader, which takes
the requests, writes each command to every rank, and reads the answers of rank 0.
"""

import json

import torch.distributed as dist


def layer(x, attend, mlp):
    """One layer: x (B, T, C) -> (B, T, C), the same on every rank.

    attend(x), mlp(x): this rank's part of what attention and MLP add to x, (B, T, C), in x's dtype,
    fp32 or fp64; a new tensor, yours to change. The norms are inside. Each is called once. One rank
    alone would compute x + attend(x), and then that + mlp of that. x stays as it is, nothing is
    kept, and what is said are two all-reduces (one rank alone may do without).
    """
    raise NotImplementedError("attention and MLP added to x, their parts summed up over the ranks")


def loop(shard, commands, answers, rank):
    """Obeys the commands until there are no more.

    commands  a text file, the pipe from the leader: one command a line (see ranks.py)
    answers   a text file, the pipe to the leader: rank 0, and nobody else, writes one line of JSON
              for each command, {"tokens": [...]} or {"error": what the shard said}. The leader
              writes the next command when it has read that line
    shard     shard.prefill(slot, tokens) -> token;  shard.decode(slots, tokens) -> tokens
              They raise ValueError, on all ranks alike, if a request is bad. Any other exception
              is no client's fault (another rank has gone): it ends the loop.
    """
    raise NotImplementedError(
        "for each command: prefill or decode; then rank 0 answers, errors too"
    )
