"""Lab 10, cluster: each body, written after the solution, is a wrong answer."""


def all_kept():
    """Recomputes nothing.

    kind: memory
    hint: Most are activations
    """

    def cluster():
        return Strategy(dp=32, pp=8, tp=4, zero=1)


def all_sharded():
    """Gathers all weights for every micro-batch.

    kind: values
    hint: Most is lost by dp
    """

    def cluster():
        return Strategy(dp=512, tp=2, recompute="full", zero=3)


def another_schedule():
    """Chooses what is not asked for.

    kind: constants
    hint: the schedule is 1f1b
    """

    def cluster():
        return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=1, schedule="zero-bubble")


def as_in_2021():
    """Recomputes everything, as Megatron did in 2021.

    kind: values
    hint: activations are computed again although there is room
    """

    def cluster():
        return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=1)


def few_micro_batches():
    """16 stages and 24 micro-batches.

    kind: values
    hint: stages wait
    """

    def cluster():
        return Strategy(dp=8, pp=16, tp=8, micro_batch=8, recompute="full", zero=1)


def nothing_to_split():
    """Sequence parallelism without tensor parallelism.

    kind: sizes
    hint: tp is 1
    """

    def cluster():
        return Strategy(dp=64, pp=16, recompute="full", zero=1, sequence_parallel=True)


def optimizer_everywhere():
    """Every data-parallel rank keeps the whole optimizer state.

    kind: memory
    hint: zero 1 shares it out over dp at no cost
    """

    def cluster():
        return Strategy(
            dp=32, pp=8, tp=4, interleave=6, recompute="selective", sequence_parallel=True
        )


def tensor_parallel_over_nodes():
    """All-reduces over four nodes in every layer.

    kind: values
    hint: tp 32 leaves the node of 8 GPUs
    """

    def cluster():
        return Strategy(dp=32, tp=32, recompute="selective", zero=1, sequence_parallel=True)


def zero_3_in_a_pipeline():
    """ZeRO-3 together with stages.

    kind: sizes
    hint: does not go with pp 8
    """

    def cluster():
        return Strategy(dp=16, pp=8, tp=8, recompute="full", zero=3)


def asks_the_search():
    """Lets the course's search answer.

    kind: library
    hint: utils/planner/search.py runs
    """

    from labs.support.five_dimensions.cases import CASES, best

    def cluster():
        return best(CASES["cluster"]).strategy


def hides_its_messages():
    """Lets messages travel for nothing, which these machines did not.

    kind: communication
    hint: is not yours to choose here
    """

    right_cluster = cluster

    def cluster():
        return Strategy(**{**vars(right_cluster()), "overlap_tp": True, "overlap_pp": True})


def leaves():
    """Leaves the program.

    kind: end
    hint: leaves the program
    """

    def cluster():
        exit()


def smaller_step():
    """Fewer sequences a step.

    kind: constants
    hint: leave it None
    """

    right_cluster = cluster

    def cluster():
        return Strategy(**{**vars(right_cluster()), "global_batch": 192})
