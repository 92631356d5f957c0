"""Gathers all gradients and adds them up: right values, N times the bytes.

hint: one all-reduce will do
"""

# ruff: noqa: F821


class Enter(Enter):
    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        rows = [torch.empty_like(dy) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, dy)
        dist.barrier()
        return torch.stack(rows).sum(dim=0)
