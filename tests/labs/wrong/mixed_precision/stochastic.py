"""Lab 03, stochastic: each body, written after the solution, is a wrong answer."""


def a_coin():
    """Up or down with equal chance, wherever x lies.

    hint: the part of the way
    """

    def round_stochastically(x, generator):
        coin = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int32)
        low = x.view(torch.int32) & -(2**16)
        exact = x.view(torch.int32) == low
        return torch.where(exact, low, low + coin * 2**16).view(torch.float32).bfloat16()


def a_seed_per_rank():
    """Each rank rounds by chances of its own.

    hint: the ranks have drifted apart
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for parameter in parameters:
            moved = parameter.float() - lr * parameter.grad.float()
            parameter.copy_(round_stochastically(moved, generator))


def absolute_noise():
    """Noise of one size for large and small numbers.

    hint: neighbour
    """

    def round_stochastically(x, generator):
        noise = torch.rand(x.shape, generator=generator) - 0.5
        return (x + noise * 2.0**-7).bfloat16()


def climbs():
    """Adds the gradient.

    hint: the other way
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            moved = parameter.float() + lr * parameter.grad.float()
            parameter.copy_(round_stochastically(moved, generator))


def cuts_off():
    """Only cuts the lower bits off.

    hint: always rounded
    """

    def round_stochastically(x, generator):
        return (x.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()


def global_chance():
    """Takes torch's global random numbers, not those of the generator.

    hint: from `generator`
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def noise_then_nearest():
    """Adds the noise, and then rounds to the nearest instead of cutting off.

    hint: half a step too large
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
        return (x.view(torch.int32) + noise).view(torch.float32).bfloat16()


def one_chance_for_all():
    """One random number for the whole tensor.

    hint: of its own
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, (), generator=generator, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def the_same_for_each_parameter():
    """A new generator with the same seed for each parameter.

    hint: two parameters
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        for parameter in parameters:
            generator = torch.Generator().manual_seed(step)
            moved = parameter.float() - lr * parameter.grad.float()
            parameter.copy_(round_stochastically(moved, generator))


def the_same_in_each_step():
    """The same chances in every step.

    hint: in every step
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(0)
        for parameter in parameters:
            moved = parameter.float() - lr * parameter.grad.float()
            parameter.copy_(round_stochastically(moved, generator))


def to_the_nearest():
    """Rounds as usual.

    hint: always rounded
    """

    def round_stochastically(x, generator):
        return x.bfloat16()


def too_little_noise():
    """15 random bits where 16 are cut off.

    hint: the part of the way
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**15, x.shape, generator=generator, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def update_in_bf16():
    """Computes the new weight in bf16: it is rounded before it can be rounded well.

    hint: computed in bf16
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            moved = parameter - lr * parameter.grad
            parameter.copy_(round_stochastically(moved.float(), generator))


def whole_numbers_of_64_bits():
    """The noise has torch's default type, int64.

    hint: dtype=torch.int32
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()
