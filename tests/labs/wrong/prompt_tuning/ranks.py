"""Lab 14, ranks: each body, written after the solution, is a wrong answer."""


def halved_once_more():
    """Divides by the tokens of all, and then by the ranks too.

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

    hint: half of it: the same rows are on both
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

    hint: The mean of two means
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

    hint: not one rank
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

    hint: It is that of this rank
    """

    def backward(model, prompt, tokens, targets, mesh):
        loss = loss_function(model)(forward(model, prompt, tokens), targets)
        loss.backward()
        return loss.item()


def row_by_row():
    """Adds up one virtual token at a time.

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
