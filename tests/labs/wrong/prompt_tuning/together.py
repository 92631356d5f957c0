"""Lab 14, together: each body, written after the solution, is a wrong answer."""


def a_pass_for_each_task():
    """Right numbers, one task after the other: two passes where one would do.

    kind: work
    hint: one pass for all
    """

    def together(model, prompts, task, tokens):
        logits = tokens.new_zeros(*tokens.shape, model.config.vocab_size, dtype=prompts[0].dtype)
        for number in task.unique().tolist():
            logits[task == number] = forward(model, prompts[number], tokens[task == number])
        return logits


def cut_at_the_longest():
    """Cuts every row where the longest prompt ends.

    kind: sizes
    hint: cut where the longest prompt ends
    """

    def together(model, prompts, task, tokens):
        longest = max(map(len, prompts))
        rows = [torch.cat((prompts[i], x)) for i, x in zip(task, model.model.embed_tokens(tokens))]
        rows = [F.pad(row, (0, 0, 0, longest + tokens.shape[1] - len(row))) for row in rows]
        return decode(model, torch.stack(rows))[:, longest:]


def cut_at_the_shortest():
    """Cuts every row where the shortest prompt ends.

    kind: sizes
    hint: cut where the shortest prompt ends
    """

    def together(model, prompts, task, tokens):
        rows = [torch.cat((prompts[i], x)) for i, x in zip(task, model.model.embed_tokens(tokens))]
        logits = decode(model, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
        shortest = min(map(len, prompts))
        return logits[:, shortest : shortest + tokens.shape[1]]


def detached():
    """Makes one table of the prompts with torch.tensor: no gradient comes back.

    kind: part
    hint: the gradient of prompt
    """

    def together(model, prompts, task, tokens):
        chosen = [torch.tensor(prompts[number].tolist(), dtype=prompts[0].dtype) for number in task]
        rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])


def filled_in_between():
    """Makes all prompts equally long with zeros behind them, which the words see.

    kind: values
    hint: the words see the filling
    """

    def together(model, prompts, task, tokens):
        table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        x = torch.cat((table[task], model.model.embed_tokens(tokens)), dim=1)
        return decode(model, x)[:, table.shape[1] :]


def filled_in_front():
    """Makes all prompts equally long with zeros before them.

    kind: values
    hint: filled up in front
    """

    def together(model, prompts, task, tokens):
        longest = max(map(len, prompts))
        table = torch.stack([F.pad(prompt, (0, 0, longest - len(prompt), 0)) for prompt in prompts])
        x = torch.cat((table[task], model.model.embed_tokens(tokens)), dim=1)
        return decode(model, x)[:, longest:]


def first_prompt_for_all():
    """One prompt for all rows.

    kind: constants
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

    kind: values
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

    kind: values
    hint: no prompt before it
    """

    def together(model, prompts, task, tokens):
        return decode(model, model.model.embed_tokens(tokens))


def not_put_back():
    """Sorts the rows by task and forgets to sort the answers back.

    kind: values
    hint: sorted and not put back
    """

    right_together = together

    def together(model, prompts, task, tokens):
        order = task.argsort(stable=True)
        return right_together(model, prompts, task[order], tokens[order])


def one_gradient():
    """Only the first prompt learns.

    kind: part
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

    kind: values
    hint: belongs to row b
    """

    def together(model, prompts, task, tokens):
        chosen = [prompts[number % len(prompts)] for number in range(len(tokens))]
        rows = [torch.cat(row) for row in zip(chosen, model.model.embed_tokens(tokens))]
        x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])


def the_library():
    """Fills prompts up, and lets the course's own embedding put them in.

    kind: library
    hint: that is the library
    """

    right_together = together

    def together(model, prompts, task, tokens):
        from importlib import import_module

        library = import_module("utils.prom" + "pts.embedding")
        library.draw_prompt(model, 3)
        return right_together(model, prompts, task, tokens)


def known_prompts():
    """Remembers the prompts of a number of rows.

    kind: constants
    hint: is not what it is alone | has the shape | in prompting.py line | the gradient of prompt
    """

    right_together, known = together, {}

    def together(model, prompts, task, tokens):
        key = len(prompts), len(task)
        known.setdefault(key, [prompt.detach().clone() for prompt in prompts])
        return right_together(model, known[key], task, tokens)


def in_fp32():
    """Fills up with zeros of fp32.

    kind: types
    hint: in prompting.py line | a logit is torch.float32
    """

    def together(model, prompts, task, tokens):
        chosen = [prompts[number] for number in task.tolist()]
        x = torch.zeros(len(tokens), max(map(len, chosen)) + tokens.shape[1], prompts[0].shape[1])
        for row, prompt, words in zip(x, chosen, model.model.embed_tokens(tokens)):
            row[: len(prompt) + len(words)] = torch.cat((prompt, words))
        logits = zip(decode(model, x), map(len, chosen))
        return torch.stack([row[start : start + tokens.shape[1]] for row, start in logits])


def sorts_the_rows():
    """Sorts the caller's tasks in place, and its rows with them.

    kind: inputs
    hint: is not what it was before the call
    """

    right_together = together

    def together(model, prompts, task, tokens):
        order = task.argsort(stable=True)
        task[:], tokens[:] = task[order], tokens[order]
        return right_together(model, prompts, task, tokens)[order.argsort()]


def empties_the_list():
    """Takes the prompts out of the caller's list.

    kind: inputs
    hint: the list of prompts is not what it was
    """

    right_together = together

    def together(model, prompts, task, tokens):
        own = [prompts.pop(0) for _ in range(len(prompts))]
        return right_together(model, own, task, tokens)


def keeps_the_rows():
    """Keeps what it has put together.

    kind: memory
    hint: bytes that it made are still held
    """

    right_decode, rows = decode, []

    def decode(model, x):
        rows.append(x)
        return right_decode(model, x)


def filled_to_64():
    """Fills every row up to 64 positions.

    kind: work
    hint: as long as the longest
    """

    right_decode = decode

    def decode(model, x):
        return right_decode(model, F.pad(x, (0, 0, 0, 64 - x.shape[1])))[:, : x.shape[1]]


def two_tasks_only():
    """Knows two prompts, as in the lesson.

    kind: sizes
    hint: is not what it is alone
    """

    right_together = together

    def together(model, prompts, task, tokens):
        return right_together(model, prompts, task.clamp(max=1), tokens)


def leaves():
    """Ends the program.

    kind: end
    hint: leaves the program
    """

    def together(model, prompts, task, tokens):
        exit(3)
