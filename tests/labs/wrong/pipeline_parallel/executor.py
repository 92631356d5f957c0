"""Lab 08, executor: each body, written after the solution, is a wrong answer."""


def blocking_sends():
    """A send comes back when the other rank receives.

    kind: end
    hint: Who waits for whom? | did not complete
    """

    class Blocking:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            torch.distributed.send(tensor, to, tag=tag)
            return self

        def wait(self):
            return True

    dist = Blocking()


def one_after_another():
    """Waits for each send before the next action.

    kind: end
    hint: Who waits for whom? | did not complete
    """

    class Waiting:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            work = torch.distributed.isend(tensor, to, tag=tag)
            work.wait()
            return work

    dist = Waiting()


def without_numbers():
    """Messages have no numbers: what was sent first is received first.

    kind: values
    hint: is right | does not fit where it is received
    """

    class WithoutNumbers:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            return torch.distributed.isend(tensor, to)

        def recv(self, tensor, source, tag):
            return torch.distributed.recv(tensor, source)

    dist = WithoutNumbers()


def numbered_as_they_come():
    """Numbers messages in the order of the sends.

    kind: step
    hint: is right | does not fit where it is received | did not complete
    """

    class Counting:
        sent = received = 0

        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            self.sent += 1
            return torch.distributed.isend(tensor, to, tag=self.sent)

        def recv(self, tensor, source, tag):
            self.received += 1
            return torch.distributed.recv(tensor, source, tag=self.received)

    dist = Counting()


def forgets_the_handles():
    """Never waits for a send.

    kind: luck
    hint: nobody waits for an isend
    """

    class Forgetting:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            torch.distributed.isend(tensor, to, tag=tag)
            return self

        def wait(self):
            return True

    dist = Forgetting()


def does_not_wait_for_a_receive():
    """Computes with what is there.

    kind: luck
    hint: is right
    """

    class Hurried:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def recv(self, tensor, source, tag):
            works.append(torch.distributed.irecv(tensor, source, tag=tag))

    solved, works, dist = run, [], Hurried()

    def run(*given):
        total = solved(*given)
        while works:
            works.pop().wait()
        return total


def in_half_precision():
    """Sends two bytes a number.

    kind: types
    hint: is right | will do
    """

    class Half:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            return torch.distributed.isend(tensor.bfloat16(), to, tag=tag)

        def recv(self, tensor, source, tag):
            half = tensor.bfloat16()
            torch.distributed.recv(half, source, tag=tag)
            tensor.copy_(half)

    dist = Half()


def in_float32():
    """Receives fp32, whatever is sent.

    kind: types
    hint: does not fit where it is received | is right | RuntimeError
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        return solved(
            actions, stage, micro_batches, loss, lambda x: (boundary(x)[0], torch.float32)
        )


def rows_of_the_first():
    """Takes all micro-batches to be as large as the first one.

    kind: constants
    hint: does not fit where it is received | Error
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        return solved(actions, stage, micro_batches, loss, lambda x: boundary(micro_batches[0][0]))


def length_first():
    """Tells the length before each message.

    kind: communication
    hint: One message each way for a micro-batch.
    """

    class Header:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            lengths.append(torch.tensor([tensor.numel()]))
            works.append(torch.distributed.isend(lengths[-1], to, tag=1000 + tag))
            return torch.distributed.isend(tensor, to, tag=tag)

        def recv(self, tensor, source, tag):
            torch.distributed.recv(torch.zeros(1, dtype=torch.int64), source, tag=1000 + tag)
            torch.distributed.recv(tensor, source, tag=tag)

    solved, works, lengths, dist = run, [], [], Header()

    def run(*given):
        total = solved(*given)
        while works:
            works.pop().wait()
        return total


def everybody_knows_the_loss():
    """Broadcasts it.

    kind: communication
    hint: One message each way for a micro-batch. | only the last rank knows
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        total = solved(actions, stage, micro_batches, loss, boundary)
        total = torch.zeros(()).double() if total is None else total.double()
        dist.broadcast(total, dist.get_world_size() - 1)
        return total


def forward_passes_first():
    """Does what GPipe does.

    kind: part
    hint: and its list says
    """

    solved = run

    def run(actions, *given):
        return solved(sorted(actions, key=lambda action: action[0] == "B"), *given)


def divided_by_the_number():
    """Takes the mean of what should add up.

    kind: values
    hint: is right
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        return solved(
            actions, stage, micro_batches,
            lambda out, y: loss(out, y) / len(micro_batches), boundary,
        )  # fmt: skip


def last_loss_only():
    """Returns the loss of one micro-batch.

    kind: part
    hint: the sum of the losses
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        seen = []

        def noting(out, y):
            seen.append(loss(out, y))
            return seen[-1]

        solved(actions, stage, micro_batches, noting, boundary)
        return seen[-1].detach() if seen else None


def loss_with_its_graph():
    """Returns a sum that holds all graphs.

    kind: memory
    hint: has a history | is still held
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        seen = []

        def noting(out, y):
            seen.append(loss(out, y))
            return seen[-1]

        solved(actions, stage, micro_batches, noting, boundary)
        return sum(seen) if seen else None


