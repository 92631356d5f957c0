"""Lab 05, zero3: each body, written after the solution, is a wrong answer."""


def all_at_once():
    """Gathers the whole model before the first unit computes.

    kind: memory
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

    kind: values
    hint: NaN
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            unit.allocate()


def gathers_in_step():
    """Gathers after the step, as stage 2 does.

    kind: communication
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

    kind: values
    hint: allocate() first
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            self.gather(unit)


def kept_after_backward():
    """Nothing is released after the backward pass.

    kind: memory
    hint: of whole parameters are in memory in the backward pass
    """

    class Zero3(Zero3):
        def after_backward(self, unit):
            Zero2.after_backward(self, unit)


def kept_after_forward():
    """Keeps the parameters between forward and backward pass (FSDP calls this no reshard).

    kind: memory
    hint: of whole parameters are in memory after a forward pass
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            pass

        def before_backward(self, unit):
            pass


def kept_and_gathered_again():
    """Keeps the parameters after the forward pass and gathers them again all the same.

    kind: memory
    hint: of whole parameters are in memory
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            pass


def no_gather_in_backward():
    """Believes that the backward pass finds the parameters of the forward pass.

    kind: values
    hint: before_backward must gather them
    """

    class Zero3(Zero3):
        def before_backward(self, unit):
            pass


def no_reduction():
    """Releases after the backward pass and forgets what stage 2 does there.

    kind: values
    hint: does the optimizer find a gradient
    """

    class Zero3(Zero3):
        def after_backward(self, unit):
            unit.release()


def own_part_is_a_view():
    """The shard lies in the memory that is released.

    kind: memory
    hint: It needs memory of its own
    """

    class Zero3(Zero3):
        def own_part(self, unit):
            return unit.parts()[self.rank]


def shards_never_forgotten():
    """The shards' gradients stay after the step.

    kind: values
    hint: are the gradients of a step forgotten
    """

    class Zero3(Zero3):
        def step(self):
            self.optimizer.step()


def keeps_a_whole_copy():
    """Gathers once a step and keeps copies of all units.

    kind: memory
    hint: bytes of tensors are alive
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            unit.allocate()
            if getattr(unit, "copy", None) is None:
                self.gather(unit)
                unit.copy = unit.flat.clone()
            unit.flat.copy_(unit.copy)

        before_backward = before_forward

        def step(self):
            super().step()
            for unit in self.units:
                unit.copy = None


def gathered_late():
    """Begins to gather and lets the unit compute.

    kind: luck
    hint: is each waited for
    """

    class Zero3(Zero3):
        def gather(self, unit):
            unit.work = dist.all_gather(unit.parts(), unit.shard.data, async_op=True)


def waits_for_the_one_before():
    """Waits for the gather of the forward pass, not for that of the backward pass.

    kind: luck
    hint: is each waited for
    """

    class Zero3(Zero3):
        def before_backward(self, unit):
            unit.allocate()
            dist.all_gather(unit.parts(), unit.shard.data, async_op=True)


def all_reduced():
    """Fills its part and adds the ranks up.

    kind: communication
    hint: times the parameters
    """

    class Zero3(Zero3):
        def gather(self, unit):
            unit.flat.zero_()
            unit.parts()[self.rank].copy_(unit.shard.data)
            dist.all_reduce(unit.flat)


def pickled():
    """Gathers by objects.

    kind: communication
    hint: times the parameters
    """

    class Zero3(Zero3):
        def gather(self, unit):
            everyone = [None] * self.size
            dist.all_gather_object(everyone, unit.shard.data)
            unit.flat.copy_(torch.cat(everyone))


def barriers():
    """A barrier around each gather.

    kind: communication
    hint: barrier
    """

    class Zero3(Zero3):
        def gather(self, unit):
            dist.barrier()
            super().gather(unit)
            dist.barrier()


def training_only():
    """Gathers only where gradients are asked for.

    kind: part
    hint: before_forward must gather
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            if torch.is_grad_enabled():
                super().before_forward(unit)


def old_parameters():
    """Once gathered, the old parameters are taken again, from a copy by name.

    kind: constants
    hint: with 2 ranks
    """

    copies = {}

    class Zero3(Zero3):
        def before_forward(self, unit):
            super().before_forward(unit)
            unit.flat.copy_(copies.setdefault((unit.name, len(unit.flat)), unit.flat.clone()))


def last_unit_stays_whole():
    """Does not release the last unit, whose backward pass begins at once.

    kind: memory
    hint: of whole parameters are in memory
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            if unit is not self.units[-1]:
                unit.release()

        def before_backward(self, unit):
            if not unit.is_whole():
                super().before_backward(unit)


def prefetch():
    """Gathers the next unit while this one computes: two are whole.

    kind: memory
    hint: one computes, the others must be released
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            place = self.units.index(unit)
            for near in self.units[place : place + 2]:
                if not near.is_whole():
                    near.allocate()
                    self.gather(near)


def shard_in_half():
    """Gathers in half precision and widens.

    kind: types
    hint: numbers differ
    """

    class Zero3(Zero3):
        def gather(self, unit):
            everyone = [
                torch.empty_like(unit.shard.data, dtype=torch.float16) for _ in range(self.size)
            ]
            dist.all_gather(everyone, unit.shard.data.half())
            unit.flat.copy_(torch.cat(everyone))


def no_gradient_no_reduction():
    """A rank without rows does not reduce.

    kind: odd
    hint: Do all ranks call the same collectives
    """

    class Zero3(Zero3):
        def after_backward(self, unit):
            if any(parameter.grad.any() for parameter in unit.parameters):
                return super().after_backward(unit)
            unit.forget_gradients()
            unit.release()


def part_of_five_ranks():
    """The share of a sixth rank is lost.

    kind: sizes
    hint: with 6 ranks
    """

    class Zero3(Zero3):
        def gather(self, unit):
            super().gather(unit)
            unit.flat[5 * unit.length :] = 0


def fully_sharded():
    """torch's own.

    kind: library
    hint: that is the library
    """

    class Zero3(Zero3):
        def before_forward(self, unit):
            from torch.distributed.fsdp import fully_shard

            fully_shard(unit.module)


def endless():
    """Never comes back.

    kind: end
    hint: an endless loop?
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            while True:
                pass


def one_rank_keeps_all():
    """On one rank nothing is released: all parameters are there twice.

    kind: sizes
    hint: with 1 rank
    """

    class Zero3(Zero3):
        def after_forward(self, unit):
            if self.size > 1:
                super().after_forward(unit)
