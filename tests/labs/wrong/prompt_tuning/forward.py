"""Lab 14, forward: each body, written after the solution, is a wrong answer."""


def changes_the_lists():
    """Adds to the lists that it was given.

    kind: inputs
    hint: changes the lists
    """

    right_batch = batch

    def batch(pairs, end):
        tokens, targets = right_batch(pairs, end)
        for question, answer in pairs:
            question += answer
        return tokens, targets


def cut_at_the_end():
    """Cuts off as many logits as there are virtual tokens, at the wrong end.

    kind: values
    hint: cut off the first P positions, not the last
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = prompt.expand(len(tokens), -1, -1)
        logits = decode(model, torch.cat((virtual, x), dim=1))
        return logits[:, : tokens.shape[1]]


def cut_one_too_early():
    """Begins with the last virtual token, which says the first word.

    kind: values
    hint: one position too early
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = prompt.expand(len(tokens), -1, -1)
        logits = decode(model, torch.cat((virtual, x), dim=1))
        return logits[:, len(prompt) - 1 : -1]


def detached():
    """Copies the numbers of the prompt: nothing leads back to it.

    kind: part
    hint: the prompt gets no gradient
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = torch.stack([prompt.data] * len(tokens))
        logits = decode(model, torch.cat((virtual, x), dim=1))
        return logits[:, len(prompt) :]


def divided_by_all_places():
    """Adds up the right losses and divides by all places of the batch.

    kind: values
    hint: divided by all B·T places
    """

    def answer_loss(logits, targets):
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.mean()


def end_among_the_tokens():
    """Hands the end to the model, too: a column more.

    kind: sizes
    hint: less its last token
    """

    right_batch = batch

    def batch(pairs, end):
        tokens, targets = right_batch(pairs, end)
        return F.pad(tokens, (0, 1), value=end), F.pad(targets, (0, 1), value=IGNORED)


def end_does_not_count():
    """Learns the answer, and never to stop.

    kind: values
    hint: learns to stop | first token counts too
    """

    def batch(pairs, end):
        rows = [question + answer + [end] for question, answer in pairs]
        longest = max(map(len, rows)) - 1
        tokens = torch.full((len(rows), longest), end)
        targets = torch.full((len(rows), longest), IGNORED)
        for i, (row, (question, answer)) in enumerate(zip(rows, pairs)):
            tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
            first = len(question) - 1
            targets[i, first : first + len(answer)] = torch.tensor(answer)
        return tokens, targets


def filled_on_the_left():
    """Fills up on the left, as one does for generating with a mask.

    kind: values
    hint: filling stands on the left
    """

    right_batch = batch

    def batch(pairs, end):
        tokens, targets = right_batch(pairs, end)
        for number, (question, answer) in enumerate(pairs):
            shift = tokens.shape[1] - len(question) - len(answer)
            tokens[number] = tokens[number].roll(shift)
            targets[number] = targets[number].roll(shift)
        return tokens, targets


def filling_counts():
    """Fills up the targets with the end, as the tokens: every end is to be said.

    kind: values
    hint: goes over the filling
    """

    right_batch = batch

    def batch(pairs, end):
        tokens, targets = right_batch(pairs, end)
        for row in targets:
            last = (row != IGNORED).nonzero().max()
            row[last + 1 :] = end
        return tokens, targets


def first_row_only():
    """Puts the prompt before the first row, and zeros before the others.

    kind: part
    hint: every row needs the prompt
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = F.pad(prompt[None], (0, 0, 0, 0, 0, len(tokens) - 1))
        logits = decode(model, torch.cat((virtual, x), dim=1))
        return logits[:, len(prompt) :]


def ignored_as_words():
    """Every place counts: what is IGNORED becomes the word 0.

    kind: values
    hint: Which targets count?
    """

    def answer_loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())


