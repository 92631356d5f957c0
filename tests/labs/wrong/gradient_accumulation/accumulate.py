"""Lab 02, accumulate: each body, written after the solution, is a wrong answer."""


def divided_by_ranks():
    """Divides by the number of ranks, as DDP does.

    kind: values
    hint: divided by the number of ranks, not by the number of tokens
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

    kind: communication
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

    kind: part
    hint: It is that of the last micro-batch alone
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

    kind: communication
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

    kind: values
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

    kind: values
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

    kind: odd
    hint: still have no gradient
    """

    solution = reduce_once

    def reduce_once(model, losses, tokens):
        if tokens == 0:
            return 0.0
        return solution(model, losses, tokens)


def none_is_not_zero():
    """A rank without micro-batches has gradients that are None.

    kind: odd
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

    kind: values
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

    kind: values
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

    kind: memory
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

    kind: communication
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

    kind: part
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

    kind: values
    hint: the gradient at
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

    kind: values
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

    kind: part
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

    kind: types
    hint: Is there a float32 tensor on the way | a float32 has are right
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

    kind: part
    hint: accumulate returns None
    """

    def accumulate(model, micro_batches):
        for x, y in micro_batches:
            loss_sum(model, x, y).backward()


def talks_each_time():
    """All-reduces after each micro-batch.

    kind: communication
    hint: all_reduce
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


def twice_the_bytes():
    """fp64 numbers for fp32 gradients: twice the bytes.

    kind: communication
    hint: the gradients and two numbers are
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        numbers = torch.tensor([losses, tokens], dtype=torch.float64)
        message = torch.cat([*(p.grad.flatten().double() for p in parameters), numbers])
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def buffer_of_one_size():
    """A buffer as long as the gradients of the model that is given.

    kind: sizes
    hint: RuntimeError in accumulate.py line
    """

    BUFFER = torch.zeros(189, dtype=torch.float64)

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        BUFFER[:-2] = torch.cat([p.grad.flatten() for p in parameters])
        BUFFER[-2], BUFFER[-1] = losses, tokens
        dist.all_reduce(BUFFER)
        start = 0
        for p in parameters:
            p.grad.copy_((BUFFER[start : start + p.numel()] / BUFFER[-1]).view_as(p))
            start += p.numel()
        return (BUFFER[-2] / BUFFER[-1]).item()


def counts_in_the_gradients_type():
    """The message has the gradients' type: bf16 holds no count above 256.

    kind: types
    hint: In which type do the numbers travel
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
        return (message[-2] / message[-1]).item()


def counts_the_first_step():
    """Takes the number of tokens of the first step for that of all.

    kind: constants
    hint: step 2: the gradient at
    """

    TOKENS = []

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        numbers = torch.tensor([losses, tokens], dtype=dtype)
        message = torch.cat([*(p.grad.flatten().to(dtype) for p in parameters), numbers])
        dist.all_reduce(message)
        TOKENS.append(message[-1].item())
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / TOKENS[0]).view_as(p))
            start += p.numel()
        return (message[-2] / TOKENS[0]).item()


def does_not_wait():
    """An asynchronous all-reduce that nobody waits for.

    kind: luck
    hint: is right
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        numbers = torch.tensor([losses, tokens], dtype=dtype)
        message = torch.cat([*(p.grad.flatten().to(dtype) for p in parameters), numbers])
        dist.all_reduce(message, async_op=True)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def empties_the_list():
    """Takes the micro-batches out of the caller's list.

    kind: inputs
    hint: the caller's list of micro-batches is not what it was
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        while micro_batches:
            x, y = micro_batches.pop()
            loss = loss_sum(model, x, y)
            loss.backward()
            losses += loss.item()
            tokens += counted(y)
        return losses, tokens


def keeps_every_message():
    """Each step's message stays in a list.

    kind: memory
    hint: bytes of what was made are still held
    """

    MESSAGES = []

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        numbers = torch.tensor([losses, tokens], dtype=dtype)
        message = torch.cat([*(p.grad.flatten().to(dtype) for p in parameters), numbers])
        MESSAGES.append(message)
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def leaves_without_micro_batches():
    """A rank that has nothing to do ends its program.

    kind: end
    hint: the code leaves the program in accumulate.py line
    """

    solution = accumulate

    def accumulate(model, micro_batches):
        if not micro_batches:
            raise SystemExit
        return solution(model, micro_batches)


def marks_the_padding():
    """Writes a target that exists over the padding, to look it up.

    kind: inputs
    hint: targets is not what it was before the call
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            loss.backward()
            losses += loss.item()
            tokens += counted(y)
            y[y == -100] = 0
        return losses, tokens


