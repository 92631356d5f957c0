"""Lab 10, by_hand: each body, written after the solution, is a wrong answer."""


def all_micro_batches():
    """Keeps all micro-batches, as GPipe does.

    hint: one micro-batch at a time is under way
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * micro_batches


def always_split():
    """Data parallelism alone splits the state.

    hint: zero 0 shares out nothing
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        return 16 * parameters / (tp * pp * dp)


def gigabytes():
    """Returns gigabytes.

    hint: 2 + 2 + 12 bytes
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 3 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 12 / (dp if zero >= 1 else 1)
        return parameters / (tp * pp) * (weight + gradient + optimizer) / 1e9


def more_than_there_are():
    """Keeps pp micro-batches even where there are fewer.

    hint: there are only 4 micro-batches
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * pp


def no_master_weights():
    """Forgets the fp32 copy of the weights.

    hint: 2 + 2 + 12 bytes
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 3 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 8 / (dp if zero >= 1 else 1)
        return parameters / (tp * pp) * (weight + gradient + optimizer)


def one_under_way():
    """Forgets that the first stage works ahead.

    hint: micro-batches are under way when
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * math.ceil(layers / pp)


def pipeline_forgotten():
    """Splits over tp only.

    hint: tp splits every matrix and pp the layers
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 3 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 12 / (dp if zero >= 1 else 1)
        return parameters / tp * (weight + gradient + optimizer)


def returns_nothing():
    """Works it out and forgets to return it.

    hint: is None, and
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        16 * parameters / (tp * pp)


def rounds_down():
    """The fullest stage has more layers than the others.

    hint: the rounded-up number
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * (layers // pp) * min(pp, micro_batches)


def zero_backwards():
    """Splits weights first and the optimizer last.

    hint: the optimizer's 12 bytes over the
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 1 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 12 / (dp if zero >= 3 else 1)
        return parameters / (tp * pp) * (weight + gradient + optimizer)


def zero_splits_everything():
    """Any stage shares out all 16 bytes.

    hint: zero 1 shares out the optimizer's 12 bytes
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        return 16 * parameters / (tp * pp) / (dp if zero else 1)
