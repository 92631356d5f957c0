"""The means stay in the flat tensors.

hint: They are still this rank's own
"""

import torch
import torch.distributed as dist


class BucketedAllReduce(BucketedAllReduce):  # noqa: F821
    def wait(self):
        for _, flat, handle in self.started:
            handle.wait()
            flat /= dist.get_world_size()
        self.started = []
        self.missing = [len(bucket) for bucket in self.buckets]
