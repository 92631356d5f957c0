"""Lab 02, accumulate: each body, written after the solution, is a wrong answer."""


def divided_by_ranks():
    """Divides by the number of ranks, as DDP does.

    hint: as many as there are tokens: divide
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_(message[start : start + p.numel()].view_as(p) / dist.get_world_size())
            start += p.numel()
        return (message[-2] / message[-1]).item()


def gather_to_all():
    """Gathers everybody's gradients and adds them up: N times the bytes.

    hint: reduce_once calls all_gather
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        parts = [torch.empty_like(message) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, message)
        message = sum(parts)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def last_micro_batch_only():
    """Zeroes the gradients for each micro-batch.

    hint: Are all numbers copied back
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            model.zero_grad()
            loss.backward()
            losses += loss.item()
            tokens += counted(y)
        return losses, tokens


def loss_apart():
    """Sends the tokens and the loss in a message of their own.

    hint: 2 all-reduces in a step
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        dist.all_reduce(numbers)
        message = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / numbers[1]).view_as(p))
            start += p.numel()
        return (numbers[0] / numbers[1]).item()


def mean_gradients():
    """Reports the sums rightly, but lets the means go backward, and divides by the ranks.

    hint: adds up the micro-batches' means
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            (loss / max(counted(y), 1)).backward()
            losses += loss.item()
            tokens += counted(y)
        return losses, tokens

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / dist.get_world_size()).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def mean_of_means():
    """Each micro-batch's mean loss, divided by their number: the bug of famous trainers.

    hint: A sum, not a mean
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y) / max(counted(y), 1) / len(micro_batches)
            loss.backward()
            losses += loss.item()
            tokens += counted(y)
        return losses, tokens


def no_gradient_no_part():
    """A rank without micro-batches does not take part: the others wait for it.

    hint: Do all ranks call the all-reduce
    """

    solution = reduce_once

    def reduce_once(model, losses, tokens):
        if tokens == 0:
            return 0.0
        return solution(model, losses, tokens)


def none_is_not_zero():
    """A rank without micro-batches has gradients that are None.

    hint: NoneType
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def not_copied_back():
    """The sums stay in the message.

    hint: Are all numbers copied back
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.div_(message[-1])
            start += p.numel()
        return (message[-2] / message[-1]).item()


def not_divided():
    """Leaves the sum of the gradients as it is.

    hint: as many as there are tokens: divide
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_(message[start : start + p.numel()].view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def one_backward_for_all():
    """Adds the losses up and goes backward once: all graphs live until the end.

    hint: Call backward for each micro-batch
    """

    def accumulate(model, micro_batches):
        if not micro_batches:
            return 0.0, 0
        loss = sum(loss_sum(model, x, y) for x, y in micro_batches)
        loss.backward()
        return loss.item(), sum(counted(y) for _, y in micro_batches)


def one_per_parameter():
    """One all-reduce for each parameter.

    hint: where one is enough
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        numbers = parameters[0].new_tensor([losses, tokens])
        dist.all_reduce(numbers)
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad /= numbers[1]
        return (numbers[0] / numbers[1]).item()


def own_loss():
    """Returns the mean loss of this rank's own tokens.

    hint: the mean loss over the tokens of all ranks
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return losses / max(tokens, 1)


def own_tokens():
    """Divides by the tokens of this rank.

    hint: divided by the tokens of this rank
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_(message[start : start + p.numel()].view_as(p) / max(tokens, 1))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def padding_counts():
    """Counts positions, not tokens that count.

    hint: Padding (the target -100) does not count
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            loss.backward()
            losses += loss.item()
            tokens += y.numel()
        return losses, tokens


def returns_nothing():
    """Forgets to return the loss.

    hint: reduce_once returns nothing
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = parameters[0].new_tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return None


def sums_in_float32():
    """Puts the two sums into a float32 tensor: the loss is right to seven digits only.

    hint: Is there a float32 tensor on the way
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = torch.tensor([losses, tokens])
        message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def sums_not_returned():
    """Does the work and forgets to return the sums.

    hint: accumulate returns None
    """

    def accumulate(model, micro_batches):
        for x, y in micro_batches:
            loss_sum(model, x, y).backward()


def talks_each_time():
    """All-reduces after each micro-batch.

    hint: accumulate communicates
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            losses += loss.item()
            tokens += counted(y)
        return losses, tokens
