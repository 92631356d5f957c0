"""Does not make ready for the next step.

hint: is everything reset for the next step?
"""

import torch
import torch.distributed as dist


class BucketedAllReduce(BucketedAllReduce):  # noqa: F821
    def wait(self):
        for bucket, flat, handle in self.started:
            handle.wait()
            flat /= dist.get_world_size()
            for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad.copy_(mean.view_as(parameter))
        self.started = []
