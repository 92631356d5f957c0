"""Lab 16, exercise a: a rank of a tensor-parallel model that is served.

`start_rank.py` (given) is a rank's process: it joins the process group (gloo), loads the rank's
shard of the weights with your `layer` in it, and calls your `loop`. The leader takes the requests,
writes each command to every rank, and reads the answers of rank 0.
"""

import json

import torch.distributed as dist


def layer(x, attend, mlp):
    """One layer: x (B, T, C) -> (B, T, C), the same on every rank.

    attend(x), mlp(x): this rank's part of what attention and MLP add to x, (B, T, C), in x's dtype,
    fp32 or fp64; a new tensor, which you may change. The norms are inside. Call each once. A single
    rank computes x = x + attend(x), and then x + mlp(x). The argument x stays as it is, nothing is
    kept, and the only communication is two all-reduces (a single rank may do without).
    """
    raise NotImplementedError("add attention and MLP to x, each summed over the ranks")


def loop(shard, commands, answers, rank):
    """Execute the commands until there are no more.

    commands  a text file, the pipe from the leader: one command per line (see ranks.py)
    answers   a text file, the pipe to the leader: only rank 0 writes one line of JSON for each
              command, {"tokens": [...]} or {"error": the shard's message}. The leader writes the
              next command once it has read that line
    shard     shard.prefill(slot, tokens) -> token;  shard.decode(slots, tokens) -> tokens
              They raise ValueError, on all ranks alike, if a request is invalid. Any other
              exception is not a client's fault (another rank has died): it ends the loop.
    """
    raise NotImplementedError(
        "for each command: prefill or decode; then rank 0 answers, even on errors"
    )
