"""Lab 09, all_to_all: each body, written after the solution, is a wrong answer."""


def backward_not_swapped():
    """Sends the gradient the same way as the rows.

    hint: Split sizes
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            returned = gradient.new_empty(sum(ctx.receive), gradient.shape[1])
            dist.all_to_all_single(returned, gradient.contiguous(), ctx.receive, ctx.send)
            return returned, None, None


def detached():
    """Returns no gradient.

    hint: no gradient comes back to the rows
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            return None, None, None


def equal_parts():
    """Leaves out the sizes, so every rank would get equally many rows.

    hint: other rows arrive than were sent here
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            arrived = rows.new_empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(arrived, rows)
            return arrived


def expanded_gradient():
    """Hands an expanded gradient over as it is.

    hint: contiguous
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            returned = gradient.new_empty(sum(ctx.send), gradient.shape[1])
            dist.all_to_all_single(returned, gradient, ctx.send, ctx.receive)
            return returned, None, None


def filled_up():
    """Fills every part up to the largest one.

    hint: Nothing needs filling up
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            most, width = 5, rows.shape[1]
            parts = [
                torch.nn.functional.pad(part, (0, 0, 0, most - len(part)))
                for part in rows.split(send)
            ]
            arrived = rows.new_empty(most * len(send), width)
            dist.all_to_all_single(arrived, torch.cat(parts))
            kept = [part[:count] for part, count in zip(arrived.split(most), receive)]
            return torch.cat(kept)


def gathers_everything():
    """Gathers the rows of all ranks and takes its own.

    hint: where one all-to-all would do
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, list(rows.split(send)))
            return torch.cat([parts[dist.get_rank()] for parts in everyone])


def gradient_stays():
    """Keeps the gradient of what arrived.

    hint: backward: no message at all
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            own = gradient.new_zeros(sum(ctx.send), gradient.shape[1])
            count = min(len(own), len(gradient))
            own[:count] = gradient[:count]
            return own, None, None


def lists_swapped():
    """Takes the list of what comes for the list of what goes.

    hint: Split sizes
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            arrived = rows.new_empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(arrived, rows, send, receive)
            return arrived


def neighbours_first():
    """Returns the parts in another order than that of the ranks.

    hint: other rows arrive than were sent here
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            arrived = rows.new_empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(arrived, rows.contiguous(), receive, send)
            return torch.cat(list(arrived.split(receive))[::-1])


def one_gradient():
    """Returns one gradient for three inputs.

    hint: incorrect number of gradients
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            returned = gradient.new_empty(sum(ctx.send), gradient.shape[1])
            dist.all_to_all_single(returned, gradient.contiguous(), ctx.send, ctx.receive)
            return returned
