"""Brings all logits together: right values, V numbers a token on the wire.

hint: Logits stay where they are
"""

# ruff: noqa: F821


def vocabulary_loss(logits, targets, sizes):
    rank, longest = dist.get_rank(), max(sizes)
    padded = F.pad(logits.detach(), (0, longest - logits.shape[-1])).contiguous()
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded)
    parts = [row[..., :size] for row, size in zip(rows, sizes)]
    parts[rank] = logits
    whole = torch.cat(parts, dim=-1)
    return F.cross_entropy(whole.flatten(0, 1), targets.flatten())
