"""Leaves out the sizes, so every rank would get equally many rows.

hint: other rows arrive than were sent here
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows)  # noqa: F821
        return arrived
