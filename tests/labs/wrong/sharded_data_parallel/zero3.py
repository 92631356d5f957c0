"""Lab 05, zero3: each body, written after the solution, is a wrong answer."""


def all_at_once():
    """Gathers the whole model before the first unit computes.

    hint: one computes, the others must be released
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            if unit is self.units[0]:
                for every in self.units:
                    every.allocate()
                    self.gather(every)


def allocates_only():
    """Gets the memory back and does not fill it.

    hint: NaN
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            unit.allocate()


def gathers_in_step():
    """Gathers after the step, as stage 2 does.

    hint: step() communicates
    """

    class Zero3(Zero3):
        def step(self):
            self.optimizer.step()
            self.optimizer.zero_grad()
            for unit in self.units:
                unit.allocate()
                self.gather(unit)
                unit.release()


def gathers_into_nothing():
    """Gathers without getting the memory back first.

    hint: allocate() first
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            self.gather(unit)


def kept_after_backward():
    """Nothing is released after the backward pass.

    hint: of whole parameters are in memory in the backward pass
    """

    class Zero3(Zero3):
        def after_backward(self, unit):
            Zero2.after_backward(self, unit)


def kept_after_forward():
    """Keeps the parameters between forward and backward pass (FSDP calls this no reshard).

    hint: of whole parameters are in memory after a forward pass
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            pass

        def before_backward(self, unit):
            pass


def kept_and_gathered_again():
    """Keeps the parameters after the forward pass and gathers them again all the same.

    hint: of whole parameters are in memory
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            pass


def no_gather_in_backward():
    """Believes that the backward pass finds the parameters of the forward pass.

    hint: before_backward must gather them
    """

    class Zero3(Zero3):
        def before_backward(self, unit):
            pass


def no_reduction():
    """Releases after the backward pass and forgets what stage 2 does there.

    hint: does the optimizer find a gradient
    """

    class Zero3(Zero3):
        def after_backward(self, unit):
            unit.release()


def own_part_is_a_view():
    """The shard lies in the memory that is released.

    hint: It needs memory of its own
    """

    class Zero3(Zero3):
        def own_part(self, unit):
            return unit.parts()[self.rank]


def shards_never_forgotten():
    """The shards' gradients stay after the step.

    hint: are the gradients of a step forgotten
    """

    class Zero3(Zero3):
        def step(self):
            self.optimizer.step()
