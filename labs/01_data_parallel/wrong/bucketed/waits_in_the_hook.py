"""Starts asynchronously and waits at once.

hint: the hook waits, and nothing overlaps
"""

import torch
import torch.distributed as dist


class BucketedAllReduce(BucketedAllReduce):  # noqa: F821
    def gradient_ready(self, parameter):
        index = self.bucket_of[parameter]
        self.missing[index] -= 1
        if self.missing[index] == 0:
            bucket = self.buckets[index]
            flat = torch.cat([p.grad.view(-1) for p in bucket])
            handle = dist.all_reduce(flat, async_op=True)
            handle.wait()
            self.started.append((bucket, flat, handle))
