"""Lab 14, ranks: each body, written after the solution, is a wrong answer."""


def halved_once_more():
    """Divides by the tokens of all, and then by the ranks too.

    kind: values
    hint: divided once more
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
            prompt.grad /= mesh.dp.size
        return loss.item()


def halved_over_tp():
    """Divides by the ranks that share the matrices.

    kind: values
    hint: the same rows are on all
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        prompt.grad /= mesh.tp.size
        return loss.item()


def loss_of_its_own():
    """The gradient is everybody's, the loss is this rank's part.

    kind: part
    hint: the gradient is right, and the loss is
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
        return loss.item()


def mean_of_means():
    """Averages the gradients, as DDP does: a token of the shorter answers weighs more.

    kind: values
    hint: The mean of two | divided once more
    """

    def backward(model, prompt, tokens, targets, mesh):
        loss = loss_function(model)(forward(model, prompt, tokens), targets)
        loss.backward()
        loss = loss.detach() / mesh.dp.size
        prompt.grad /= mesh.dp.size
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def mean_over_tp():
    """The mean of equal gradients: right, and a message for nothing.

    kind: communication
    hint: 0 of 0 bytes will do
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        if mesh.tp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.tp.group)
            prompt.grad /= mesh.tp.size
        return loss.item()


def not_added_up():
    """Nobody tells the others: every copy of the prompt learns something else.

    kind: part
    hint: who adds up those of the others | The mean of two
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        pass
        return loss.item()


def own_rows():
    """Knows its own rows only.

    kind: part
    hint: It is that of this rank | The mean of two
    """

    def backward(model, prompt, tokens, targets, mesh):
        loss = loss_function(model)(forward(model, prompt, tokens), targets)
        loss.backward()
        return loss.item()


def row_by_row():
    """Adds up one virtual token at a time.

    kind: communication
    hint: messages of
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            for row in prompt.grad:
                dist.all_reduce(row, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def summed_over_everybody():
    """Adds up over all ranks there are, whatever they share.

    kind: communication
    hint: added up over tp
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(prompt.grad)
        if mesh.dp.size > 1:
            dist.all_reduce(loss)
        return loss.item()


def summed_over_tp():
    """Adds the gradient up over the ranks that share the matrices.

    kind: values
    hint: added up over tp
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        if mesh.tp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.tp.group)
        return loss.item()


def counts_in_bf16():
    """Sends the number of tokens in the prompt's type.

    kind: types
    hint: the gradient is right, and the loss is
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().to(prompt.dtype)
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def does_not_wait():
    """Asks for the sum and does not wait for it.

    kind: luck
    hint: prompt.grad
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group, async_op=True)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def nothing_to_say():
    """A rank without tokens that count goes home.

    kind: odd
    hint: did not complete | prompt.grad is None | do not hold | a message does not fit
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if not total:
            return 0.0
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def first_count():
    """Asks for the number of tokens once and for all.

    kind: constants
    hint: is right | are still held
    """

    known = {}

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size not in known:
            dist.all_reduce(total, group=mesh.dp.group) if mesh.dp.size > 1 else None
            known[mesh.dp.size] = total
        total = known[mesh.dp.size]
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def gathers_everything():
    """Gathers all gradients and adds them up.

    kind: communication
    hint: besides the model's own
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            parts = [torch.empty_like(prompt.grad) for _ in range(mesh.dp.size)]
            dist.all_gather(parts, prompt.grad, group=mesh.dp.group)
            prompt.grad = torch.stack(parts).sum(0)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def a_barrier_before():
    """Waits for everybody first.

    kind: communication
    hint: besides the model's own
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        dist.barrier()
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def keeps_the_past():
    """Keeps the loss with its pass.

    kind: memory
    hint: are still held
    """

    past = []

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward(retain_graph=True)
        past.append(loss)
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def moves_the_prompt():
    """Makes a step, too.

    kind: inputs
    hint: prompt is not what it was before the call
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        prompt.data -= 0.1 * prompt.grad
        return loss.item()


def two_ranks():
    """Divides by two, as if there were no more ranks.

    kind: sizes
    hint: prompt.grad at
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        if mesh.dp.size > 1:
            dist.all_reduce(total, group=mesh.dp.group)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss = loss * 2 / max(2, mesh.dp.size)
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def world_for_all():
    """Adds the number of tokens up over all ranks there are.

    kind: sizes
    hint: prompt.grad at | prompt.grad is | besides the model's own
    """

    def backward(model, prompt, tokens, targets, mesh):
        total = (targets != IGNORED).sum().float()
        losses = loss_function(model)
        dist.all_reduce(total)
        loss = losses(forward(model, prompt, tokens), targets, reduction="sum") / total
        loss.backward()
        loss = loss.detach()
        if mesh.dp.size > 1:
            dist.all_reduce(prompt.grad, group=mesh.dp.group)
            dist.all_reduce(loss, group=mesh.dp.group)
        return loss.item()


def the_library():
    """Uses what the course adds prompts up with.

    kind: library
    hint: that is the library
    """

    right_backward = backward

    def backward(model, prompt, tokens, targets, mesh):
        from importlib import import_module

        library = import_module("utils.prom" + "pts.embedding")
        with library.prompted(model, prompt.detach()):
            model(tokens)
        return right_backward(model, prompt, tokens, targets, mesh)
