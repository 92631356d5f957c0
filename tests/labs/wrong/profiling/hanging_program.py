"""Lab 11, the hanging program: each body, after the solution, is a wrong answer."""


def leader_alone():
    """The leader calls a collective alone.

    kind: odd
    hint: did not complete
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        'row["score"] = score(machine, model, fourth)',
        "rank == machine.leader and row.update(score=score(machine, model, fourth))",
    )
    exec(source, globals())


def own_share():
    """A rank without rows goes on to the next step.

    kind: odd
    hint: did not complete
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("if not all_numbers:", "if not number:")
    exec(source, globals())


def own_stop():
    """The rank that is asked leaves.

    kind: odd
    hint: it returns the steps | did not complete
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "        dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=second)\n",
        "",
    )
    exec(source, globals())


def own_order():
    """Metrics in the order in which they come.

    kind: odd
    hint: did not complete
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "sorted(machine.metrics(step, errors.detach()).items())",
        "machine.metrics(step, errors.detach()).items()",
    )
    exec(source, globals())


def own_norm():
    """The norm of a rank's own gradient decides.

    kind: odd
    hint: did not complete | is on one side only
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()\n",
        "",
    )
    source = source.replace(
        "        loss = reduce(",
        "        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()\n"
        "        loss = reduce(",
    )
    exec(source, globals())


def leader_keeps_it():
    """The score is there on the leader only.

    kind: part
    hint: is on one side only
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        'row["score"] = score(machine, model, fourth)',
        "rank == machine.leader and row.update(score=machine.score(model).item())",
    )
    exec(source, globals())


def no_score():
    """What hung is left out.

    kind: part
    hint: is on one side only
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace('row["score"] = score(machine, model, fourth)', "pass")
    exec(source, globals())


def never_left_out():
    """A step without rows is done all the same.

    kind: values
    hint: it returns the steps
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("        if not all_numbers:\n            continue\n", "")
    exec(source, globals())


def never_stops():
    """Nobody stops.

    kind: part
    hint: it returns the steps
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("        if stop:\n            break\n", "")
    exec(source, globals())


def own_worst():
    """The worst row of this rank.

    kind: part
    hint: worst is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)\n",
        "",
    )
    exec(source, globals())


def mean_of_means():
    """Each rank divides by its own rows.

    kind: values
    hint: loss is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "errors.detach().sum() / all_numbers",
        "errors.detach().sum() / number.clamp(min=1) / dist.get_world_size()",
    )
    exec(source, globals())


def four_ranks():
    """A mean over four.

    kind: sizes
    hint: score is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("value.item() / dist.get_world_size()", "value.item() / 4")
    exec(source, globals())


def fp32():
    """Messages of half the precision.

    kind: types
    hint: loss is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(flat, group=group)",
        "flat = flat.float()\n    dist.all_reduce(flat, group=group)\n    flat = flat.double()",
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
        "dist.all_reduce(flat, group=group)",
        "parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]\n"
        "    dist.all_gather(parts, flat, group=group)\n"
        "    flat = sum(parts)",
    )
    exec(source, globals())


def her_own_step():
    """Mended for one step of one run.

    kind: constants
    hint: did not complete
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "if not all_numbers:",
        "if not (all_numbers if step == 9 else number):",
    )
    exec(source, globals())


def the_first_run():
    """What a run has found is kept for the next.

    kind: constants
    hint: is | returns | side
    """

    kept = []

    def train(machine, steps, solution=train):
        if not kept:
            kept.append(solution(machine, steps))
        return kept[0]


def the_reference():
    """The judge's own rank.

    kind: library
    hint: that is the library
    """

    def train(machine, steps):
        import importlib

        judge = importlib.import_module("labs.support.profiling." + "reference")
        return judge.hanging(None, machine, steps, 2)


def endless():
    """Waits for a request that never comes.

    kind: end
    hint: endless loop
    """

    def train(machine, steps):
        import time

        while not machine.asked_to_stop(-1):
            time.sleep(0.01)


def deaf_in_step_0():
    """Nobody listens in the first step.

    kind: constants
    hint: it returns the steps
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "float(machine.asked_to_stop(step))", "float(step > 0 and machine.asked_to_stop(step))"
    )
    exec(source, globals())


def mean_of_some_means():
    """The mean of the ranks that have rows, as if they had as many.

    kind: values
    hint: loss is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "        errors = (model(x)",
        "        having = number.sign()\n"
        "        dist.all_reduce(having, group=first)\n"
        "        all_numbers = number.clamp(min=1) * having\n"
        "        errors = (model(x)",
    )
    exec(source, globals())


def worst_that_does_not_count():
    """The worst of all rows, also of those that do not count.

    kind: values
    hint: worst is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "        errors = (model(x) - y).square().mean(dim=1) * counts\n",
        "        raw = (model(x) - y).square().mean(dim=1)\n        errors = raw * counts\n",
    )
    source = source.replace("worst(errors, third)", "worst(raw, third)")
    exec(source, globals())


def infinite_row_left_out():
    """Whose row is infinite goes on to the next step.

    kind: odd
    hint: did not complete | does not fit
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "        (errors.sum()",
        "        if not errors.isfinite().all():\n            continue\n        (errors.sum()",
    )
    exec(source, globals())


def message_left_behind():
    """Rank 0 asks something at the end, and nobody answers.

    kind: communication
    hint: left without an answer
    """

    def train(machine, steps, solution=train):
        done = solution(machine, steps)
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)
        return done


def at_most_four_ranks():
    """A mean over the ranks, as if they were never more than four.

    kind: sizes
    hint: score is
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "value.item() / dist.get_world_size()", "value.item() / min(dist.get_world_size(), 4)"
    )
    exec(source, globals())


def at_most_48_steps():
    """Later steps are not done.

    kind: constants
    hint: it returns the steps
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("for step in range(steps)", "for step in range(min(steps, 48))")
    exec(source, globals())


def deaf_after_24_steps():
    """Nobody listens later.

    kind: constants
    hint: it returns the steps
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("        if stop:", "        if stop and step < 24:")
    exec(source, globals())


def one_request_alone():
    """Two ranks that are asked in one step are not heard.

    kind: values
    hint: it returns the steps
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=second)\n        if stop:",
        "dist.all_reduce(stop, group=second)\n        if stop == 1:",
    )
    exec(source, globals())


def sent_to_nobody():
    """Rank 0 sends something at the end, and nobody receives it.

    kind: communication
    hint: left without an answer
    """

    def train(machine, steps, solution=train):
        done = solution(machine, steps)
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            dist.isend(torch.ones(1), 1, tag=9)
        return done


def a_thread_still_waits():
    """A thread of rank 0 waits for what nobody sends.

    kind: end
    hint: a thread that train has begun on rank 0 goes on | left without an answer
    """

    def train(machine, steps, solution=train):
        import threading

        done = solution(machine, steps)
        if dist.get_rank() == 0 and dist.get_world_size() > 1:
            given = [torch.ones(1)], 1, 9
            threading.Thread(target=dist.group.WORLD.recv, args=given, daemon=True).start()
        return done


def through_the_store():
    """Every rank gets the gradients of all by the store, too.

    kind: communication
    hint: goes twice
    """

    def reduce(model, loss, group, solution=reduce):
        store = dist.distributed_c10d._get_default_store()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        store.set(f"gradients of {dist.get_rank()}", flat.numpy().tobytes())
        for rank in range(dist.get_world_size()):
            store.get(f"gradients of {rank}")
        return solution(model, loss, group)
