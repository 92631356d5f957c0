"""Lab 13, the elastic loop: each body, written after the solution, is a wrong answer."""


def keeps_the_dirty_gradient():
    """Gradients add to what a failed all-reduce has left.

    kind: values
    hint: are the gradients new ones
    """

    def one_step(crew, model, velocity, step):
        rank, size = dist.get_rank(), dist.get_world_size()
        loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        for p in model.parameters():
            dist.all_reduce(p.grad)
        with torch.no_grad():
            for p, v in zip(model.parameters(), velocity):
                p -= crew.lr * v.mul_(crew.momentum).add_(p.grad)
        model.zero_grad()
        return total.item()


def uses_the_dirty_gradient():
    """What was computed before the failure is all-reduced once more.

    kind: values
    hint: are the gradients new ones | shares | rows
    """

    kept = {}

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        if step not in kept:
            loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
            gradients = torch.autograd.grad(loss, parameters)
            kept.clear()
            kept[step] = torch.cat([loss.detach().view(1), *[g.flatten() for g in gradients]])
        flat = kept[step]
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
        return flat[0].item()


def takes_the_first_ranks_state():
    """Everybody takes what the first rank of the group has, be it behind.

    kind: values
    hint: Whose state is the furthest | of the furthest | do not hold the same bits
    """

    def take_furthest(model, velocity, done):
        count = torch.tensor([done])
        dist.broadcast(count, 0)
        for tensor in (*model.parameters(), *velocity):
            dist.broadcast(tensor.data, 0)
        return int(count)


def takes_nobodys_state():
    """Each goes on from where it is.

    kind: values
    hint: are the ranks at different steps | of the furthest | did not complete
    """

    def take_furthest(model, velocity, done):
        return done


def takes_the_one_behind():
    """All go back to the state of the rank that has done least.

    kind: values
    hint: Whose state is the furthest | of the furthest | do not hold the same bits
    """

    def take_furthest(model, velocity, done):
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([done]))
        for tensor in (*model.parameters(), *velocity):
            dist.broadcast(tensor.data, counts.index(min(counts)))
        return int(min(counts))


def forgets_the_velocity():
    """Hands over the weights alone.

    kind: part
    hint: the weights and the velocity of the furthest | do not hold the same bits
    """

    def take_furthest(model, velocity, done):
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([done]))
        state = torch.cat([p.detach().flatten() for p in model.parameters()])
        dist.broadcast(state, counts.index(max(counts)))
        torch.nn.utils.vector_to_parameters(state, model.parameters())
        return int(max(counts))


def begins_with_no_velocity():
    """Every rank forgets its velocity when a group is made.

    kind: part
    hint: the weights and the velocity of the furthest | do not hold the same bits
    """

    furthest = take_furthest

    def take_furthest(model, velocity, done):
        done = furthest(model, velocity, done)
        for v in velocity:
            v.zero_()
        return done


def torn_state():
    """The state comes in several messages, each put in its place at once, the number first.

    kind: odd
    hint: and whole ones | at different steps | Whose state is the furthest | same bits
    """

    place = {}
    trained = train

    def take_furthest(model, velocity, done):
        done = max(done, place.get(id(model), 0))
        counts = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([done]))
        furthest = max(counts)
        if min(counts) == furthest:
            return done
        place[id(model)] = int(furthest)
        for tensor in (*model.parameters(), *velocity):
            dist.broadcast(tensor.data, counts.index(furthest))
        return int(furthest)


def loses_the_rows_of_the_dead():
    """Each rank keeps to the rows that it had.

    kind: part
    hint: ranks have | shared out over the ranks that are left
    """

    def one_step(crew, model, velocity, step):
        parameters, size = list(model.parameters()), len(crew.members)
        loss = crew.losses(model, step, range(crew.rank, crew.batch, size)).sum() / crew.batch
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
        return flat[0].item()


def rows_twice():
    """Parts that overlap where the batch does not divide.

    kind: sizes
    hint: times | ranks have | the vector of weights
    """

    import math

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        part = math.ceil(crew.batch / size)
        first = min(rank * part, crew.batch - part)
        loss = crew.losses(model, step, range(first, first + part)).sum() / (part * size)
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
        return flat[0].item()


def last_rows_left_out():
    """Whole shares only: what does not divide is learned by nobody.

    kind: sizes
    hint: ranks have | no times
    """

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        part = crew.batch // size
        loss = crew.losses(model, step, range(rank * part, (rank + 1) * part)).sum() / crew.batch
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
        return flat[0].item()


