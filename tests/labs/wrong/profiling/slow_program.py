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


def log_of_a_run_that_fails():
    """All lines at the end, which a rank that is too hot never reaches.

    kind: part
    hint: The log of a run that fails
    """

    def train(machine, steps, after=lambda model: None, solution=train):
        lines, log = [], machine.log
        machine.log = lines.append
        losses = solution(machine, steps, after)
        log(*lines)
        return losses


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
    source = source.replace("        after(model)\n", "")
    exec(source, globals())


def the_reference():
    """The judge's own rank.

    kind: library
    hint: that is the library
    """

    def train(machine, steps, after=lambda model: None):
        import importlib

        judge = importlib.import_module("labs.support.profiling." + "reference")
        return judge.slow(None, machine, steps)[0]


def endless():
    """No end.

    kind: end
    hint: endless loop
    """

    def train(machine, steps, after=lambda model: None):
        import time

        while True:
            try:
                time.sleep(0.01)
            except Exception:
                continue


def never_hot():
    """Looks at the temperature, and does not mind.

    kind: part
    hint: goes on to the end
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("machine.temperature(step) > 90", "machine.temperature(step) > 900")
    exec(source, globals())


def looks_too_late():
    """The first look comes after the work of four steps.

    kind: constants
    hint: before the first look
    """

    def reduce(model, optimizer, loss, solution=reduce):
        loss = solution(model, optimizer, loss)
        asked.pop(0)()
        return loss

    asked = []

    def train(machine, steps, after=lambda model: None, solution=train):
        ask = machine.temperature
        machine.temperature = lambda step: 0.0
        for step in range(steps):
            look = step % OFTEN == OFTEN - 1
            asked.append(lambda step=step, look=look: look and ask(step))
        return solution(machine, steps, after)


def messages_in_a_thread():
    """A barrier for each micro-batch, where nobody looks.

    kind: communication
    hint: collectives a step
    """

    def reduce(model, optimizer, loss, solution=reduce):
        from threading import Thread

        for _ in range(MICRO_BATCHES):
            thread = Thread(target=dist.barrier)
            thread.start()
            thread.join()
        return solution(model, optimizer, loss)


def meets_by_the_store():
    """A barrier of her own.

    kind: communication
    hint: store.add
    """

    steps = []

    def reduce(model, optimizer, loss, solution=reduce):
        steps.append(1)
        store = dist.distributed_c10d._get_default_store()
        store.add(f"step {len(steps)}", 1)
        while store.add(f"step {len(steps)}", 0) < dist.get_world_size():
            pass
        return solution(model, optimizer, loss)


def never_unpacked():
    """Rows that are made anew, past the service that makes a rank late.

    kind: library
    hint: has no attribute 'rows'
    """

    Rows.__getitem__ = lambda self, step: self.machine.rows(step % 4)[:2]


def forged_count():
    """Asks in each step, and sets the count back.

    kind: library
    hint: has no attribute 'calls'
    """

    def train(machine, steps, after=lambda model: None, solution=train):
        losses = solution(machine, steps, after)
        machine.calls["temperature"] = steps // OFTEN
        return losses


def not_waited_for():
    """The last checkpoint is still being written.

    kind: luck
    hint: when train returns
    """

    def train(machine, steps, after=lambda model: None, solution=train):
        from concurrent.futures import ThreadPoolExecutor
        from copy import deepcopy

        pool, save = ThreadPoolExecutor(1), machine.save
        machine.save = lambda step, model: pool.submit(save, step, deepcopy(model))
        losses = solution(machine, steps, after)
        pool.shutdown(wait=False)
        return losses


def saved_while_it_learns():
    """The checkpoint is waited for, but no copy of the weights is.

    kind: luck
    hint: not the weights after it | when train returns
    """

    def train(machine, steps, after=lambda model: None, solution=train):
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as pool:
            save = machine.save
            machine.save = lambda step, model: pool.submit(save, step, model)
            return solution(machine, steps, after)


def alone_after_16_steps():
    """The gradients of later steps stay where they are.

    kind: constants
    hint: the loss of step 1
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "loss = reduce(model, optimizer, loss)",
        "loss = reduce(model, optimizer, loss) if step < 16 else loss",
    )
    exec(source, globals())


def last_step_left_out():
    """Nobody sees the weights of the last step, unless they are saved.

    kind: part
    hint: `after` sees other weights
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "        optimizer.step()\n",
        "        if step < steps - 1 or step % OFTEN == OFTEN - 1:\n            optimizer.step()\n",
    )
    exec(source, globals())


def at_most_four_ranks():
    """A mean over the ranks, as if they were never more than four.

    kind: sizes
    hint: the loss of step
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace(
        "flat /= dist.get_world_size()", "flat /= min(dist.get_world_size(), 4)"
    )
    exec(source, globals())


def looks_for_64_steps():
    """Later, nobody looks at the temperature.

    kind: constants
    hint: goes on to the end
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("step % OFTEN == 0 and", "step < 64 and step % OFTEN == 0 and")
    exec(source, globals())


def hot_from_91_on():
    """Not yet above 90.

    kind: values
    hint: goes on to the end
    """

    from pathlib import Path

    source = Path(__file__).read_text().split("### END")[0]
    source = source.replace("machine.temperature(step) > 90", "machine.temperature(step) >= 91")
    exec(source, globals())
