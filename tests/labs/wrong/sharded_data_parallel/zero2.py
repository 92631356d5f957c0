"""Lab 05, zero2: each body, written after the solution, is a wrong answer."""


def all_reduce():
    """All-reduces in the backward pass and keeps its own part.

    hint: times the parameters
    """

    class Zero2(Zero2):
        def mean_gradient(self, unit):
            flat = unit.gradients()
            dist.all_reduce(flat)
            return unit.parts(flat)[self.rank].clone() / self.size


def counts_twice():
    """Adds to the shard and keeps the whole gradients: the next backward pass counts them again.

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

    hint: does every rank get every other rank's part
    """

    class Zero2(Zero2):
        def step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()


def overwrites():
    """A second backward pass overwrites what the first one left.

    hint: the gradients of several backward passes must add up
    """

    class Zero2(Zero2):
        def after_backward(self, unit):
            unit.shard.grad = self.mean_gradient(unit)
            unit.forget_gradients()


def reduces_again_in_step():
    """Reduces in the backward pass, and once more in step(), as stage 1 does.

    hint: did not change
    """

    class Zero2(Zero2):
        def step(self):
            for unit in self.units:
                unit.shard.grad = self.mean_gradient(unit)
            super().step()


def reduces_in_step():
    """Waits for step(), like stage 1: the whole gradients pile up.

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

    hint: are the gradients of a step forgotten
    """

    class Zero2(Zero2):
        def step(self):
            self.optimizer.step()
            for unit in self.units:
                self.gather(unit)


def whole_gradients_stay():
    """Reduces early, and keeps the whole gradients until the step.

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