def mean_of_means():
    """Averages the ranks' means, whose rows are not equally many.

    kind: sizes
    hint: Is g the gradient of the mean over all rows | NaN | nan | are the gradients new ones
    """

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        loss = crew.losses(model, step, range(rank, crew.batch, size)).mean() / size
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
        return flat[0].item()


def divides_by_the_old_number():
    """A mean over as many ranks as there were in the beginning.

    kind: constants
    hint: are the gradients new ones
    """

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() * size / crew.batch
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        flat /= len(crew.members)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.mul_(crew.momentum).add_(part.view_as(p))
        return flat[0].item()


def rank_0_lives():
    """Rank 0 writes the list, the others wait for it.

    kind: odd
    hint: and train ends with it | no end after
    """

    meeting = meet

    def meet(crew, store, generation, before):
        if crew.rank == 0:
            return meeting(crew, store, generation, before)
        here = dist.PrefixStore(f"meeting {generation}", store)
        here.set(str(crew.rank), "")
        until = time.monotonic() + 4 * crew.patience
        while not here.check(["members"]) and time.monotonic() < until:
            time.sleep(0.01)
        return json.loads(here.get("members"))


def one_death_only():
    """The second failure ends the rank.

    kind: part
    hint: and train ends with it
    """

    failures = []
    meeting = meet

    def meet(crew, store, generation, before):
        if generation > 1:
            raise RuntimeError("a second rank has died")
        return meeting(crew, store, generation, before)


def a_recovery_does_not_fail():
    """The group is made, and the state handed over, where no failure is expected.

    kind: part
    hint: and train ends with it
    """

    def train(crew, model, steps):
        store, members = crew.store(), crew.members
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        done = generation = 0
        while True:
            members = meet(crew, store, generation, members)
            if crew.rank not in members:
                return False
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"group {generation}", store),
                rank=members.index(crew.rank),
                world_size=len(members),
                timeout=datetime.timedelta(seconds=crew.limit),
            )
            done = take_furthest(model, velocity, done)
            try:
                while done < steps:
                    loss = one_step(crew, model, velocity, done)
                    done += 1
                    crew.after(done - 1, model, loss)
                dist.barrier()
                return True
            except RuntimeError:
                generation += 1
            finally:
                dist.destroy_process_group()


def a_list_of_ones_own():
    """Each rank writes its own list of those who came.

    kind: odd
    hint: two crews | do not hold the same bits | lives | no end | two groups
    """

    def meet(crew, store, generation, before):
        here = dist.PrefixStore(f"meeting {generation}", store)
        here.set(str(crew.rank), "")
        until = time.monotonic() + crew.patience
        while not here.check([str(rank) for rank in before]) and time.monotonic() < until:
            time.sleep(0.01)
        return [rank for rank in before if here.check([str(rank)])]


def goes_on_alone():
    """Who is not on the list makes a crew of its own.

    kind: odd
    hint: two crews | furthest | same bits | makes a further step
    """

    meeting = meet

    def meet(crew, store, generation, before):
        members = meeting(crew, store, generation, before)
        return members if crew.rank in members else [crew.rank]


def joins_later():
    """Who is not on the list tries the next generation.

    kind: odd
    hint: two crews | no end | makes a further step
    """

    meeting = meet

    def meet(crew, store, generation, before):
        members = meeting(crew, store, generation, before)
        while crew.rank not in members:
            generation += 1
            members = meeting(crew, store, generation, before)
        return members


def does_not_wait():
    """Whoever comes first closes the list.

    kind: luck
    hint: until they close the list
    """

    def meet(crew, store, generation, before):
        here = dist.PrefixStore(f"meeting {generation}", store)
        here.set(str(crew.rank), "")
        came = [rank for rank in before if here.check([str(rank)])]
        return json.loads(here.compare_set("members", "", json.dumps(came)))


def a_list_of_the_number():
    """Closes the list when one less has come than were before: one death, it thinks.

    kind: luck
    hint: until they close the list
    """

    def meet(crew, store, generation, before):
        here = dist.PrefixStore(f"meeting {generation}", store)
        here.set(str(crew.rank), "")
        until = time.monotonic() + crew.patience
        wanted = len(before) - (generation > 0)
        while True:
            came = [rank for rank in before if here.check([str(rank)])]
            if len(came) >= wanted or here.check(["members"]) or time.monotonic() > until:
                return json.loads(here.compare_set("members", "", json.dumps(came)))
            time.sleep(0.01)


def impatient():
    """Closes the list when a collective would have failed: some have not noticed anything by then.

    kind: luck
    hint: until they close the list
    """

    meeting = meet

    def meet(crew, store, generation, before):
        class Impatient:
            rank, patience = crew.rank, crew.limit

        return meeting(Impatient, store, generation, before)