def one_forward_ahead():
    """The next forward pass comes before the backward pass: two micro-batches are alive.

    kind: memory
    hint: Call backward for each micro-batch
    """

    def accumulate(model, micro_batches):
        losses, tokens, waiting = 0.0, 0, None
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            if waiting is not None:
                waiting.backward()
            waiting = loss
            losses += loss.item()
            tokens += counted(y)
        if waiting is not None:
            waiting.backward()
        return losses, tokens


def remembers_in_between():
    """reduce_once takes the sums that accumulate has remembered, not those it is given.

    kind: step
    hint: name 'SUMS' is not defined
    """

    solution, summed = accumulate, reduce_once

    def accumulate(model, micro_batches):
        global SUMS
        SUMS = solution(model, micro_batches)
        return SUMS

    def reduce_once(model, losses, tokens):
        return summed(model, *SUMS)


def skips_a_nan():
    """A rank with a NaN takes no part in the step.

    kind: odd
    hint: Do all ranks call the all-reduce
    """

    solution = reduce_once

    def reduce_once(model, losses, tokens):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if any(grad.isnan().any() for grad in grads):
            return float("nan")
        return solution(model, losses, tokens)


def waits_for_everybody():
    """A barrier around the all-reduce.

    kind: communication
    hint: reduce_once calls barrier
    """

    solution = reduce_once

    def reduce_once(model, losses, tokens):
        dist.barrier()
        return solution(model, losses, tokens)


def keeps_its_message():
    """One message for all steps: a copy of the gradients that stays.

    kind: memory
    hint: bytes of what was made are still held
    """

    MESSAGES = {}

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        length = sum(p.numel() for p in parameters) + 2
        message = MESSAGES.setdefault((length, dtype), torch.empty(length, dtype=dtype))
        numbers = torch.tensor([losses, tokens], dtype=dtype)
        torch.cat([*(p.grad.flatten().to(dtype) for p in parameters), numbers], out=message)
        dist.all_reduce(message)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def in_pieces():
    """Long messages travel in pieces of 4,096 numbers.

    kind: sizes
    hint: all-reduces in a step
    """

    def reduce_once(model, losses, tokens):
        parameters = list(model.parameters())
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        numbers = torch.tensor([losses, tokens], dtype=dtype)
        message = torch.cat([*(p.grad.flatten().to(dtype) for p in parameters), numbers])
        for piece in message.split(4096):
            dist.all_reduce(piece)
        start = 0
        for p in parameters:
            p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
            start += p.numel()
        return (message[-2] / message[-1]).item()


def losses_in_the_models_type():
    """Adds up the losses in the model's type: in bf16 the sum soon stops to grow.

    kind: types
    hint: In which type are they added up
    """

    def accumulate(model, micro_batches):
        losses, tokens = torch.zeros((), dtype=next(model.parameters()).dtype), 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            loss.backward()
            losses += loss.detach()
            tokens += counted(y)
        return losses.item(), tokens


def two_at_once_from_seven_on():
    """Joins two micro-batches to one where there are many.

    kind: sizes
    hint: at the end of a forward pass
    """

    solution = accumulate

    def accumulate(model, micro_batches):
        if len(micro_batches) < 7:
            return solution(model, micro_batches)
        pairs = [micro_batches[i : i + 2] for i in range(0, len(micro_batches), 2)]
        joined = [tuple(map(torch.cat, zip(*pair))) for pair in pairs]
        return solution(model, joined)


def retains_the_graph():
    """Each graph lives until the next one is made.

    kind: memory
    hint: at the end of a forward pass
    """

    def accumulate(model, micro_batches):
        losses, tokens = 0.0, 0
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            loss.backward(retain_graph=True)
            losses += loss.item()
            tokens += counted(y)
        return losses, tokens
