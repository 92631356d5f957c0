"""Gathers the rows of all ranks and takes its own.

hint: where one all-to-all would do
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        everyone = [None] * dist.get_world_size()  # noqa: F821
        dist.all_gather_object(everyone, list(rows.split(send)))  # noqa: F821
        return torch.cat([parts[dist.get_rank()] for parts in everyone])  # noqa: F821