def one_meeting_for_all():
    """The keys are the same in each generation: the old list is found again.

    kind: constants
    hint: no end | no collective | groups were made
    """

    meeting = meet

    def meet(crew, store, generation, before):
        return meeting(crew, store, 0, before)


def no_time_limit():
    """The group has none: a stopped rank stops all.

    kind: end
    hint: no end after
    """

    real = dist.init_process_group

    class Unlimited:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def init_process_group(self, *args, timeout, **keywords):
            torch.distributed.init_process_group(*args, **keywords)

    dist = Unlimited()


def begins_anew():
    """After a failure, all steps again.

    kind: work
    hint: Whose state is the furthest | in this order | of the furthest
    """

    import copy

    trained = train

    def train(crew, model, steps):
        first = copy.deepcopy(model.state_dict())
        store, members = crew.store(), crew.members
        generation = 0
        while True:
            members = meet(crew, store, generation, members)
            if crew.rank not in members:
                return False
            model.load_state_dict(first)
            velocity = [torch.zeros_like(p) for p in model.parameters()]
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"group {generation}", store),
                    rank=members.index(crew.rank),
                    world_size=len(members),
                    timeout=datetime.timedelta(seconds=crew.limit),
                )
                for step in range(steps):
                    crew.after(step, model, one_step(crew, model, velocity, step))
                dist.barrier()
                return True
            except RuntimeError:
                generation += 1
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


def leaves_too_early():
    """Who has made the last step returns, and takes it along.

    kind: end
    hint: when rank | do not hold the same bits | lives
    """

    class NoBarrier:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def barrier(self):
            pass

    dist = NoBarrier()


def nobody_talks():
    """Every rank learns all rows: right weights, and no need for the others.

    kind: work
    hint: ranks have | Whose state is the furthest | calls no collective
    """

    def train(crew, model, steps):
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        parameters = list(model.parameters())
        for step in range(steps):
            loss = crew.losses(model, step, range(crew.batch)).mean()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, v, gradient in zip(parameters, velocity, gradients):
                    p -= crew.lr * v.mul_(crew.momentum).add_(gradient)
            crew.after(step, model, loss.item())
        return True


def the_state_in_each_step():
    """All take the furthest state before each step, whether they need it or not.

    kind: communication
    hint: in a step the gradients once
    """

    made = one_step

    def one_step(crew, model, velocity, step):
        for tensor in (*model.parameters(), *velocity):
            dist.broadcast(tensor.data, 0)
        return made(crew, model, velocity, step)


def gathers_the_gradients():
    """Every rank gets all gradients and adds them itself.

    kind: communication
    hint: in a step the gradients once
    """

    class Gathering:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def all_reduce(self, flat):
            parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, flat)
            flat.copy_(sum(parts))

    dist = Gathering()


def everybodys_state():
    """All states go to all, and each picks one.

    kind: communication
    hint: in a new group weights and
    """

    def take_furthest(model, velocity, done):
        own = [*model.parameters(), *velocity]
        state = torch.cat(
            [
                torch.tensor([float(done)], dtype=torch.float64),
                *[tensor.detach().flatten() for tensor in own],
            ]
        )
        states = [torch.empty_like(state) for _ in range(dist.get_world_size())]
        dist.all_gather(states, state)
        furthest = max(states, key=lambda one: one[0].item())
        parts = furthest[1:].split([tensor.numel() for tensor in own])
        with torch.no_grad():
            for tensor, part in zip(own, parts):
                tensor.copy_(part.view_as(tensor))
        return int(furthest[0])


def by_the_store():
    """The gradients go through the store.

    kind: communication
    hint: in a step the gradients once
    """

    class ByStore:
        count = 0

        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def all_reduce(self, flat):
            self.count += 1
            group = torch.distributed.group.WORLD
            store = torch.distributed.PrefixStore(f"sum {self.count}", group.get_group_store())
            rank, size = dist.get_rank(), dist.get_world_size()
            store.set(str(rank), json.dumps(flat.tolist()))
            total = sum(
                torch.tensor(json.loads(store.get(str(r))), dtype=flat.dtype) for r in range(size)
            )
            flat.copy_(total)

    dist = ByStore()


def old_rank_numbers():
    """A rank keeps its number in a smaller group.

    kind: values
    hint: no end after | and each has failed | train ends with it
    """

    class Old(list):
        def index(self, rank):
            return rank

    meeting = meet

    def meet(crew, store, generation, before):
        return Old(meeting(crew, store, generation, before))


