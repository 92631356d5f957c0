"""Lab 10, cluster: each body, written after the solution, is a wrong answer."""


def all_kept():
    """Recomputes nothing.

    hint: Most are activations
    """

    def cluster():
        return Strategy(dp=32, pp=8, tp=4, zero=1)


def all_sharded():
    """Gathers all weights for every micro-batch.

    hint: Most is lost by dp
    """

    def cluster():
        return Strategy(dp=512, tp=2, recompute="full", zero=3)


def another_schedule():
    """Chooses what is not asked for.

    hint: the schedule is 1f1b
    """

    def cluster():
        return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=1, schedule="zero-bubble")


def as_in_2021():
    """Recomputes everything, as Megatron did in 2021.

    hint: activations are computed again although there is room
    """

    def cluster():
        return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=1)


def few_micro_batches():
    """16 stages and 24 micro-batches.

    hint: stages wait
    """

    def cluster():
        return Strategy(dp=8, pp=16, tp=8, micro_batch=8, recompute="full", zero=1)


def nothing_to_split():
    """Sequence parallelism without tensor parallelism.

    hint: tp is 1
    """

    def cluster():
        return Strategy(dp=64, pp=16, recompute="full", zero=1, sequence_parallel=True)


def optimizer_everywhere():
    """Every data-parallel rank keeps the whole optimizer state.

    hint: zero 1 shares it out over dp at no cost
    """

    def cluster():
        return Strategy(
            dp=32, pp=8, tp=4, interleave=6, recompute="selective", sequence_parallel=True
        )


def tensor_parallel_over_nodes():
    """All-reduces over four nodes in every layer.

    hint: tp 32 leaves the node of 8 GPUs
    """

    def cluster():
        return Strategy(dp=32, tp=32, recompute="selective", zero=1, sequence_parallel=True)


def zero_3_in_a_pipeline():
    """ZeRO-3 together with stages.

    hint: does not go with pp 8
    """

    def cluster():
        return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=3)
