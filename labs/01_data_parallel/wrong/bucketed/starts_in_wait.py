"""Starts all buckets after the backward pass.

hint: no all-reduce starts before the backward pass has ended
"""

import torch
import torch.distributed as dist

Right = BucketedAllReduce  # noqa: F821


class BucketedAllReduce(Right):
    def gradient_ready(self, parameter):
        pass

    def wait(self):
        for bucket in self.buckets:
            flat = torch.cat([p.grad.view(-1) for p in bucket])
            self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        super().wait()
