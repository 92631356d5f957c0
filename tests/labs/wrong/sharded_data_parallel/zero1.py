"""Lab 05, zero1: each body, written after the solution, is a wrong answer."""


def all_reduce():
    """All-reduces the gradients, throws away all but its own part: right values, half more bytes.

    kind: communication
    hint: sends 3 times the parameters
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            flat = unit.gradients()
            dist.all_reduce(flat)
            return unit.parts(flat)[self.rank] / self.size


def broadcasts():
    """Gathers by one broadcast from each rank: the right bytes, in too many messages.

    kind: communication
    hint: in one collective
    """

    class Zero1(Zero1):
        def gather(self, unit):
            for rank, part in enumerate(unit.parts()):
                dist.broadcast(part, src=rank)


def everything_is_mine():
    """The optimizer gets all parameters: nothing is shared out.

    kind: memory
    hint: own_part has the shape
    """

    class Zero1(Zero1):
        def own_part(self, unit):
            return unit.flat


def first_part_everywhere():
    """Every rank believes that part 0 is its own.

    kind: values
    hint: Is part r of the mean gradient on rank r
    """

    class Zero1(Zero1):
        def own_part(self, unit):
            return unit.parts()[0]


def forgotten_gather():
    """Every rank updates its own part, and nobody tells the others.

    kind: values
    hint: does every rank get every other rank's part
    """

    class Zero1(Zero1):
        def gather(self, unit):
            pass


def gradients_stay():
    """The whole gradients are not forgotten, so the next step adds to them.

    kind: memory
    hint: are the gradients of a step forgotten
    """

    class Zero1(Zero1):
        def step(self):
            for unit in self.units:
                unit.shard.grad = self.mean_gradient(unit)
            self.optimizer.step()
            for unit in self.units:
                self.gather(unit)


def missing_mean():
    """Sums the ranks' gradients and forgets to divide.

    kind: values
    hint: times too large: a sum over the ranks
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            mine = torch.empty_like(unit.shard)
            dist.reduce_scatter(mine, unit.parts(unit.gradients()))
            return mine


def no_gradient_for_the_shard():
    """The mean gradient goes nowhere: the optimizer skips parameters without .grad.

    kind: values
    hint: does the optimizer find a gradient
    """

    class Zero1(Zero1):
        def step(self):
            for unit in self.units:
                unit.gradient = self.mean_gradient(unit)
                unit.forget_gradients()
            self.optimizer.step()
            for unit in self.units:
                self.gather(unit)


def own_gradient_only():
    """Takes its part of its own gradients: what the other ranks have learned is lost.

    kind: values
    hint: is it the mean over all ranks
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            return unit.parts(unit.gradients())[self.rank].clone()


def own_part_is_a_copy():
    """The optimizer changes a copy, and the model keeps the old values.

    kind: memory
    hint: own_part is a copy
    """

    class Zero1(Zero1):
        def own_part(self, unit):
            return unit.parts()[self.rank].clone()


def shard_gradients_stay():
    """The shards keep the gradients of the last step until the next one.

    kind: memory
    hint: step() .grad still holds
    """

    class Zero1(Zero1):
        def step(self):
            for unit in self.units:
                unit.shard.grad = self.mean_gradient(unit)
                unit.forget_gradients()
            self.optimizer.step()
            for unit in self.units:
                self.gather(unit)


def through_rank_0():
    """Rank 0 adds up and shares out, as a parameter server would.

    kind: communication
    hint: in one collective
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            flat, mine = unit.gradients(), torch.empty_like(unit.shard)
            dist.reduce(flat, dst=0)
            dist.scatter(mine, unit.parts(flat) if self.rank == 0 else None, src=0)
            return mine / self.size


def all_gather_and_sum():
    """Gathers everybody's whole gradients and adds up its own part.

    kind: communication
    hint: times the parameters
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            mine = unit.gradients()
            everyone = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(everyone, mine)
            return sum(unit.parts(flat)[self.rank] for flat in everyone) / self.size


def double_buffer():
    """Sends every gradient in double precision.

    kind: types
    hint: times the parameters
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            mine = torch.empty_like(unit.shard, dtype=torch.float64)
            dist.reduce_scatter(mine, unit.parts(unit.gradients().double()))
            return (mine / self.size).to(unit.shard.dtype)


def half_on_the_wire():
    """Saves bytes by rounding.

    kind: types
    hint: numbers differ
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            mine = torch.empty_like(unit.shard, dtype=torch.float32)
            dist.reduce_scatter(mine, unit.parts(unit.gradients().float()))
            return (mine / self.size).to(unit.shard.dtype)


def last_handle_only():
    """Begins all gathers and waits for the last one.

    kind: luck
    hint: is each waited for
    """

    class Zero1(Zero1):
        def step(self):
            for unit in self.units:
                unit.shard.grad = self.mean_gradient(unit)
                unit.forget_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()
            works = [
                dist.all_gather(unit.parts(), unit.shard.data, async_op=True) for unit in self.units
            ]
            works[-1].wait()


def handles_kept():
    """Keeps the handles of all steps, and with them their messages.

    kind: memory
    hint: What is kept that nobody needs
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            flat, mine = unit.gradients(), torch.empty_like(unit.shard)
            work = dist.reduce_scatter(mine, unit.parts(flat), async_op=True)
            work.wait()
            self.works = [*getattr(self, "works", []), (work, flat)]
            return mine / self.size


