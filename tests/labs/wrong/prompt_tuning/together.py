"""Lab 14, together: each body, written after the solution, is a wrong answer."""


def a_pass_for_each_task():
    """Right numbers, one task after the other: two passes where one would do.

    hint: one pass for all
    """

    def together(model, prompts, task, tokens):
        logits = tokens.new_zeros(*tokens.shape, model.config.vocab_size, dtype=prompts[0].dtype)
        for number in task.unique().tolist():
            logits[task == number] = forward(model, prompts[number], tokens[task == number])
        return logits


def cut_at_the_longest():
    """Cuts every row where the longest prompt ends.

    hint: cut where the longest prompt ends
    """

    def together(model, prompts, task, tokens):
        longest = max(map(len, prompts))
        rows = [torch.cat((prompts[i], x)) for i, x in zip(task, model.model.embed_tokens(tokens))]
        rows = [F.pad(row, (0, 0, 0, longest + tokens.shape[1] - len(row))) for row in rows]
        return decode(model, torch.stack(rows))[:, longest:]


def cut_at_the_shortest():
    """Cuts every row where the shortest prompt ends.

    hint: cut where the shortest prompt ends
    """

    def together(model, prompts, task, tokens):
        rows = [torch.cat((prompts[i], x)) for i, x in zip(task, model.model.embed_tokens(tokens))]
        logits = decode(model, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
        shortest = min(map(len, prompts))
        return logits[:, shortest : shortest + tokens.shape[1]]


def detached():
    """Makes one table of the prompts with torch.tensor: no gradient comes back.

    hint: is not that of its rows
    """

    def together(model, prompts, task, tokens):
        chosen = [torch.tensor(prompts[number].tolist(), dtype=prompts[0].dtype) for number in task]
        rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])


def filled_in_between():
    """Makes all prompts equally long with zeros behind them, which the words see.

    hint: the words see the filling
    """

    def together(model, prompts, task, tokens):
        table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        x = torch.cat((table[task], model.model.embed_tokens(tokens)), dim=1)
        return decode(model, x)[:, table.shape[1] :]


def filled_in_front():
    """Makes all prompts equally long with zeros before them.

    hint: filled up in front
    """

    def together(model, prompts, task, tokens):
        longest = max(map(len, prompts))
        table = torch.stack([F.pad(prompt, (0, 0, longest - len(prompt), 0)) for prompt in prompts])
        x = torch.cat((table[task], model.model.embed_tokens(tokens)), dim=1)
        return decode(model, x)[:, longest:]


def first_prompt_for_all():
    """One prompt for all rows.

    hint: is the row with prompt 0
    """

    def together(model, prompts, task, tokens):
        chosen = [prompts[0]] * len(tokens)
        rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])


def mean_of_prompts():
    """Every row gets the mean of all prompts.

    hint: mean of all prompts
    """

    right_together = together

    def together(model, prompts, task, tokens):
        if len({len(prompt) for prompt in prompts}) > 1:
            return right_together(model, prompts, task, tokens)
        mean = torch.stack(prompts).mean(0)
        return forward(model, mean, tokens)


def no_prompt():
    """Forgets the prompts.

    hint: no prompt before it
    """

    def together(model, prompts, task, tokens):
        return decode(model, model.model.embed_tokens(tokens))


def not_put_back():
    """Sorts the rows by task and forgets to sort the answers back.

    hint: sorted and not put back
    """

    right_together = together

    def together(model, prompts, task, tokens):
        order = task.argsort(stable=True)
        return right_together(model, prompts, task[order], tokens[order])


def one_gradient():
    """Only the first prompt learns.

    hint: the gradient of prompt
    """

    def together(model, prompts, task, tokens):
        chosen = [p if i == 0 else p.detach() for i, p in ((i, prompts[i]) for i in task.tolist())]
        rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])


def prompts_in_turn():
    """Hands the prompts out in turn, whatever the rows want.

    hint: belongs to row b
    """

    def together(model, prompts, task, tokens):
        chosen = [prompts[number % len(prompts)] for number in range(len(tokens))]
        rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])