def mean_of_rows():
    """Each row its mean, then the mean of the rows: short answers weigh more.

    kind: odd
    hint: short answer weighs more
    """

    def answer_loss(logits, targets):
        rows = [F.cross_entropy(row, target) for row, target in zip(logits, targets)]
        return torch.stack(rows).mean()


def no_last_norm():
    """Leaves out the norm before the last matrix.

    kind: values
    hint: model.model.norm stands before
    """

    def decode(model, x):
        positions = torch.arange(x.shape[1])
        cos, sin = rotary_tables(model.config, positions, x.dtype)
        for layer in model.model.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return model.lm_head(x)


def not_cut():
    """Returns the logits of the virtual tokens, too.

    kind: values
    hint: cut them off
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = prompt.expand(len(tokens), -1, -1)
        logits = decode(model, torch.cat((virtual, x), dim=1))
        return logits


def not_shifted():
    """The target of a token is the token.

    kind: values
    hint: the token itself | first token counts too
    """

    def batch(pairs, end):
        rows = [question + answer + [end] for question, answer in pairs]
        longest = max(map(len, rows)) - 1
        tokens = torch.full((len(rows), longest), end)
        targets = torch.full((len(rows), longest), IGNORED)
        for i, (row, (question, _)) in enumerate(zip(rows, pairs)):
            tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
            first = len(question)
            targets[i, first : len(row) - 1] = torch.tensor(row[first:-1])
        return tokens, targets


def one_late():
    """Begins at the answer: its first token is never asked for.

    kind: values
    hint: first token counts too
    """

    def batch(pairs, end):
        rows = [question + answer + [end] for question, answer in pairs]
        longest = max(map(len, rows)) - 1
        tokens = torch.full((len(rows), longest), end)
        targets = torch.full((len(rows), longest), IGNORED)
        for i, (row, (question, _)) in enumerate(zip(rows, pairs)):
            tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
            first = len(question)
            targets[i, first : len(row) - 1] = torch.tensor(row[first + 1 :])
        return tokens, targets


def one_position_for_all():
    """All vectors at position 0.

    kind: values
    hint: same position
    """

    def decode(model, x):
        positions = torch.zeros(x.shape[1])
        cos, sin = rotary_tables(model.config, positions, x.dtype)
        for layer in model.model.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return model.lm_head(model.model.norm(x))


def positions_restart():
    """The words have the positions that they had without a prompt.

    kind: values
    hint: positions start again at the text
    """

    def forward(model, prompt, tokens):
        P, T = len(prompt), tokens.shape[1]
        virtual = prompt.expand(len(tokens), -1, -1)
        x = torch.cat((virtual, model.model.embed_tokens(tokens)), dim=1)
        positions = torch.cat((torch.arange(P), torch.arange(T)))
        cos, sin = rotary_tables(model.config, positions, x.dtype)
        for layer in model.model.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return model.lm_head(model.model.norm(x))[:, P:]


def prompt_behind():
    """The prompt stands behind the words, which cannot see it.

    kind: values
    hint: do they stand behind them?
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = prompt.expand(len(tokens), -1, -1)
        return decode(model, torch.cat((x, virtual), dim=1))[:, : tokens.shape[1]]


def prompt_behind_cut_in_front():
    """The prompt stands behind the words, and the first positions are cut off.

    kind: values
    hint: do they stand behind them?
    """

    def forward(model, prompt, tokens):
        x = model.model.embed_tokens(tokens)
        virtual = prompt.expand(len(tokens), -1, -1)
        return decode(model, torch.cat((x, virtual), dim=1))[:, len(prompt) :]


def question_counts():
    """The usual targets of a language model: the loss goes over the question too.

    kind: values
    hint: goes over the question
    """

    def batch(pairs, end):
        rows = [question + answer + [end] for question, answer in pairs]
        longest = max(map(len, rows)) - 1
        tokens = torch.full((len(rows), longest), end)
        targets = torch.full((len(rows), longest), IGNORED)
        for i, (row, _) in enumerate(zip(rows, pairs)):
            tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
            targets[i, : len(row) - 1] = torch.tensor(row[1:])
        return tokens, targets


