"""Lab 05, zero2: each body, written after the solution, is a wrong answer."""


def all_reduce():
    """All-reduces in the backward pass and keeps its own part.

    kind: communication
    hint: times the parameters
    """

    class Zero2(Zero2):
        def mean_gradient(self, unit):
            flat = unit.gradients()
            dist.all_reduce(flat)
            return unit.parts(flat)[self.rank].clone() / self.size


def counts_twice():
    """Adds to the shard and keeps the whole gradients: the next backward pass counts them again.

    kind: values
    hint: none must count twice
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            part = self.mean_gradient(unit)
            unit.shard.grad = part if unit.shard.grad is None else unit.shard.grad + part

        def step(self):
            for unit in self.units:
                unit.forget_gradients()
            super().step()


def forgotten_gather():
    """No gather at the end of the step.

    kind: values
    hint: does every rank get every other rank's part
    """

    class Zero2(Zero2):
        def step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()


def overwrites():
    """A second backward pass overwrites what the first one left.

    kind: values
    hint: the gradients of several backward passes must add up
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            unit.shard.grad = self.mean_gradient(unit)
            unit.forget_gradients()


def reduces_again_in_step():
    """Reduces in the backward pass, and once more in step(), as stage 1 does.

    kind: values
    hint: did not change
    """

    class Zero2(Zero2):
        def step(self):
            for unit in self.units:
                unit.shard.grad = self.mean_gradient(unit)
            super().step()


def reduces_in_step():
    """Waits for step(), like stage 1: the whole gradients pile up.

    kind: memory
    hint: of whole gradients
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            pass

        def step(self):
            for unit in self.units:
                unit.shard.grad = self.mean_gradient(unit)
                unit.forget_gradients()
            super().step()


def shards_never_forgotten():
    """The shards' gradients are never set to None: they grow from step to step.

    kind: values
    hint: are the gradients of a step forgotten
    """

    class Zero2(Zero2):
        def step(self):
            self.optimizer.step()
            for unit in self.units:
                self.gather(unit)


def whole_gradients_stay():
    """Reduces early, and keeps the whole gradients until the step.

    kind: memory
    hint: of whole gradients
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            part = self.mean_gradient(unit)
            unit.shard.grad = part

        def step(self):
            for unit in self.units:
                unit.forget_gradients()
            super().step()


def waits_for_the_last():
    """Reduces all units when the last one is ready.

    kind: memory
    hint: of whole gradients
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            if unit is self.units[0]:
                for every in reversed(self.units):
                    super().after_backward(every)


def hidden_copies():
    """Forgets .grad, and keeps the whole gradients elsewhere until the pass is over.

    kind: memory
    hint: Is each unit done with before the next one begins
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            self.held = [*getattr(self, "held", []), (unit, unit.gradients())]
            unit.forget_gradients()
            if unit is not self.units[0]:
                return
            for unit, flat in self.held:
                mine = torch.empty_like(unit.shard)
                dist.reduce_scatter(mine, unit.parts(flat))
                grad = unit.shard.grad
                unit.shard.grad = mine / self.size + (0 if grad is None else grad)
            self.held = []


def a_view_of_the_whole():
    """Keeps its part as a view, and so the whole behind it.

    kind: memory
    hint: Is a gradient a view of the whole ones
    """

    class Zero2(Zero2):
        def mean_gradient(self, unit):
            flat, mine = unit.gradients(), torch.empty_like(unit.shard)
            dist.reduce_scatter(mine, unit.parts(flat))
            part = unit.parts(flat)[self.rank]
            return part.copy_(mine / self.size)

        def after_backward(self, unit):
            part = self.mean_gradient(unit)
            if unit.shard.grad is not None:
                part += unit.shard.grad
            unit.shard.grad = part
            unit.forget_gradients()


def three_passes():
    """Divides as if there were two backward passes.

    kind: constants
    hint: step 3
    """

    class Zero2(Zero2):
        def step(self):
            for unit in self.units:
                unit.shard.grad /= self.passes
            super().step()
            self.passes = 0

        passes = 0

        def after_backward(self, unit):
            super().after_backward(unit)
            self.passes += unit is self.units[0]


def only_two_passes():
    """A third backward pass before the step is lost.

    kind: constants
    hint: add up
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            unit.count = getattr(unit, "count", 0) + 1
            if unit.count < 3:
                return super().after_backward(unit)
            unit.forget_gradients()

        def step(self):
            for unit in self.units:
                unit.count = 0
            super().step()


def async_not_waited():
    """Begins the reduction and reads its result at once.

    kind: luck
    hint: is each waited for
    """

    class Zero2(Zero2):
        def mean_gradient(self, unit):
            mine = torch.zeros_like(unit.shard)
            self.work = dist.reduce_scatter(mine, unit.parts(unit.gradients()), async_op=True)
            return mine.div_(self.size)


def zero_is_nothing():
    """A rank whose gradient is zero sends nothing.

    kind: odd
    hint: Do all ranks call the same collectives
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            if any(parameter.grad.any() for parameter in unit.parameters):
                super().after_backward(unit)


def single_precision():
    """Collects the gradients in a type of its own.

    kind: types
    hint: numbers differ
    """

    class Zero2(Zero2):
        def mean_gradient(self, unit):
            return super().mean_gradient(unit).float().to(unit.shard.dtype)


def up_to_three_ranks():
    """Right where N is at most three.

    kind: sizes
    hint: with 4 ranks
    """

    class Zero2(Zero2):
        def mean_gradient(self, unit):
            return super().mean_gradient(unit) * self.size / min(self.size, 3)


def part_of_the_units():
    """Adds the gradients up for the first unit only.

    kind: part
    hint: add up
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            if unit is not self.units[0]:
                unit.shard.grad = None
            super().after_backward(unit)


def grows():
    """Keeps the history of its gradients.

    kind: memory
    hint: What is kept that nobody needs
    """

    history = []

    class Zero2(Zero2):
        def after_backward(self, unit):
            super().after_backward(unit)
            history.append(unit.shard.grad[:1])


def gradients_to_zero():
    """Sets the shards' gradients to zero and keeps their memory.

    kind: memory
    hint: .grad still holds
    """

    class Zero2(Zero2):
        def step(self):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)
            for unit in self.units:
                self.gather(unit)


def one_class_for_all():
    """Counts in the class, so two models disturb each other.

    kind: constants
    hint: with 2 ranks
    """

    sums = {}

    class Zero2(Zero2):
        def after_backward(self, unit):
            part = self.mean_gradient(unit)
            kept = sums.get(unit.name)
            sums[unit.name] = part if kept is None else kept + part
            unit.forget_gradients()

        def step(self):
            for unit in self.units:
                unit.shard.grad = sums.get(unit.name)
            super().step()


def five_passes():
    """Forgets the gradients of the fifth backward pass and later ones.

    kind: sizes
    hint: must add up, | The steps before were right | gradients of a step
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            unit.passes = getattr(unit, "passes", 0) + 1
            if unit.passes < 5:
                super().after_backward(unit)
            else:
                self.mean_gradient(unit)
                unit.forget_gradients()

        def step(self):
            super().step()
            for unit in self.units:
                unit.passes = 0
