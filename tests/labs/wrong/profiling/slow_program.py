"""Lab 11, the slow program: each body, after the solution, is a wrong answer."""


def still_each_step():
    """The late rank is as late as before.

    kind: work
    hint: still paid for
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("step % OFTEN == 0 and machine", "machine")
    exec(source, globals())


def only_the_late_rank():
    """Asks less on the one rank that was late this week.

    kind: odd
    hint: still paid for
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "step % OFTEN == 0 and machine",
        "(dist.get_rank() != 3 or step % OFTEN == 0) and machine",
    )
    exec(source, globals())


def never():
    """Never looks at the temperature.

    kind: part
    hint: without a look
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("step % OFTEN == 0 and machine.temperature(step) > 90", "False")
    exec(source, globals())


def too_seldom():
    """Every eighth step.

    kind: constants
    hint: without a look
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("step % OFTEN == 0 and", "step % 8 == 0 and")
    exec(source, globals())


def no_checkpoints():
    """Saves nothing.

    kind: part
    hint: there is no checkpoint
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("machine.save(step, model)", "pass")
    exec(source, globals())


def rank_0_saves():
    """Checkpoints of rank 0 alone.

    kind: odd
    hint: there is no checkpoint
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "machine.save(step, model)",
        "dist.get_rank() or machine.save(step, model)",
    )
    exec(source, globals())


def saves_too_early():
    """Checkpoints of the weights before the step.

    kind: values
    hint: not the weights after
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("        machine.save(step, model)\n", "")
    source = source.replace(
        "        optimizer.step()",
        "        machine.save(step, model)\n        optimizer.step()",
    )
    exec(source, globals())


def log_forgotten():
    """The first line of the log is missing.

    kind: part
    hint: the log has
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("        machine.log(", "        step and machine.log(")
    exec(source, globals())


def one_for_each_parameter():
    """As many messages as parameters.

    kind: communication
    hint: collectives a step
    """

    def reduce(model, optimizer, loss):
        for tensor in [loss, *[p.grad for p in model.parameters()]]:
            dist.all_reduce(tensor)
            tensor /= dist.get_world_size()
        return loss


def padded():
    """A message of twice the length.

    kind: communication
    hint: goes twice
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(flat)",
        "flat = torch.cat([flat, flat])\n"
        "    dist.all_reduce(flat)\n"
        "    flat = flat[: len(flat) // 2]",
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
    exec(source, globals())


def barriers():
    """A barrier before and after.

    kind: communication
    hint: collectives a step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(flat)",
        "dist.barrier()\n    dist.all_reduce(flat)\n    dist.barrier()",
    )
    exec(source, globals())


def sum():
    """A sum in place of the mean.

    kind: values
    hint: the loss of step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("    flat /= dist.get_world_size()\n", "")
    exec(source, globals())


def four_ranks():
    """Right for four ranks.

    kind: sizes
    hint: the loss of step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("flat /= dist.get_world_size()", "flat /= 4")
    exec(source, globals())


def fp32():
    """Messages of half the precision.

    kind: types
    hint: the loss of step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "dist.all_reduce(flat)",
        "flat = flat.float()\n    dist.all_reduce(flat)\n    flat = flat.double()",
    )
    exec(source, globals())


def rows_of_the_first_run():
    """Unpacked rows are kept for ever, for any machine.

    kind: constants
    hint: the loss of step
    """

    kept = {}

    def unpacked(self, step):
        if step % 4 not in kept:
            kept[step % 4] = self.machine.unpack(self.machine.read(step))
        return kept[step % 4]

    Rows.__getitem__ = unpacked


def own_gradients():
    """The gradients stay those of the rank.

    kind: step
    hint: the loss of step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("for tensor, part in zip(tensors, ", "for tensor, part in zip([], ")
    exec(source, globals())


def after_forgotten():
    """The steps are not marked.

    kind: part
    hint: `after` is called
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("        after()\n", "")
    exec(source, globals())


def the_reference():
    """The judge's own rank.

    kind: library
    hint: that is the library
    """

    def train(machine, steps, after=lambda: None):
        import importlib

        judge = importlib.import_module("labs.support.profiling." + "reference")
        return judge.slow(None, machine, steps)[0]


def endless():
    """No end.

    kind: end
    hint: endless loop
    """

    def train(machine, steps, after=lambda: None):
        import time

        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue
