"""Lab 03, stochastic: each body, written after the solution, is a wrong answer."""


def a_coin():
    """Up or down with equal chance, wherever x lies.

    kind: values
    hint: the part of the way
    """

    def round_stochastically(x, generator):
        coin = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int32)
        low = x.view(torch.int32) & -(2**16)
        exact = x.view(torch.int32) == low
        return torch.where(exact, low, low + coin * 2**16).view(torch.float32).bfloat16()


def a_seed_per_rank():
    """Each rank rounds by chances of its own.

    kind: step
    hint: Each rank rounds by its own chance
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        for parameter in parameters:
            moved = parameter.float() - lr * parameter.grad.float()
            parameter.copy_(round_stochastically(moved, generator))


def absolute_noise():
    """Noise of one size for large and small numbers.

    kind: values
    hint: neighbour
    """

    def round_stochastically(x, generator):
        noise = torch.rand(x.shape, generator=generator) - 0.5
        return (x + noise * 2.0**-7).bfloat16()


def climbs():
    """Adds the gradient.

    kind: values
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

    kind: values
    hint: always rounded
    """

    def round_stochastically(x, generator):
        return (x.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()


def global_chance():
    """Takes torch's global random numbers, not those of the generator.

    kind: step
    hint: from `generator`
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def noise_then_nearest():
    """Adds the noise, and then rounds to the nearest instead of cutting off.

    kind: values
    hint: half a step too large
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
        return (x.view(torch.int32) + noise).view(torch.float32).bfloat16()


def one_chance_for_all():
    """One random number for the whole tensor.

    kind: values
    hint: of its own
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, (), generator=generator, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def the_same_for_each_parameter():
    """A new generator with the same seed for each parameter.

    kind: constants
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

    kind: constants
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

    kind: values
    hint: always rounded
    """

    def round_stochastically(x, generator):
        return x.bfloat16()


def too_little_noise():
    """15 random bits where 16 are cut off.

    kind: values
    hint: the part of the way
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**15, x.shape, generator=generator, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def update_in_bf16():
    """Computes the new weight in bf16: it is rounded before it can be rounded well.

    kind: types
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

    kind: types
    hint: dtype=torch.int32
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def a_missing_gradient():
    """A parameter without a gradient stops the step.

    kind: odd
    hint: AttributeError in stochastic.py line
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            moved = parameter.float() - lr * parameter.grad.float()
            parameter.copy_(round_stochastically(moved, generator))


def a_nan_becomes_zero():
    """The carry goes through a NaN's bits into its sign.

    kind: odd
    hint: a result for nan
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
        return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()


def eight_random_bits():
    """256 different chances only.

    kind: values
    hint: the chance must be the part of the way up
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**8, x.shape, generator=generator, dtype=torch.int32) * 2**8
        bits = (x.view(torch.int32) + noise) & -(2**16)
        return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def gradient_cleared():
    """Takes the gradients away.

    kind: inputs
    hint: sgd_step changes the gradients
    """

    solution = sgd_step

    def sgd_step(parameters, lr, step, rank):
        solution(parameters, lr, step, rank)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()


def in_place():
    """The noise is added to the caller's numbers.

    kind: inputs
    hint: it changes x itself
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
        bits = x.view(torch.int32)
        bits.add_(noise).bitwise_and_(-(2**16))
        return x.bfloat16()


