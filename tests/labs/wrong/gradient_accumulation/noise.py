"""Lab 02, noise: each body, written after the solution, is a wrong answer."""


def norm_not_squared():
    """Returns norms, not their squares.

    kind: values
    hint: take its square
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.norm().item()


def norm_of_the_sum():
    """The squared norm of the sum, not of the mean.

    kind: values
    hint: squared norm of the sum
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        big = message[:-1].square().sum().item()
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), big


def not_in_place():
    """Rebinds the name: the caller's gradient stays what it was.

    kind: part
    hint: still has this rank's own: copy the mean into it
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient = message[:-1]
        return message[-1].item(), gradient.square().sum().item()


def own_norm():
    """Takes this rank's own norm as the small one.

    kind: part
    hint: It is this rank's own
    """

    def squared_norms(gradient):
        small = gradient.square().sum().item()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        return small, gradient.square().sum().item()


def sum_for_the_mean():
    """Leaves the sum of the gradients in place.

    kind: values
    hint: times the mean
    """

    def squared_norms(gradient):
        size = dist.get_world_size()
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        gradient.copy_(message[:-1])
        return message[-1].item() / size, (gradient / size).square().sum().item()


def sum_of_norms():
    """Adds the ranks' norms up, without the mean.

    kind: values
    hint: ranks: take the mean
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return dist.get_world_size() * message[-1].item(), gradient.square().sum().item()


def two_messages():
    """Sends the norm by itself.

    kind: communication
    hint: 2 collectives
    """

    def squared_norms(gradient):
        small = gradient.square().sum()
        dist.all_reduce(small)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        return (small / dist.get_world_size()).item(), gradient.square().sum().item()


def a_zero_says_nothing():
    """A rank without a gradient takes no part.

    kind: odd
    hint: Does every rank call the all-reduce | a message does not fit where it is received
    """

    solution = squared_norms

    def squared_norms(gradient):
        if not gradient.any():
            return 0.0, 0.0
        return solution(gradient)


def buffer_of_fifty():
    """A buffer for fifty numbers.

    kind: sizes
    hint: RuntimeError in noise.py line
    """

    def squared_norms(gradient):
        message = torch.zeros(51, dtype=gradient.dtype)
        message[: len(gradient)] = gradient
        message[50] = gradient.square().sum()
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[: len(gradient)])
        return message[50].item(), gradient.square().sum().item()


def does_not_wait():
    """Nobody waits for the all-reduce.

    kind: luck
    hint: `gradient` afterwards
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message, async_op=True)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()


def gathers_all():
    """Gathers everybody's gradient: N times the bytes.

    kind: communication
    hint: 1 collectives (all_gather)
    """

    def squared_norms(gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient)
        gradient.copy_(sum(parts) / len(parts))
        small = sum(part.square().sum() for part in parts) / len(parts)
        return small.item(), gradient.square().sum().item()


def half_a_message():
    """fp32 numbers travel for fp64 gradients.

    kind: types
    hint: numbers differ
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)]).float()
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()


def keeps_the_gradients():
    """Every gradient stays, for a look at it later.

    kind: memory
    hint: bytes of what was made are still held
    """

    HISTORY = []

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)]).double()
        HISTORY.append(message)
        message = message.to(gradient.dtype)
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()


def small_of_the_first_step():
    """The norm of the first call is returned ever after.

    kind: constants
    hint: `small` is
    """

    SMALL = []

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        SMALL.append(message[-1].item())
        return SMALL[0], gradient.square().sum().item()


def twice_as_long():
    """The message is padded.

    kind: communication
    hint: the gradient and one number are
    """

    def squared_norms(gradient):
        message = torch.zeros(2 * len(gradient) + 2, dtype=gradient.dtype)
        message[: len(gradient)] = gradient
        message[-1] = gradient.square().sum()
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[: len(gradient)])
        return message[-1].item(), gradient.square().sum().item()


def two_ranks():
    """Takes the number of ranks for two.

    kind: sizes
    hint: with 3 ranks
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= 2
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()


def other_memory():
    """Gives the name `gradient` other memory: in that of the caller stands the old one.

    kind: inputs
    hint: still has this rank's own: copy the mean into it
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.data = message[:-1]
        return message[-1].item(), gradient.square().sum().item()


def in_pieces():
    """Long messages travel in pieces of 4,096 numbers.

    kind: sizes
    hint: collectives (all_reduce, all_reduce
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        for piece in message.split(4096):
            dist.all_reduce(piece)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()


def hides_nan():
    """What is no number becomes 0.

    kind: odd
    hint: A NaN that goes in comes out
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)]).nan_to_num()
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()


def type_of_the_first():
    """A buffer for each length, of the type that came first.

    kind: types
    hint: numbers in float
    """

    BUFFERS = {}

    def squared_norms(gradient):
        length = len(gradient) + 1
        message = BUFFERS.setdefault(length, gradient.new_empty(length))
        message[:-1], message[-1] = gradient, gradient.square().sum()
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient.copy_(message[:-1])
        return message[-1].item(), gradient.square().sum().item()
