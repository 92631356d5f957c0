"""Lab 10, frontier: each body, written after the solution, is a wrong answer."""


def a_third_of_the_machine():
    """Uses 1,024 GPUs.

    kind: part
    hint: there are 3072 GPUs
    """

    def frontier():
        return Strategy(
            dp=4, pp=32, tp=8, interleave=4, recompute="selective", zero=1, sequence_parallel=True
        )


def as_in_2021():
    """The split of Megatron's trillion: it fits, and recomputes everything.

    kind: values
    hint: activations are computed again although there is room
    """

    def frontier():
        return Strategy(dp=6, pp=64, tp=8, recompute="full", zero=1)


def more_stages_than_layers():
    """256 stages for 128 layers.

    kind: sizes
    hint: some stage would be empty
    """

    def frontier():
        return Strategy(dp=3, pp=256, tp=4, recompute="full", zero=1)


def not_by_heads():
    """160 heads are not shared out over 64 ranks.

    kind: sizes
    hint: does not divide the 160 heads
    """

    def frontier():
        return Strategy(dp=3, pp=16, tp=64, recompute="full")


def tensor_parallel_over_nodes():
    """All-reduces over four nodes in every layer.

    kind: values
    hint: tp 32 leaves the node of 8 GPUs
    """

    def frontier():
        return Strategy(dp=12, pp=8, tp=32, recompute="full", zero=1, sequence_parallel=True)


def too_little_splitting():
    """Two ranks of tensor parallelism, as in the paper's fastest small runs.

    kind: memory
    hint: does not fit
    """

    def frontier():
        return Strategy(dp=48, pp=32, tp=2, recompute="full", zero=1)


def uneven_rounds():
    """Interleaving goes in rounds of pp micro-batches.

    kind: sizes
    hint: needs micro-batches in multiples of pp
    """

    def frontier():
        return Strategy(dp=128, pp=3, tp=8, interleave=4, micro_batch=12, recompute="full")


def asks_the_search():
    """Lets the course's search answer.

    kind: library
    hint: utils/planner/search.py runs
    """

    from labs.support.five_dimensions.cases import CASES, best

    def frontier():
        return best(CASES["frontier"]).strategy


def hides_its_messages():
    """Lets messages travel for nothing, which these machines did not.

    kind: communication
    hint: is not yours to choose here
    """

    right_frontier = frontier

    def frontier():
        return Strategy(**{**vars(right_frontier()), "overlap_tp": True, "overlap_pp": True})


def leaves():
    """Leaves the program.

    kind: end
    hint: leaves the program
    """

    def frontier():
        exit()


def smaller_step():
    """Fewer sequences a step.

    kind: constants
    hint: leave it None
    """

    right_frontier = frontier

    def frontier():
        return Strategy(**{**vars(right_frontier()), "global_batch": 192})


def a_plan():
    """Returns what the planner says of the strategy.

    kind: types
    hint: a Strategy is asked for
    """

    from utils.planner import MACHINES, MODELS, plan

    right_frontier = frontier

    def frontier():
        return plan(MODELS["1t"], right_frontier(), MACHINES["frontier"])
