"""An all-reduce for every parameter: many small messages.

hint: send each bucket once, as one tensor
"""

import torch
import torch.distributed as dist


class BucketedAllReduce(BucketedAllReduce):  # noqa: F821
    def gradient_ready(self, parameter):
        flat = parameter.grad.view(-1)
        self.started.append(([parameter], flat, dist.all_reduce(flat, async_op=True)))
