"""Lab 05, zero1: each body, written after the solution, is a wrong answer."""


def all_reduce():
    """All-reduces the gradients, throws away all but its own part: right values, half more bytes.

    hint: sends 3 times the parameters
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            flat = unit.gradients()
            dist.all_reduce(flat)
            return unit.parts(flat)[self.rank] / self.size


def broadcasts():
    """Gathers by one broadcast from each rank: the right bytes, in too many messages.

    hint: in too many pieces
    """

    class Zero1(Zero1):
        def gather(self, unit):
            for rank, part in enumerate(unit.parts()):
                dist.broadcast(part, src=rank)


def everything_is_mine():
    """The optimizer gets all parameters: nothing is shared out.

    hint: own_part has the shape
    """

    class Zero1(Zero1):
        def own_part(self, unit):
            return unit.flat


def first_part_everywhere():
    """Every rank believes that part 0 is its own.

    hint: differ from one rank's
    """

    class Zero1(Zero1):
        def own_part(self, unit):
            return unit.parts()[0]


def forgotten_gather():
    """Every rank updates its own part, and nobody tells the others.

    hint: does every rank get every other rank's part
    """

    class Zero1(Zero1):
        def gather(self, unit):
            pass


def gradients_stay():
    """The whole gradients are not forgotten, so the next step adds to them.

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

    hint: times too large: a sum over the ranks
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            mine = torch.empty_like(unit.shard)
            dist.reduce_scatter(mine, unit.parts(unit.gradients()))
            return mine


def no_gradient_for_the_shard():
    """The mean gradient goes nowhere: the optimizer skips parameters without .grad.

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

    hint: is it the mean over all ranks
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            return unit.parts(unit.gradients())[self.rank].clone()


def own_part_is_a_copy():
    """The optimizer changes a copy, and the model keeps the old values.

    hint: own_part is a copy
    """

    class Zero1(Zero1):
        def own_part(self, unit):
            return unit.parts()[self.rank].clone()


def shard_gradients_stay():
    """The shards keep the gradients of the last step until the next one.

    hint: after step() unit.shard.grad still holds
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

    hint: in too many pieces
    """

    class Zero1(Zero1):
        def mean_gradient(self, unit):
            flat, mine = unit.gradients(), torch.empty_like(unit.shard)
            dist.reduce(flat, dst=0)
            dist.scatter(mine, unit.parts(flat) if self.rank == 0 else None, src=0)
            return mine / self.size