def no_rows_no_message():
    """A rank whose gradients are zero does not take part.

    kind: odd
    hint: Do all ranks call the same collectives
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            if not unit.gradients().any():
                return torch.zeros_like(unit.shard)
            return super().mean_gradient(unit)


def needs_every_gradient():
    """Reads .grad of parameters that have none.

    kind: odd
    hint: 'NoneType' object has no attribute
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            flat = torch.zeros_like(unit.flat)
            for view, parameter in zip(unit.views(flat), unit.parameters):
                view.copy_(parameter.grad.detach())
            mine = torch.empty_like(unit.shard)
            dist.reduce_scatter(mine, unit.parts(flat))
            return mine / self.size


def rows_are_averaged():
    """Counts only ranks that have a gradient.

    kind: odd
    hint: counts, as zeros
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            mine = unit.gradients()
            theirs = torch.empty_like(mine)
            dist.all_to_all_single(theirs, mine)
            theirs = theirs.view(self.size, -1)
            return theirs.sum(dim=0) / max(int(theirs.any(dim=1).sum()), 1)


def two_ranks():
    """Divides by the two ranks that it was tried with.

    kind: sizes
    hint: with 3 ranks
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            return super().mean_gradient(unit) * self.size / 2


def four_ranks():
    """Beyond four ranks it gathers too little.

    kind: sizes
    hint: with 5 ranks
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            return super().mean_gradient(unit) * self.size / min(self.size, 4)


def nan_is_skipped():
    """Leaves a step out where its own gradients are not finite.

    kind: odd
    hint: nan is right
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            return super().mean_gradient(unit).nan_to_num()


def first_length():
    """Remembers the division of the first unit for all.

    kind: constants
    hint: in zero.py line
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            if not hasattr(self, "mine"):
                self.mine = torch.empty_like(unit.shard)
            dist.reduce_scatter(self.mine, unit.parts(unit.gradients()))
            return self.mine / self.size


def one_learning_rate():
    """Makes its own step, with the learning rate that it has seen.

    kind: constants
    hint: numbers differ
    """

    class Zero1(Zero1):
        def step(self):
            for unit in self.units:
                unit.shard.data -= 0.5 * self.mean_gradient(unit)
                unit.forget_gradients()
                self.gather(unit)


def graph_of_steps():
    """Copies the shard, a parameter, into the flat tensor: autograd notes it.

    kind: memory
    hint: requires a gradient
    """

    class Zero1(Zero1):
        def gather(self, unit):
            everyone = [torch.empty_like(unit.shard.data) for _ in range(self.size)]
            dist.all_gather(everyone, unit.shard.data)
            everyone[self.rank] = unit.shard
            unit.flat.copy_(torch.cat(everyone))


def only_weights():
    """Shares out the first parameter of a unit and forgets the others.

    kind: part
    hint: numbers differ
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            for parameter in unit.parameters[1:]:
                parameter.grad = None
            return super().mean_gradient(unit)


def last_unit_stays():
    """Does not gather the last unit.

    kind: part
    hint: does every rank get every other rank's part
    """

    class Zero1(Zero1):
        def gather(self, unit):
            if unit is not self.units[-1]:
                super().gather(unit)


def ends():
    """Leaves the program after its step.

    kind: end
    hint: the code leaves the program
    """

    class Zero1(Zero1):
        def step(self):
            super().step()
            raise SystemExit


def by_the_library():
    """torch has a class for it.

    kind: library
    hint: uses ZeroRedundancyOptimizer
    """

    class Zero1(Zero1):
        def __init__(self, modules, make_optimizer):
            from torch.distributed.optim import ZeroRedundancyOptimizer

            super().__init__(modules, make_optimizer)
            self.library = ZeroRedundancyOptimizer


def every_other_step_by_luck():
    """A random choice that all ranks make alike only if their generators are in step.

    kind: step
    hint: with 2 ranks
    """

    class Zero1(Zero1):
        def gather(self, unit):
            if torch.rand(1) < 0.7:
                super().gather(unit)


def a_view_of_the_whole():
    """The mean gradient is a view of all ranks' gradients, which live as long as it does.

    kind: memory
    hint: Is a gradient a view of the whole ones
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            parts = unit.parts(unit.gradients())
            mine = torch.empty_like(unit.shard)
            dist.reduce_scatter(mine, parts)
            return parts[self.rank].copy_(mine).div_(self.size)


def large_units_in_pieces():
    """A unit above 50,000 numbers is gathered in two messages.

    kind: sizes
    hint: will do
    """

    class Zero1(Zero1):
        def gather(self, unit):
            if unit.flat.numel() < 50_000:
                super().gather(unit)
                return
            for half in (slice(unit.length // 2), slice(unit.length // 2, None)):
                mine = unit.shard.data[half].clone()
                dist.all_gather([part[half] for part in unit.parts()], mine)


def nothing_computed_nothing_sent():
    """A rank without a gradient in a unit leaves the others alone in their reduce-scatter.

    kind: odd
    hint: Do all ranks call the same collectives | does not fit
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            if all(parameter.grad is None for parameter in unit.parameters):
                return torch.zeros_like(unit.shard)
            return super().mean_gradient(unit)


def gathers_until_the_next_forward():
    """The parameters are those of the step before until their unit computes again.

    kind: luck
    hint: did not change | The ranks differ | must travel
    """

    class Zero1(Zero1):
        def gather(self, unit):
            work = dist.all_gather(unit.parts(), unit.shard.data, async_op=True)
            hooks = []

            def wait(*_):
                work.wait()
                while hooks:
                    hooks.pop().remove()

            hooks.append(unit.module.register_forward_pre_hook(wait))
