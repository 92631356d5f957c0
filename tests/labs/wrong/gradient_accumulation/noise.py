"""Lab 02, noise: each body, written after the solution, is a wrong answer."""


def norm_not_squared():
    """Returns norms, not their squares.

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

    hint: It is still this rank's own
    """

    def squared_norms(gradient):
        message = torch.cat([gradient, gradient.square().sum().view(1)])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        gradient = message[:-1]
        return message[-1].item(), gradient.square().sum().item()


def own_norm():
    """Takes this rank's own norm as the small one.

    hint: It is this rank's own
    """

    def squared_norms(gradient):
        small = gradient.square().sum().item()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        return small, gradient.square().sum().item()


def sum_for_the_mean():
    """Leaves the sum of the gradients in place.

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

    hint: 2 collectives
    """

    def squared_norms(gradient):
        small = gradient.square().sum()
        dist.all_reduce(small)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        return (small / dist.get_world_size()).item(), gradient.square().sum().item()
