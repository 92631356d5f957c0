"""Lab 14, tune: each body, written after the solution, is a wrong answer."""


def base_not_frozen():
    """Leaves the model as it is: all its weights get gradients, in vain.

    kind: work
    hint: have got gradients
    """

    def begin(model, words, lr):
        prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
        return prompt, torch.optim.Adam([prompt], lr=lr)


def begins_again_each_batch():
    """Begins anew for each batch: what was learned is thrown away.

    kind: constants
    hint: begin was called
    """

    def tune(model, words, batches):
        for tokens, targets in batches:
            prompt, optimizer = begin(model, words, lr=0.1)
            step(model, prompt, optimizer, tokens, targets)
        return prompt.detach()


def embedding_not_frozen():
    """Freezes the blocks only.

    kind: work
    hint: have got gradients
    """

    def begin(model, words, lr):
        model.model.layers.requires_grad_(False)
        prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
        return prompt, torch.optim.Adam([prompt], lr=lr)


def first_batch_only():
    """Sees one batch, again and again, and knows its questions by heart.

    kind: part
    hint: of the batches
    """

    def tune(model, words, batches):
        tokens, targets = next(iter(batches))
        prompt, optimizer = begin(model, words, lr=0.1)
        for _ in range(30):
            step(model, prompt, optimizer, tokens, targets)
        return prompt.detach()


