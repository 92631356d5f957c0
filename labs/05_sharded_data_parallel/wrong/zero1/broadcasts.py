"""Gathers by one broadcast from each rank: the right bytes, in too many messages.

hint: in too many pieces
"""

import torch.distributed as dist


class Zero1(Zero1):  # noqa: F821
    def gather(self, unit):
        for rank, part in enumerate(unit.parts()):
            dist.broadcast(part, src=rank)