def keeps_inputs_until_the_end():
    """Every input stays until the step is over.

    kind: memory
    hint: is still held when its B was done long ago
    """

    solved = run

    def run(actions, stage, *given):
        inputs = []

        def keeping(x):
            inputs.append(x)
            return stage(x)

        return solved(actions, keeping, *given)


def keeps_messages_until_the_end():
    """Every activation that was sent stays until the step is over.

    kind: memory
    hint: is still held when its B was done long ago
    """

    class Keeping:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            messages.append(tensor)
            return torch.distributed.isend(tensor, to, tag=tag)

    solved, messages, dist = run, [], Keeping()

    def run(*given):
        total = solved(*given)
        messages.clear()
        return total


def keeps_something_for_ever():
    """The module holds the latest output.

    kind: memory
    hint: bytes are still held when run has come back
    """

    solved, latest = run, {}

    def run(actions, stage, *given):
        def keeping(x):
            latest["out"] = stage(x)
            return latest["out"]

        return solved(actions, keeping, *given)


def runs_again_in_the_backward_pass():
    """Checkpoints the stage, which nobody has asked for.

    kind: work
    hint: and its list says
    """

    solved = run

    def run(actions, stage, *given):
        from torch.utils.checkpoint import checkpoint

        return solved(actions, lambda x: checkpoint(stage, x, use_reentrant=False), *given)


def begins_with_nothing():
    """Sets the gradients to None at first.

    kind: inputs
    hint: to what is there before
    """

    solved = run

    def run(actions, stage, *given):
        stage.zero_grad()
        return solved(actions, stage, *given)


def asks_inputs_for_gradients():
    """The micro-batches' own tensors get gradients.

    kind: inputs
    hint: x (it asks for a gradient now)
    """

    solved = run

    def run(actions, stage, micro_batches, *given):
        for x, _ in micro_batches:
            if x.is_floating_point():
                x.requires_grad_()
        return solved(actions, stage, micro_batches, *given)


def up_to_four_ranks():
    """Knows ranks 0 to 3.

    kind: sizes
    hint: is right | there is no gradient | did not complete | Error
    """

    solved = run

    def run(actions, stage, micro_batches, loss, boundary):
        def twice(out, y):
            return 2 * loss(out, y)

        known = dist.get_world_size() <= 4
        return solved(actions, stage, micro_batches, loss if known else twice, boundary)


def sixteen_numbers():
    """Has numbers from 0 to 15 for messages.

    kind: sizes
    hint: is right | does not fit where it is received | did not complete
    """

    class Few:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            return torch.distributed.isend(tensor, to, tag=tag % 16)

        def recv(self, tensor, source, tag):
            return torch.distributed.recv(tensor, source, tag=tag % 16)

    dist = Few()


def nothing_alone():
    """One rank has nobody to talk to, and does nothing.

    kind: odd
    hint: and its list says
    """

    solved = run

    def run(*given):
        if dist.get_world_size() == 1:
            return torch.zeros(())
        return solved(*given)


def library():
    """The course's own.

    kind: library
    hint: that is the library
    """

    def run(actions, stage, micro_batches, loss, boundary):
        from utils.parallel.mesh import make_mesh
        from utils.parallel.pipeline import Pipeline

        mesh = make_mesh(pp=dist.get_world_size())
        lists = [None] * mesh.pp.size
        dist.all_gather_object(lists, actions)
        return Pipeline([stage], mesh.pp, lists, loss, boundary=boundary).run(micro_batches)


def copies_until_the_end():
    """Sends a copy, and waits for all sends when the step is over.

    kind: memory
    hint: the message of micro-batch
    """

    class Copying:
        def __getattr__(self, name):
            return getattr(torch.distributed, name)

        def isend(self, tensor, to, tag):
            copies.append(tensor.clone())
            works.append(torch.distributed.isend(copies[-1], to, tag=tag))
            return self

        def wait(self):
            return True

    solved, works, copies, dist = run, [], [], Copying()

    def run(*given):
        total = solved(*given)
        while works:
            works.pop().wait()
        copies.clear()
        return total


def receives_into_what_is_like_the_output():
    """A gradient's place has the strides of the output.

    kind: inputs
    hint: contiguous
    """

    def run(actions, stage, micro_batches, loss, boundary):
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        kept, sends, total = {}, [], 0.0
        for kind, n in actions:
            x, y = micro_batches[n]
            if kind == "F":
                if rank > 0:
                    shape, dtype = boundary(x)
                    x = torch.empty(shape, dtype=dtype)
                    dist.recv(x, rank - 1, tag=n)
                    x.requires_grad_()
                out, sent = stage(x), None
                if rank < last:
                    sent = dist.isend(out.detach().contiguous(), rank + 1, tag=n)
                else:
                    out = loss(out, y)
                    total += out.detach()
                kept[n] = x, out, sent
            else:
                x, out, sent = kept.pop(n)
                gradient = None
                if rank < last:
                    gradient = torch.empty_like(out)
                    dist.recv(gradient, rank + 1, tag=n)
                    sent.wait()
                out.backward(gradient)
                if rank > 0:
                    sends.append(dist.isend(x.grad, rank - 1, tag=n))
        for sent in sends:
            sent.wait()
        return total if rank == last else None
