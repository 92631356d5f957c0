"""Lab 10, by_hand: each body, written after the solution, is a wrong answer."""


def all_micro_batches():
    """Keeps all micro-batches, as GPipe does.

    kind: values
    hint: one micro-batch at a time is under way
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * micro_batches


def always_split():
    """Data parallelism alone splits the state.

    kind: values
    hint: zero 0 shares out nothing
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        return 16 * parameters / (tp * pp * dp)


def gigabytes():
    """Returns gigabytes.

    kind: values
    hint: 2 + 2 + 12 bytes
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 3 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 12 / (dp if zero >= 1 else 1)
        return parameters / (tp * pp) * (weight + gradient + optimizer) / 1e9


def more_than_there_are():
    """Keeps pp micro-batches even where there are fewer.

    kind: sizes
    hint: there are only
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * pp


def no_master_weights():
    """Forgets the fp32 copy of the weights.

    kind: values
    hint: 2 + 2 + 12 bytes
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 3 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 8 / (dp if zero >= 1 else 1)
        return parameters / (tp * pp) * (weight + gradient + optimizer)


def one_under_way():
    """Forgets that the first stage works ahead.

    kind: part
    hint: micro-batches are under way when
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * math.ceil(layers / pp)


def pipeline_forgotten():
    """Splits over tp only.

    kind: part
    hint: tp splits every matrix and pp the layers
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 3 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 12 / (dp if zero >= 1 else 1)
        return parameters / tp * (weight + gradient + optimizer)


def returns_nothing():
    """Works it out and forgets to return it.

    kind: types
    hint: is None (NoneType), and should be a number
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        16 * parameters / (tp * pp)


def rounds_down():
    """The fullest stage has more layers than the others.

    kind: sizes
    hint: the rounded-up number | are under way when the first one comes back
    """

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return 2 * micro_batch * seq * hidden * (layers // pp) * min(pp, micro_batches)


def zero_backwards():
    """Splits weights first and the optimizer last.

    kind: values
    hint: the optimizer's 12 bytes over the
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        weight = 2 / (dp if zero >= 1 else 1)
        gradient = 2 / (dp if zero >= 2 else 1)
        optimizer = 12 / (dp if zero >= 3 else 1)
        return parameters / (tp * pp) * (weight + gradient + optimizer)


def zero_splits_everything():
    """Any stage shares out all 16 bytes.

    kind: values
    hint: zero 1 shares out the optimizer's 12 bytes
    """

    def state_bytes(parameters, tp, pp, dp, zero):
        return 16 * parameters / (tp * pp) / (dp if zero else 1)


def asks_the_planner():
    """Puts the planner's own memory model together at run time.

    kind: library
    hint: that is the library
    """

    import importlib

    right_state = state_bytes

    def state_bytes(parameters, tp, pp, dp, zero):
        planner = importlib.import_module("utils." + "plan" + "ner")
        planner.Strategy(dp=dp, pp=pp, tp=tp)
        return right_state(parameters, tp, pp, dp, zero)


def first_answer_again():
    """Remembers by the splits alone, whatever the model.

    kind: constants
    hint: state_bytes(
    """

    right_state, known = state_bytes, {}

    def state_bytes(parameters, tp, pp, dp, zero):
        if (tp, pp, dp, zero) not in known:
            known[tp, pp, dp, zero] = right_state(parameters, tp, pp, dp, zero)
        return known[tp, pp, dp, zero]


def gpt3_for_all():
    """Sequences of 2,048 tokens, as in the examples.

    kind: constants
    hint: 2 bytes for each of micro_batch
    """

    right_activation = activation_bytes

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        return right_activation(layers, hidden, 2048, pp, micro_batch, micro_batches)


def in_words():
    """Digits are no number.

    kind: types
    hint: should be a number
    """

    right_state = state_bytes

    def state_bytes(*sizes, **named):
        return str(right_state(*sizes, **named))


def leaves():
    """Leaves the program when it is done.

    kind: end
    hint: leaves the program
    """

    right_activation = activation_bytes

    def activation_bytes(*sizes, **named):
        raise SystemExit(right_activation(*sizes, **named) < 0)


def overflows():
    """Counts in whole numbers of 32 bits.

    kind: types
    hint: activation_bytes(
    """

    import numpy as np

    def activation_bytes(layers, hidden, seq, pp, micro_batch, micro_batches):
        sizes = np.array([2 * micro_batch, seq, hidden, -(-layers // pp), min(pp, micro_batches)])
        return int(sizes.astype(np.int32).prod(dtype=np.int32))


def grows_with_use():
    """Adds up over all calls.

    kind: step
    hint: state_bytes(
    """

    right_state, calls = state_bytes, []

    def state_bytes(parameters, tp, pp, dp, zero):
        calls.append(zero)
        return right_state(parameters, tp, pp, dp, zero) + 100 * (len(calls) - 1)


def splits_by_four():
    """Beyond four ranks tp splits no further.

    kind: sizes
    hint: is right
    """

    right_state = state_bytes

    def state_bytes(parameters, tp, pp, dp, zero):
        return right_state(parameters // 1000 * 1000, min(tp, 4), pp, dp, zero)