def sees_the_future():
    """No causal mask: every position sees all others.

    kind: values
    hint: logits are not the GPT
    """

    def decode(model, x):
        attention, before = F.scaled_dot_product_attention, rotary_tables
        positions = torch.arange(x.shape[1])
        cos, sin = before(model.config, positions, x.dtype)
        try:
            F.scaled_dot_product_attention = lambda *a, **k: attention(
                *a, **{**k, "is_causal": False}
            )
            for layer in model.model.layers:
                x = layer(x, cos[:, None], sin[:, None])
        finally:
            F.scaled_dot_product_attention = attention
        return model.lm_head(model.model.norm(x))


def shifted_again():
    """Shifts targets that are shifted already.

    kind: values
    hint: Shifted once too often
    """

    def answer_loss(logits, targets):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())


def sum():
    """A sum, which grows with the batch.

    kind: values
    hint: It is the sum
    """

    def answer_loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def the_library():
    """Puts the name of the course's own prompts together.

    kind: library
    hint: that is the library
    """

    import importlib

    def forward(model, prompt, tokens):
        library = importlib.import_module("utils." + "prom" + "pts")
        with library.prompted(model, prompt):
            return model(tokens)[:, len(prompt) :]


def counts_in_bf16():
    """Leaves the loss in the type of the logits.

    kind: types
    hint: answer_loss is torch.bfloat16
    """

    def answer_loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def fp32_for_all():
    """Computes in fp32, whatever the model's type.

    kind: types
    hint: a logit is torch.float32 | RuntimeError
    """

    right_forward = forward

    def forward(model, prompt, tokens):
        return right_forward(model, prompt, tokens).float()


def positions_in_the_models_type():
    """Counts positions in bf16, which has no odd number above 256.

    kind: types
    hint: a logit at
    """

    def decode(model, x):
        positions = torch.arange(x.shape[1]).to(x.dtype)
        cos, sin = rotary_tables(model.config, positions, x.dtype)
        for layer in model.model.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return model.lm_head(model.model.norm(x))


def remembers_the_words():
    """Keeps the embedded tokens of the first model by their shape.

    kind: constants
    hint: a logit at | bytes that it made are still held
    """

    known = {}

    def forward(model, prompt, tokens):
        if tokens.shape not in known:
            known[tokens.shape] = model.model.embed_tokens(tokens).detach()
        virtual = prompt.expand(len(tokens), -1, -1)
        logits = decode(model, torch.cat((virtual, known[tokens.shape]), dim=1))
        return logits[:, len(prompt) :]


def keeps_its_logits():
    """Keeps every pass, to look at it later.

    kind: memory
    hint: bytes that it made are still held
    """

    right_forward, passes = forward, []

    def forward(model, prompt, tokens):
        passes.append(right_forward(model, prompt, tokens))
        return passes[-1]


def once_more():
    """Runs the model twice, to be sure.

    kind: work
    hint: one pass of P + T
    """

    right_forward = forward

    def forward(model, prompt, tokens):
        right_forward(model, prompt, tokens)
        return right_forward(model, prompt, tokens)


def freezes_the_model():
    """Freezes a model that belongs to others, too.

    kind: inputs
    hint: the parameters of the model are not what they were
    """

    right_forward = forward

    def forward(model, prompt, tokens):
        model.requires_grad_(False)
        return right_forward(model, prompt, tokens)


def short_rows_only():
    """Has rotary tables for 64 positions.

    kind: sizes
    hint: in prompting.py line
    """

    def decode(model, x):
        cos, sin = rotary_tables(model.config, torch.arange(64), x.dtype)
        cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
        for layer in model.model.layers:
            x = layer(x, cos[:, None], sin[:, None])
        return model.lm_head(model.model.norm(x))


def stops():
    """Ends the process.

    kind: end
    hint: leaves the program
    """

    import sys

    def answer_loss(logits, targets):
        sys.exit(0)
