"""Returns the parts in another order than that of the ranks.

hint: other rows arrive than were sent here
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send)  # noqa: F821
        return torch.cat(list(arrived.split(receive))[::-1])  # noqa: F821
