"""Lab 14, tune: each body, written after the solution, is a wrong answer."""


def base_not_frozen():
    """Leaves the model as it is: all its weights get gradients, in vain.

    hint: have got gradients
    """

    def begin(model, words, lr):
        prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
        return prompt, torch.optim.Adam([prompt], lr=lr)


def begins_again_each_batch():
    """Begins anew for each batch: what was learned is thrown away.

    hint: begin was called
    """

    def tune(model, words, batches):
        for tokens, targets in batches:
            prompt, optimizer = begin(model, words, lr=0.1)
            step(model, prompt, optimizer, tokens, targets)
        return prompt.detach()


def embedding_not_frozen():
    """Freezes the blocks only.

    hint: have got gradients
    """

    def begin(model, words, lr):
        model.model.layers.requires_grad_(False)
        prompt = torch.nn.Parameter(model.model.embed_tokens.weight.detach()[words].clone())
        return prompt, torch.optim.Adam([prompt], lr=lr)


def first_batch_only():
    """Sees one batch, again and again, and knows its questions by heart.

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

    hint: gradients of earlier steps
    """

    def step(model, prompt, optimizer, tokens, targets):
        loss = answer_loss(forward(model, prompt, tokens), targets)
        loss.backward()
        optimizer.step()
        return loss.item()


def learning_rate_of_weights():
    """A learning rate that is right for weights moves so few numbers too little.

    hint: need a learning rate a hundred times
    """

    def tune(model, words, batches):
        prompt, optimizer = begin(model, words, lr=3e-4)
        for tokens, targets in batches:
            step(model, prompt, optimizer, tokens, targets)
        return prompt.detach()


def loss_with_its_past():
    """Returns the tensor, and keeps every pass of the training alive.

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

    hint: leaf that requires a gradient
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        prompt = model.model.embed_tokens.weight.detach()[words].clone()
        return prompt, torch.optim.Adam([prompt], lr=lr)


def not_a_leaf():
    """The prompt is computed from the embedding: no optimizer takes it.

    hint: is not a leaf
    """

    def begin(model, words, lr):
        prompt = model.model.embed_tokens(words)
        model.requires_grad_(False)
        return prompt, torch.optim.Adam([prompt], lr=lr)


def optimizer_of_all():
    """Hands the model to the optimizer along with the prompt.

    hint: numbers besides the prompt
    """

    right_begin = begin

    def begin(model, words, lr):
        prompt, _ = right_begin(model, words, lr)
        return prompt, torch.optim.Adam([prompt, *model.parameters()], lr=lr)


def prompt_not_in_the_optimizer():
    """Makes the optimizer from a first copy and returns a second.

    hint: not among what the optimizer updates
    """

    right_begin = begin

    def begin(model, words, lr):
        prompt, optimizer = right_begin(model, words, lr)
        return torch.nn.Parameter(prompt.detach().clone()), optimizer


def random_start():
    """Starts from random numbers, not from words.

    hint: does not start as the embedding
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        weight = model.model.embed_tokens.weight
        prompt = torch.nn.Parameter(torch.randn(len(words), weight.shape[1], dtype=weight.dtype))
        return prompt, torch.optim.Adam([prompt], lr=lr)


def steps_of_sgd():
    """Plain gradient steps past the optimizer.

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

    hint: weight decay
    """

    right_begin = begin

    def begin(model, words, lr):
        prompt, _ = right_begin(model, words, lr)
        return prompt, torch.optim.AdamW([prompt], lr=lr)


def whole_embedding():
    """The embedding itself learns, and with it the model.

    hint: not a tensor (P, C)
    """

    def begin(model, words, lr):
        model.requires_grad_(False)
        prompt = model.model.embed_tokens.weight.requires_grad_()
        return prompt, torch.optim.Adam([prompt], lr=lr)


def zeroed_too_late():
    """Sets the gradient to zero between the backward pass and the step.

    hint: the prompt is what it was
    """

    def step(model, prompt, optimizer, tokens, targets):
        loss = answer_loss(forward(model, prompt, tokens), targets)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        return loss.item()