def the_old_group_stays():
    """A new group is made where the old one still is.

    kind: end
    hint: elastic.py line
    """

    class Stays:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def destroy_process_group(self):
            pass

    dist = Stays()


def every_error_is_a_death():
    """An error of one's own is caught, again and again.

    kind: end
    hint: Is an error of your own caught each time
    """

    def one_step(crew, model, velocity, step):
        loss = crew.losses(model, step, range(crew.batch)).mean()
        flat = torch.zeros(3) + torch.zeros(4)
        return loss.item()


def counts_too_early():
    """The step counts as made when its gradients are sent.

    kind: odd
    hint: is right | failures | of the furthest
    """

    def train(crew, model, steps):
        store, members = crew.store(), crew.members
        velocity = [torch.zeros_like(p) for p in model.parameters()]
        done = generation = 0
        while True:
            members = meet(crew, store, generation, members)
            if crew.rank not in members:
                return False
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"group {generation}", store),
                    rank=members.index(crew.rank),
                    world_size=len(members),
                    timeout=datetime.timedelta(seconds=crew.limit),
                )
                done = take_furthest(model, velocity, done)
                while done < steps:
                    done += 1
                    loss = one_step(crew, model, velocity, done - 1)
                    crew.after(done - 1, model, loss)
                dist.barrier()
                return True
            except RuntimeError:
                generation += 1
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()


def slows_down_twice():
    """The velocity is damped before the gradients are there, and again when the step is repeated.

    kind: odd
    hint: are the gradients new ones
    """

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        for v in velocity:
            v.mul_(crew.momentum)
        loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                p -= crew.lr * v.add_(part.view_as(p))
        return flat[0].item()


def half_a_step():
    """Each parameter is changed when its own gradient has come: a failure leaves half a step.

    kind: odd
    hint: is right
    """

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
        gradients = torch.autograd.grad(loss, parameters)
        total = loss.detach().clone()
        dist.all_reduce(total)
        for p, v, gradient in zip(parameters, velocity, gradients):
            dist.all_reduce(gradient)
            with torch.no_grad():
                p -= crew.lr * v.mul_(crew.momentum).add_(gradient)
        return total.item()


def nesterov():
    """Another optimizer.

    kind: values
    hint: Is g the gradient of the mean over all rows | are the gradients new ones
    """

    def one_step(crew, model, velocity, step):
        rank, size, parameters = dist.get_rank(), dist.get_world_size(), list(model.parameters())
        loss = crew.losses(model, step, range(rank, crew.batch, size)).sum() / crew.batch
        flat = torch.cat(
            [loss.detach().view(1), *map(torch.flatten, torch.autograd.grad(loss, parameters))]
        )
        dist.all_reduce(flat)
        parts = flat[1:].split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, v, part in zip(parameters, velocity, parts):
                part = part.view_as(p)
                p -= crew.lr * (part + crew.momentum * v.mul_(crew.momentum).add_(part))
        return flat[0].item()


def in_single_precision():
    """The gradients travel as float32.

    kind: types
    hint: The digits that a float32 has are right | Is g the gradient
    """

    class Short:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def all_reduce(self, flat):
            short = flat.float()
            torch.distributed.all_reduce(short)
            flat.copy_(short)

    dist = Short()


def ones_own_loss():
    """Tells of the loss of its own rows.

    kind: part
    hint: It is the mean over the whole batch
    """

    made = one_step

    def one_step(crew, model, velocity, step):
        told = []

        class Crew:
            def __getattr__(self, name):
                return getattr(crew, name)

            def losses(self, *args):
                losses = crew.losses(*args)
                told.append(losses.detach().sum() / crew.batch)
                return losses

        made(Crew(), model, velocity, step)
        return told[-1]


def tells_before():
    """Tells of a step that is not made yet.

    kind: values
    hint: is right
    """

    class Early:
        def __init__(self, crew):
            self.crew, self.told = crew, None

        def __getattr__(self, name):
            return getattr(self.crew, name)

        def losses(self, model, step, which):
            import copy

            self.told = copy.deepcopy(model)
            return self.crew.losses(model, step, which)

        def after(self, step, model, loss):
            self.crew.after(step, self.told, loss)

    trained = train

    def train(crew, model, steps):
        return trained(Early(crew), model, steps)


def returns_nothing():
    """The last line is missing.

    kind: values
    hint: True says that it has done all steps
    """

    trained = train

    def train(crew, model, steps):
        trained(crew, model, steps)


def with_a_library():
    """DDP makes the gradients.

    kind: library
    hint: to be done by hand
    """

    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel
