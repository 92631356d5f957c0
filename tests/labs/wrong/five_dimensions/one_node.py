"""Lab 10, one_node: each body, written after the solution, is a wrong answer."""


def a_dictionary():
    """Names the sizes in a dictionary.

    kind: types
    hint: a Strategy is asked for
    """

    def one_node():
        return {"dp": 4, "tp": 2, "micro_batch": 2}


def all_tensor_parallel():
    """Cuts the matrices into eight parts, one sequence at a time.

    kind: values
    hint: Most is lost by
    """

    def one_node():
        return Strategy(tp=8, recompute="full")


def everything_sharded():
    """ZeRO-3 and full recomputation: it fits easily, and computes a third more.

    kind: values
    hint: activations are computed again although there is room
    """

    def one_node():
        return Strategy(dp=8, zero=3, recompute="full", micro_batch=8)


def nothing_recomputed():
    """Keeps all activations of two sequences.

    kind: memory
    hint: Most are activations
    """

    def one_node():
        return Strategy(dp=4, tp=2, micro_batch=4, zero=1, sequence_parallel=True)


def odd_micro_batch():
    """256 sequences are not shared out in threes.

    kind: sizes
    hint: not a multiple of dp · micro-batch
    """

    def one_node():
        return Strategy(dp=4, tp=2, micro_batch=3, zero=1)


def one_long_pipeline():
    """Eight stages and few large micro-batches.

    kind: values
    hint: stages wait
    """

    def one_node():
        return Strategy(pp=8, micro_batch=16, recompute="full")


def plain_data_parallel():
    """Every GPU holds the whole model.

    kind: memory
    hint: Most are optimizer
    """

    def one_node():
        return Strategy(dp=8)


def seven_gpus():
    """Leaves a GPU idle.

    kind: part
    hint: there are 8 GPUs: all of them must work
    """

    def one_node():
        return Strategy(dp=7, zero=3, recompute="full")


def asks_the_search():
    """Lets the course's search answer.

    kind: library
    hint: utils/planner/search.py runs
    """

    from labs.support.five_dimensions.cases import CASES, best

    def one_node():
        return best(CASES["one_node"]).strategy


def hides_its_messages():
    """Lets messages travel for nothing, which these machines did not.

    kind: communication
    hint: is not yours to choose here
    """

    right_one_node = one_node

    def one_node():
        return Strategy(**{**vars(right_one_node()), "overlap_tp": True, "overlap_pp": True})


def leaves():
    """Leaves the program.

    kind: end
    hint: leaves the program
    """

    def one_node():
        exit()


def smaller_step():
    """Fewer sequences a step.

    kind: constants
    hint: leave it None
    """

    right_one_node = one_node

    def one_node():
        return Strategy(**{**vars(right_one_node()), "global_batch": 192})
