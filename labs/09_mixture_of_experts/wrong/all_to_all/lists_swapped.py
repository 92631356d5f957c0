"""Takes the list of what comes for the list of what goes.

hint: Split sizes
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive = send, receive
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows, send, receive)  # noqa: F821
        return arrived
