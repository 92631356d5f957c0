"""Lab 02, ddp: each body, written after the solution, is a wrong answer."""


def clips_each_micro_batch():
    """Clips after each micro-batch.

    hint: clip once, the accumulated gradient
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

    hint: Without clipping it was right
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

    hint: all-reduces of gradients, and one is enough
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

    hint: is everything reset for the next step
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

    hint: tokens_of_all returns
    """

    def tokens_of_all(micro_batches):
        return sum(counted(y) for _, y in micro_batches)


def padding_counts():
    """Counts positions, not tokens that count.

    hint: tokens_of_all returns
    """

    def tokens_of_all(micro_batches):
        tokens = torch.tensor(sum(y.numel() for _, y in micro_batches))
        dist.all_reduce(tokens)
        return tokens.item()


def ranks_forgotten():
    """Forgets that DDP divides by the number of ranks.

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

    hint: 4 optimizer steps
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

    hint: is optimizer.step() called, with gradients still there
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