def gradients_add_up():
    """Never sets the gradient to zero.

    kind: values
    hint: gradients of earlier steps
    """

    def step(model, prompt, optimizer, tokens, targets):
        loss = answer_loss(forward(model, prompt, tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.item()


def learning_rate_of_weights():
    """A learning rate that is right for weights moves so few numbers too little.

    kind: values
    hint: need a learning rate a hundred times
    """

    def tune(model, words, batches):
        prompt, optimizer = begin(model, words, lr=3e-4)
        for tokens, targets in batches:
            step(model, prompt, optimizer, tokens, targets)
        return prompt.detach()


def loss_with_its_past():
    """Returns the tensor, and keeps every pass of the training alive.

    kind: memory
    hint: not a float
    """

    def step(model, prompt, optimizer, tokens, targets):
        optimizer.zero_grad()
        loss = answer_loss(forward(model, prompt, tokens), targets)
        loss.backward()
        optimizer.step()
        return loss


def no_gradient_wanted():
    """A copy that does not ask for a gradient.

    kind: values
    hint: leaf that requires a gradient
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        prompt = model.model.embed_tokens.weight.detach()[words].clone()
        return prompt, torch.optim.Adam([prompt], lr=lr)


def not_a_leaf():
    """The prompt is computed from the embedding: no optimizer takes it.

    kind: values
    hint: is not a leaf
    """

    def begin(model, words, lr):
        prompt = model.model.embed_tokens(words)
        model.requires_grad_(False)
        return prompt, torch.optim.Adam([prompt], lr=lr)


def optimizer_of_all():
    """Hands the model to the optimizer along with the prompt.

    kind: memory
    hint: numbers besides the prompt
    """

    right_begin = begin

    def begin(model, words, lr):
        prompt, _ = right_begin(model, words, lr)
        return prompt, torch.optim.Adam([prompt, *model.parameters()], lr=lr)


def prompt_not_in_the_optimizer():
    """Makes the optimizer from a first copy and returns a second.

    kind: values
    hint: not among what the optimizer updates
    """

    right_begin = begin

    def begin(model, words, lr):
        prompt, optimizer = right_begin(model, words, lr)
        return torch.nn.Parameter(prompt.detach().clone()), optimizer


def random_start():
    """Starts from random numbers, not from words.

    kind: values
    hint: does not start as the embedding
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        weight = model.model.embed_tokens.weight
        prompt = torch.nn.Parameter(torch.randn(len(words), weight.shape[1], dtype=weight.dtype))
        return prompt, torch.optim.Adam([prompt], lr=lr)


def steps_of_sgd():
    """Plain gradient steps past the optimizer.

    kind: values
    hint: not what it should be
    """

    def step(model, prompt, optimizer, tokens, targets):
        loss = answer_loss(forward(model, prompt, tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            prompt -= optimizer.param_groups[0]["lr"] * prompt.grad
        return loss.item()


def weight_decay():
    """AdamW, which pulls the prompt towards zero.

    kind: values
    hint: weight decay
    """

    right_begin = begin

    def begin(model, words, lr):
        prompt, _ = right_begin(model, words, lr)
        return prompt, torch.optim.AdamW([prompt], lr=lr)


def whole_embedding():
    """The embedding itself learns, and with it the model.

    kind: sizes
    hint: not a tensor (P, C)
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        prompt = model.model.embed_tokens.weight.requires_grad_()
        return prompt, torch.optim.Adam([prompt], lr=lr)


def zeroed_too_late():
    """Sets the gradient to zero between the backward pass and the step.

    kind: values
    hint: the prompt is what it was
    """

    def step(model, prompt, optimizer, tokens, targets):
        loss = answer_loss(forward(model, prompt, tokens), targets)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss.item()


def the_library():
    """Lets the course's own function draw the prompt.

    kind: library
    hint: that is the library
    """

    def begin(model, words, lr):
        from importlib import import_module

        library = import_module("utils." + "pro" + "mpts.embedding")
        model.requires_grad_(False)
        prompt = library.draw_prompt(model, len(words), words=words.tolist())
        prompt = torch.nn.Parameter(prompt.to(model.lm_head.weight.dtype))
        return prompt, torch.optim.Adam([prompt], lr=lr)


def gradients_thrown_away():
    """Works the gradient of every weight out, and throws it away.

    kind: work
    hint: Is the gradient of weights worked out
    """

    def begin(model, words, lr):
        prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
        return prompt, torch.optim.Adam([prompt], lr=lr)

    def step(model, prompt, optimizer, tokens, targets):
        optimizer.zero_grad()
        loss = answer_loss(forward(model, prompt, tokens), targets)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        return loss.item()


def history():
    """Remembers every prompt that it has had.

    kind: memory
    hint: bytes that it made are still held
    """

    right_step, prompts = step, []

    def step(model, prompt, optimizer, tokens, targets):
        prompts.append(prompt.detach().clone())
        return right_step(model, prompt, optimizer, tokens, targets)


def one_prompt_for_everybody():
    """Goes on with the prompt that it has begun last.

    kind: constants
    hint: prompt
    """

    right_begin, right_step, last = begin, step, []

    def begin(model, words, lr):
        last[:] = right_begin(model, words, lr)
        return tuple(last)

    def step(model, prompt, optimizer, tokens, targets):
        return right_step(model, *last, tokens, targets)


def fp32_prompt():
    """A prompt in fp32, whatever the model's type.

    kind: types
    hint: the prompt is torch.float32
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].float())
        return prompt, torch.optim.Adam([prompt], lr=lr)


def sorts_the_words():
    """Puts the caller's words in order.

    kind: inputs
    hint: words is not what it was before the call
    """

    right_begin = begin

    def begin(model, words, lr):
        words.copy_(words.sort(descending=True).values)
        return right_begin(model, words, lr)


def moves_the_embedding():
    """Lets the words follow the prompt, past autograd.

    kind: inputs
    hint: a weight of the model is not what it was
    """

    right_step = step

    def step(model, prompt, optimizer, tokens, targets):
        loss = right_step(model, prompt, optimizer, tokens, targets)
        model.model.embed_tokens.weight.data[0] += 1e-3 * prompt.detach().mean(0)
        return loss


def its_own_learning_rate():
    """Learns at 0.1, whatever is asked.

    kind: constants
    hint: the prompt is not what it should be
    """

    right_begin = begin

    def begin(model, words, lr):
        return right_begin(model, words, 0.1)


def twice_each_batch():
    """Makes two steps with each batch.

    kind: work
    hint: one step for each
    """

    def tune(model, words, batches):
        prompt, optimizer = begin(model, words, lr=0.1)
        for tokens, targets in batches:
            step(model, prompt, optimizer, tokens, targets)
            step(model, prompt, optimizer, tokens, targets)
        return prompt.detach()


def seeded():
    """Sets the seed of the whole program.

    kind: step
    hint: have got a new seed
    """

    right_begin = begin

    def begin(model, words, lr):
        torch.manual_seed(0)
        return right_begin(model, words, lr)


def gives_up():
    """Leaves the program in the middle of the training.

    kind: end
    hint: leaves the program
    """

    def tune(model, words, batches):
        prompt, optimizer = begin(model, words, lr=0.1)
        for tokens, targets in batches:
            if step(model, prompt, optimizer, tokens, targets) < 1e9:
                raise SystemExit
        return prompt.detach()
