"""Takes this rank's own norm as the small one.

hint: It is this rank's own
"""

import torch.distributed as dist


def squared_norms(gradient):
    small = gradient.square().sum().item()
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    return small, gradient.square().sum().item()
