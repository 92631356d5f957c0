"""Lab 02, ddp: each body, written after the solution, is a wrong answer."""


def clips_each_micro_batch():
    """Clips after each micro-batch.

    kind: values
    hint: Clip once, the accumulated gradient
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            clip_grad_norm_(model.parameters(), max_norm)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def does_not_clip():
    """Forgets to clip.

    kind: part
    hint: at the optimizer's step. Clip before
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def first_one_synchronized():
    """Synchronizes the first micro-batch instead of the last.

    kind: values
    hint: hold different models
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i > 0 else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def flag_after_the_forward():
    """Sets DDP's flag after the forward pass: the count is right, the sum is not.

    kind: values
    hint: DDP reads the flag in the forward pass
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            loss = loss_sum(model, x, y)
            model.require_backward_grad_sync = i == last
            (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def mean_of_means():
    """Each micro-batch's mean, divided by their number.

    kind: values
    hint: mean of the micro-batches' means
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss / max(counted(y), 1) / len(micro_batches)).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def never_synchronized():
    """All micro-batches inside no_sync, the last one too.

    kind: communication
    hint: never all-reduced
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        for x, y in micro_batches:
            with model.no_sync():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def no_no_sync():
    """An all-reduce for each micro-batch.

    kind: communication
    hint: all-reduces of gradients, and one is enough | the gradients are never all-reduced
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        for x, y in micro_batches:
            loss = loss_sum(model, x, y)
            (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def not_zeroed():
    """Never zeroes the gradients.

    kind: part
    hint: gradients are left over after the step
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / tokens


def only_the_backward():
    """Only the backward pass stands inside no_sync: an all-reduce each time.

    kind: communication
    hint: Is the *forward* pass inside no_sync
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            loss = loss_sum(model, x, y)
            with model.no_sync() if i < last else nullcontext():
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def own_loss():
    """Returns the loss of this rank's tokens only.

    kind: part
    hint: the mean loss over the tokens of all ranks
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total.item() / tokens


def own_tokens():
    """Counts the tokens of this rank only.

    kind: values
    hint: tokens_of_all returns
    """

    def tokens_of_all(micro_batches):
        return sum(counted(y) for _, y in micro_batches)


def padding_counts():
    """Counts positions, not tokens that count.

    kind: values
    hint: tokens_of_all returns
    """

    def tokens_of_all(micro_batches):
        tokens = torch.tensor(sum(y.numel() for _, y in micro_batches))
        dist.all_reduce(tokens)
        return tokens.item()


def ranks_forgotten():
    """Forgets that DDP divides by the number of ranks.

    kind: values
    hint: DDP takes the mean over the ranks
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def reduces_again():
    """All-reduces by hand what DDP has reduced already.

    kind: communication
    hint: DDP does all of them itself
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def steps_inside_the_loop():
    """One optimizer step for each micro-batch.

    kind: values
    hint: optimizer steps. One is right
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        dist.all_reduce(total)
        return total.item() / tokens


def zeroes_before_the_step():
    """Zeroes the gradients before the step.

    kind: values
    hint: was it set to zero before the optimizer's step
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.zero_grad()
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / tokens


def zeroes_inside_the_loop():
    """Zeroes the gradients for each micro-batch: only the last counts.

    kind: part
    hint: Does every micro-batch count
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            optimizer.zero_grad()
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def activations_of_all():
    """One backward pass for all micro-batches: all graphs live until then.

    kind: memory
    hint: at the end of a forward pass
    """

    def backward(model, micro_batches, tokens):
        losses = [loss_sum(model.module, x, y) for x, y in micro_batches[:-1]]
        losses.append(loss_sum(model, *micro_batches[-1]))
        loss = sum(losses)
        (loss * dist.get_world_size() / tokens).backward()
        return loss.detach().double()


def always_three():
    """Takes the third micro-batch for the last one.

    kind: sizes
    hint: all-reduces of gradients, and one is enough | the gradients are never all-reduced
    """

    def backward(model, micro_batches, tokens):
        total = torch.zeros((), dtype=torch.float64)
        last = min(len(micro_batches), 3) - 1 if len(micro_batches) > 1 else 1
        for i, (x, y) in enumerate(micro_batches):
            with nullcontext() if i == last or i == 3 else model.no_sync():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        return total


def counts_in_fp32():
    """fp32 holds no odd number above 2²⁴.

    kind: types
    hint: tokens_of_all returns
    """

    def tokens_of_all(micro_batches):
        tokens = torch.tensor(float(sum(counted(y) for _, y in micro_batches)))
        dist.all_reduce(tokens)
        return int(tokens.item())


def counts_once():
    """The number of tokens of the first step is taken for that of all.

    kind: constants
    hint: step 2: what train_step returns | step 2: the gradient
    """

    TOKENS = []

    def train_step(model, micro_batches, optimizer, max_norm):
        TOKENS.append(tokens_of_all(micro_batches))
        total = backward(model, micro_batches, TOKENS[0])
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / TOKENS[0]


def does_not_wait():
    """Nobody waits for the sum of the losses.

    kind: luck
    hint: what train_step returns | the loss of rank
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = backward(model, micro_batches, tokens)
        dist.all_reduce(total, async_op=True)
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total.item() / tokens


def gathers_the_losses():
    """Pickled losses, gathered by all.

    kind: communication
    hint: a call of all_gather
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = backward(model, micro_batches, tokens)
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses = [None] * dist.get_world_size()
        dist.all_gather_object(losses, total.item())
        return sum(losses) / tokens


def keeps_the_micro_batches_gradients():
    """A copy of the gradients after each micro-batch stays in a list.

    kind: memory
    hint: bytes of what train_step made are still held
    """

    HISTORY = []

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = backward(model, micro_batches, tokens)
        clip_grad_norm_(model.parameters(), max_norm)
        HISTORY.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def longest_first():
    """Sorts the caller's list.

    kind: inputs
    hint: the caller's list of micro-batches is not what it was
    """

    solution = train_step

    def train_step(model, micro_batches, optimizer, max_norm):
        micro_batches.reverse()
        return solution(model, micro_batches, optimizer, max_norm)


def norm_of_this_rank():
    """Clips by a norm of half of the parameters.

    kind: part
    hint: the gradient, clipped to
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = backward(model, micro_batches, tokens)
        clip_grad_norm_(list(model.parameters())[::2], max_norm)
        clip_grad_norm_(list(model.parameters())[1::2], max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def skips_a_nan():
    """A rank with a NaN leaves the step; the others wait.

    kind: odd
    hint: Does every rank make the same calls
    """

    def train_step(model, micro_batches, optimizer, max_norm):
        tokens = tokens_of_all(micro_batches)
        total = backward(model, micro_batches, tokens)
        if total.isnan():
            return float("nan")
        clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / tokens


def steps_by_hand():
    """Moves the weights a second time, without the optimizer.

    kind: values
    hint: is the step the optimizer's alone
    """

    solution = train_step

    def train_step(model, micro_batches, optimizer, max_norm):
        loss = solution(model, micro_batches, optimizer, max_norm)
        for parameter in model.parameters():
            parameter.data.mul_(0.999)
        return loss


def no_sync_from_three_on():
    """Two micro-batches are all-reduced each.

    kind: sizes
    hint: 2 all-reduces of gradients
    """

    def backward(model, micro_batches, tokens):
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last and last > 1 else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward()
            total += loss.detach()
        return total


def retains_the_graph():
    """Each graph lives until the next one is made.

    kind: memory
    hint: at the end of a forward pass
    """

    def backward(model, micro_batches, tokens):
        total = torch.zeros((), dtype=torch.float64)
        last = len(micro_batches) - 1
        for i, (x, y) in enumerate(micro_batches):
            with model.no_sync() if i < last else nullcontext():
                loss = loss_sum(model, x, y)
                (loss * dist.get_world_size() / tokens).backward(retain_graph=True)
            total += loss.detach()
        return total
