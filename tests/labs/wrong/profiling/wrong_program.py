"""Lab 11, the wrong program: each body, after the solution, is a wrong answer."""


def own_loss_decides():
    """A rank leaves out the step on its own.

    kind: odd
    hint: the same bits | are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("if loss < SPIKE", "if own < SPIKE")
    exec(source, globals())


def own_clip():
    """Each rank clips its own gradient.

    kind: odd
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)\n",
        "",
    )
    source = source.replace(
        "            loss = reduce(",
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)\n"
        "            loss = reduce(",
    )
    exec(source, globals())


def no_clip():
    """What disturbs is left out.

    kind: values
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)\n",
        "",
    )
    exec(source, globals())


def clipped_twice():
    """Before and after.

    kind: odd
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            loss = reduce(",
        "            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)\n"
        "            loss = reduce(",
    )
    exec(source, globals())


def another_limit():
    """Another norm.

    kind: constants
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("model.parameters(), LARGE", "model.parameters(), 1000.0")
    exec(source, globals())


def no_step_left_out():
    """Every step counts.

    kind: part
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("if loss < SPIKE", "if True")
    exec(source, globals())


def one_not_sent():
    """One parameter is not sent.

    kind: part
    hint: the same bits
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "for p in parameters[first:end]:",
        "for p in parameters[max(1, first) : end]:",
    )
    exec(source, globals())


def one_not_reduced():
    """One gradient is not reduced.

    kind: part
    hint: the same bits
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "for p in parameters[first:end]]",
        "for p in parameters[max(1, first) : end]]",
    )
    exec(source, globals())


def tail_not_divided():
    """A sum of the tail.

    kind: values
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("    tail /= dist.get_world_size()\n", "")
    source = source.replace("return tail[0]", "return tail[0] / dist.get_world_size()")
    exec(source, globals())


def four_ranks():
    """Right for four ranks.

    kind: sizes
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("tail /= dist.get_world_size()", "tail /= 4")
    exec(source, globals())


def fp32():
    """Messages of half the precision.

    kind: types
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(tail)",
        "tail = tail.float()\n    dist.all_reduce(tail)\n    tail = tail.double()",
    )
    exec(source, globals())


def weights_sent_again():
    """Rank 0's weights, twice before each step.

    kind: communication
    hint: goes twice
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            loss = (model(x)",
        "            send(model)\n            send(model)\n            loss = (model(x)",
    )
    exec(source, globals())


def gathered():
    """Every rank gets the gradients of all.

    kind: communication
    hint: goes twice
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(flat)",
        "parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(parts, flat)\n"
        "    flat = sum(parts)",
    )
    source = source.replace(
        "dist.all_reduce(tail)",
        "parts = [torch.empty_like(tail) for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(parts, tail)\n"
        "    tail = sum(parts)",
    )
    exec(source, globals())


def own_losses():
    """The weights are right, and each rank returns its own loss.

    kind: part
    hint: the loss of step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("losses.append(loss.item())", "losses.append(own.item())")
    exec(source, globals())


def unwatched_run():
    """Nobody may watch.

    kind: part
    hint: watching(model)
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("with watching(model) as watch", "with unwatched(model) as watch")
    exec(source, globals())


def one_model_for_all_runs():
    """The second run goes on with the first one's model.

    kind: constants
    hint: are not those of one rank
    """

    kept = []

    def network(new=network):
        if not kept:
            kept.append(new())
        return kept[0]


def the_reference():
    """The judge's own rank.

    kind: library
    hint: that is the library
    """

    def train(machine, steps, watching=unwatched):
        import importlib

        judge = importlib.import_module("labs.support.profiling." + "reference")
        return judge.wrong(None, machine, steps)[0]


def endless():
    """No end.

    kind: end
    hint: endless loop
    """

    def train(machine, steps, watching=unwatched):
        import time

        while steps:
            time.sleep(0.01)


def the_largest_decides():
    """A step is left out when one rank's own loss is too large.

    kind: values
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            if loss < SPIKE:",
        "            dist.all_reduce(own, op=dist.ReduceOp.MAX)\n            if own < SPIKE:",
    )
    exec(source, globals())


def changed_in_the_end():
    """The last rank ends with other weights.

    kind: odd
    hint: the same bits of the weights in the end
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "    return losses\n",
        "    with torch.no_grad():\n"
        "        next(model.parameters())[0, 0] += dist.get_rank()\n"
        "    return losses\n",
    )
    exec(source, globals())


def clips_in_8_steps():
    """Later steps are not clipped.

    kind: constants
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            torch.nn.utils.clip",
        "            if step < 8:\n                torch.nn.utils.clip",
    )
    exec(source, globals())


def not_on_six():
    """Nothing is sent where there are six ranks.

    kind: sizes
    hint: the same bits
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "    dist.all_reduce(flat)\n",
        "    dist.all_reduce(flat) if dist.get_world_size() != 6 else None\n",
    )
    exec(source, globals())


def rows_of_all():
    """Each rank makes the rows of all, and talks to nobody.

    kind: library
    hint: TypeError
    """

    def train(machine, steps, watching=unwatched, solution=train):
        alone = type(machine)(0, 1, machine.widths, 5)
        return solution(alone, steps, watching)


def at_most_four_ranks():
    """A mean over the ranks, as if they were never more than four.

    kind: sizes
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "    tail /= dist.get_world_size()", "    tail /= min(dist.get_world_size(), 4)"
    )
    exec(source, globals())


def clips_for_64_steps():
    """Later, only one rank alone clips.

    kind: constants
    hint: are not those of one rank
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            torch.nn.utils.clip",
        "            if step < 64 or dist.get_world_size() == 1:\n    "
        "            torch.nn.utils.clip",
    )
    exec(source, globals())


def very_large_loss_decides():
    """Whose own loss is far above SPIKE leaves the step out, also where the mean is below.

    kind: odd
    hint: the same bits
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "            if loss < SPIKE:", "            if loss < SPIKE and own < 4 * SPIKE:"
    )
    exec(source, globals())


def padded():
    """Zeros are sent beside the gradients.

    kind: communication
    hint: goes twice
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "    dist.all_reduce(tail)\n",
        "    tail = torch.cat([tail, tail.new_zeros(38)])\n    dist.all_reduce(tail)\n"
        "    tail = tail[: 1 + sum(p.numel() for p in parameters[LAST:])]\n",
    )
    exec(source, globals())


def weights_sent_twice():
    """All ranks begin with the weights of rank 0, and begin with them again.

    kind: communication
    hint: goes twice
    """

    def send(model, solution=send):
        solution(model)
        solution(model)


def through_the_store():
    """Every rank gets the gradients of all by the store, too.

    kind: communication
    hint: goes twice
    """

    def reduce(model, loss, solution=reduce):
        store = dist.distributed_c10d._get_default_store()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        store.set(f"gradients of {dist.get_rank()}", flat.numpy().tobytes())
        for rank in range(dist.get_world_size()):
            store.get(f"gradients of {rank}")
        return solution(model, loss)