def one_column_of_chances():
    """All numbers of a row share their chance.

    kind: sizes
    hint: the one beside it
    """

    def round_stochastically(x, generator):
        shape = (*x.shape[:-1], 1) if x.dim() else ()
        noise = torch.randint(0, 2**16, shape, generator=generator, dtype=torch.int32)
        bits = (x.view(torch.int32) + noise) & -(2**16)
        return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def one_row_of_chances():
    """All rows share their chances.

    kind: sizes
    hint: a random number of its own
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape[-1:], generator=generator, dtype=torch.int32)
        bits = (x.view(torch.int32) + noise) & -(2**16)
        return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def product_in_bf16():
    """lr · grad is rounded to bf16 before it is subtracted.

    kind: types
    hint: Is all of it computed in fp32
    """

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            if parameter.grad is not None:
                moved = parameter.float() - (lr * parameter.grad).float()
                parameter.copy_(round_stochastically(moved, generator))


def rank_zero_tells():
    """Rank 0 rounds, and sends its weights to all.

    kind: communication
    hint: sgd_step calls broadcast
    """

    import torch.distributed as dist

    solution = sgd_step

    def sgd_step(parameters, lr, step, rank):
        solution(parameters, lr, step + rank, rank)
        for parameter in parameters:
            dist.broadcast(parameter.data, 0)


def step_of_its_own():
    """Counts the steps itself: a rank that was started anew is out of step.

    kind: step
    hint: Each rank rounds by its own chance
    """

    STEPS = []
    solution = sgd_step

    def sgd_step(parameters, lr, step, rank):
        STEPS.append(step)
        solution(parameters, lr, len(STEPS) + 1000 * torch.initial_seed() % 7, rank)


def the_same_noise_for_a_shape():
    """The noise of a shape is drawn once and kept.

    kind: constants
    hint: gives other results
    """

    NOISE = {}

    def round_stochastically(x, generator):
        if x.shape not in NOISE:
            NOISE[x.shape] = torch.randint(
                0, 2**16, x.shape, generator=generator, dtype=torch.int32
            ).roll(len(NOISE))
        NOISE[x.shape] = NOISE[x.shape].flatten().roll(1).view(x.shape)
        bits = (x.view(torch.int32) + NOISE[x.shape]) & -(2**16)
        return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def two_dimensions():
    """Takes every tensor for a matrix.

    kind: sizes
    hint: in stochastic.py line
    """

    solution = round_stochastically

    def round_stochastically(x, generator):
        _, _ = x.shape
        return solution(x, generator)


def twelve_random_bits():
    """4,096 different chances: a number that is near the lower neighbour never goes up.

    kind: values
    hint: as many random bits as bits that are cut off
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**12, x.shape, generator=generator, dtype=torch.int32) * 2**4
        bits = (x.view(torch.int32) + noise) & -(2**16)
        return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def two_halves_of_a_tensor():
    """The second half of the chances is the first half, turned round.

    kind: sizes
    hint: half the rows away
    """

    def round_stochastically(x, generator):
        noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
        flat, half = noise.flatten(), x.numel() // 2
        flat[half : 2 * half] = 2**16 - 1 - flat[:half]
        bits = (x.view(torch.int32) + flat.view(x.shape)) & -(2**16)
        return torch.where(x.isnan(), x, bits.view(torch.float32)).bfloat16()


def subnormal_is_nothing():
    """Numbers below the smallest normal one become 0, as on some devices.

    kind: values
    hint: e-4 | e-39 | e-40
    """

    solution = round_stochastically

    def round_stochastically(x, generator):
        rounded = solution(x, generator)
        return torch.where(x.abs() < 2.0**-126, torch.zeros_like(rounded), rounded)


def again_after_a_hundred_steps():
    """The seed begins anew after a hundred steps.

    kind: constants
    hint: new chances each step
    """

    solution = sgd_step

    def sgd_step(parameters, lr, step, rank):
        solution(parameters, lr, step % 100, rank)


def seed_of_a_text():
    """A text has another hash in each program: only ranks that were forked have the same.

    kind: step
    hint: Each rank rounds by its own chance
    """

    solution = sgd_step

    def sgd_step(parameters, lr, step, rank):
        solution(parameters, lr, hash(f"step {step}"), rank)


def one_generator_for_its_life():
    """Chances go on from call to call: a rank that is started anew, or later, has others.

    kind: step
    hint: one of which has made these steps before | do not hold the same bits
    """
    chances = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def sgd_step(parameters, lr, step, rank):
        for parameter in parameters:
            if parameter.grad is not None:
                moved = parameter.float() - lr * parameter.grad.float()
                parameter.copy_(round_stochastically(moved, chances))
