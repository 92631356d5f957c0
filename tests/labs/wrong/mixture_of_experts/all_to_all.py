"""Lab 09, all_to_all: each body, written after the solution, is a wrong answer."""


def backward_not_swapped():
    """Sends the gradient the same way as the rows.

    kind: sizes
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

    kind: values
    hint: no gradient comes back to the rows
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            return None, None, None


def equal_parts():
    """Leaves out the sizes, so every rank would get equally many rows.

    kind: sizes
    hint: in dispatch.py line
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

    kind: values
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

    kind: communication
    hint: nothing needs filling up
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

    kind: communication
    hint: one all-to-all will do
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

    kind: communication
    hint: its gradient goes back there
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

    kind: values
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

    kind: values
    hint: send[d] rows go to rank d
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

    kind: part
    hint: incorrect number of gradients
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            returned = gradient.new_empty(sum(ctx.send), gradient.shape[1])
            dist.all_to_all_single(returned, gradient.contiguous(), ctx.send, ctx.receive)
            return returned


def single_precision():
    """Its buffer has a type of its own.

    kind: types
    hint: is right
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            arrived = torch.empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(arrived, rows.contiguous().float(), receive, send)
            return arrived.to(rows.dtype)


def buffer_of_float32():
    """Its buffer is what torch makes by default.

    kind: types
    hint: in dispatch.py line
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            arrived = torch.empty(sum(receive), rows.shape[1])
            dist.all_to_all_single(arrived, rows.contiguous(), receive, send)
            return arrived


def does_not_wait():
    """Returns before the rows are there.

    kind: luck
    hint: is each waited for
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            ctx.send, ctx.receive = send, receive
            arrived = rows.new_zeros(sum(receive), rows.shape[1])
            dist.all_to_all_single(arrived, rows.contiguous(), receive, send, async_op=True)
            return arrived


def backward_does_not_wait():
    """Waits on the way there only.

    kind: luck
    hint: is each waited for
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            returned = gradient.new_zeros(sum(ctx.send), gradient.shape[1])
            dist.all_to_all_single(
                returned, gradient.contiguous(), ctx.send, ctx.receive, async_op=True
            )
            return returned, None, None


def last_lists():
    """Keeps the lists in the class: only those of the last exchange are there.

    kind: constants
    hint: with 2 ranks
    """

    lists = []

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            lists[:] = send, receive
            return super(AllToAll, AllToAll).forward(ctx, rows, send, receive)

        @staticmethod
        def backward(ctx, gradient):
            ctx.send, ctx.receive = lists
            return super(AllToAll, AllToAll).backward(ctx, gradient)


def rows_kept():
    """Keeps what has arrived, for later.

    kind: memory
    hint: What is kept that nobody needs
    """

    kept = []

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            arrived = super(AllToAll, AllToAll).forward(ctx, rows, send, receive)
            kept.append(arrived.detach())
            return arrived


def lists_reversed():
    """Turns the caller's lists round.

    kind: inputs
    hint: send is not what it was
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            arrived = super(AllToAll, AllToAll).forward(ctx, rows, list(send), receive)
            send.reverse()
            return arrived


def gradient_overwritten():
    """Adds to the gradient that it was given.

    kind: inputs
    hint: is not what it was before
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            found = super(AllToAll, AllToAll).backward(ctx, gradient)
            if gradient.is_contiguous():
                gradient.zero_()
            return found


def nothing_for_nobody():
    """A rank without rows to send does not take part.

    kind: odd
    hint: do all ranks hand over
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            if not sum(send):
                ctx.send, ctx.receive = send, receive
                return rows.new_zeros(sum(receive), rows.shape[1])
            return super(AllToAll, AllToAll).forward(ctx, rows, send, receive)


def twice():
    """Sends the rows twice, to be sure.

    kind: communication
    hint: one all-to-all will do
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            super(AllToAll, AllToAll).forward(ctx, rows, send, receive)
            return super(AllToAll, AllToAll).forward(ctx, rows, send, receive)


def four_ranks():
    """Knows four ranks.

    kind: sizes
    hint: with 5 ranks
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            return super(AllToAll, AllToAll).forward(ctx, rows, send[:4], receive[:4])


def torchs_own():
    """torch has one with a gradient.

    kind: library
    hint: that is the library
    """

    class AllToAll:
        @staticmethod
        def apply(rows, send, receive):
            from torch.distributed.nn.functional import all_to_all_single

            arrived = rows.new_empty(sum(receive), rows.shape[1])
            return all_to_all_single(arrived, rows.contiguous(), receive, send)


def leaves():
    """Ends the process on the way back.

    kind: end
    hint: the code leaves the program
    """

    class AllToAll(AllToAll):
        @staticmethod
        def backward(ctx, gradient):
            raise SystemExit(0)


def nothing_to_do_no_message():
    """A rank that neither sends nor gets a row leaves the others to themselves.

    kind: odd
    hint: there is no message at all, where one all-to-all will do | does not fit | did not complete
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            if sum(send) + sum(receive):
                return super(AllToAll, AllToAll).forward(ctx, rows, send, receive)
            ctx.send, ctx.receive = send, receive
            return rows.new_empty(0, rows.shape[1])


def wide_rows_in_halves():
    """Rows above 64 columns travel in two messages.

    kind: sizes
    hint: calls all_to_all, all_to_all, where one all-to-all will do
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            whole = super(AllToAll, AllToAll).forward
            halves = rows.chunk(2, dim=1) if rows.shape[1] > 64 else [rows]
            return torch.cat([whole(ctx, half, send, receive) for half in halves], dim=1)


def many_rows_in_pieces():
    """A message above 50,000 numbers is cut in two: rows that stay here travel alone.

    kind: sizes
    hint: this rank calls all_to_all, all_to_all, where one all-to-all will do
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            arrived = super(AllToAll, AllToAll).forward(ctx, rows, send, receive)
            if rows.numel() > 50_000:
                dist.all_to_all_single(torch.empty_like(arrived), rows.contiguous(), receive, send)
            return arrived


def a_library_with_a_made_up_name():
    """torch's own function, by a name that stands nowhere.

    kind: library
    hint: that is the library
    """

    import importlib

    _library = importlib.import_module(".".join(["torch", "distributed", "nn", "functional"]))

    class AllToAll(AllToAll):
        @staticmethod
        def apply(rows, send, receive):
            arrived = rows.new_empty(sum(receive), rows.shape[1])
            exchange = getattr(_library, "all_to_all" + "_single")
            return exchange(arrived, rows.contiguous(), receive, send)


def into_the_rows():
    """Where no gradient is asked for, what arrives takes the rows' place.

    kind: inputs
    hint: rows is not what it was before the call
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            arrived = super(AllToAll, AllToAll).forward(ctx, rows, send, receive)
            if arrived.shape == rows.shape and not ctx.needs_input_grad[0]:
                return rows.copy_(arrived)
            return arrived


def out_of_a_pool():
    """What arrives is the beginning of a larger tensor.

    kind: memory
    hint: is a part of a larger tensor
    """

    class AllToAll(AllToAll):
        @staticmethod
        def forward(ctx, rows, send, receive):
            arrived = super(AllToAll, AllToAll).forward(ctx, rows, send, receive)
            pool = arrived.new_empty(2 * len(arrived) + 1, arrived.shape[1])
            pool[: len(arrived)] = arrived
            return pool[: len(arrived)]
