"""Given: what the check cell of exercise b looks at: what learns, and what it comes to.

First a small random model in fp64: what has a gradient, what the optimizer keeps, what three steps
make of the prompt, and whether a bit of the model changed. Then a model with some skills
(pretrained.py): does the tuned prompt answer questions that it has not seen?
"""

from pathlib import Path

import torch

from labs.support.prompt_tuning import pretrained, reference, tasks
from labs.support.prompt_tuning.reference import Spelled, right_batch, right_loss
from utils.course.checks import Wrong, load_answer

WORDS = torch.tensor([3, 11, 3, 30])  # one of them twice
LR = 0.05
BAR = 0.8  # part of the held-out questions


def tuning(path: Path) -> str:
    """Judges `begin`, `step` and `tune`."""
    answer = load_answer(path)
    _right_beginning(answer)
    _right_steps(answer)
    _learns_enough(answer)
    return (
        "the prompt is all that has a gradient and all that Adam knows; its path is that of a GPT\n"
        "whose words it is; no bit of the model changed; and it answers questions that it has not\n"
        f"seen: more than {BAR:.0%} of them."
    )


def _bits(model) -> dict:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _unchanged(model, bits: dict, when: str) -> None:
    for name, parameter in model.named_parameters():
        if not torch.equal(parameter, bits[name]):
            raise Wrong(
                f"{when} the weight {name} of the model is another.\n"
                "The model is frozen: only the prompt may change."
            )


# ---- what learns


def _right_beginning(answer) -> None:
    model = reference.random_model()
    bits = _bits(model)
    try:
        result = answer.begin(model, WORDS.clone(), LR)
    except ValueError as error:
        if "leaf" not in str(error):
            raise
        raise Wrong(
            "begin: the prompt is not a leaf: it is computed from the embedding, and no optimizer "
            "takes it.\nDetach the rows, copy them, and make an nn.Parameter of the copy."
        ) from None
    if not isinstance(result, tuple) or len(result) != 2:
        raise Wrong(f"begin returns {type(result).__name__}, not the two things prompt, optimizer.")
    prompt, optimizer = result
    _right_prompt(prompt, model)
    _right_optimizer(prompt, optimizer)
    _unchanged(model, bits, "after begin")


def _right_prompt(prompt, model) -> None:
    rows = model.model.embed_tokens.weight.detach()
    if not isinstance(prompt, torch.Tensor) or prompt.shape != (len(WORDS), rows.shape[1]):
        shape = tuple(getattr(prompt, "shape", ()))
        raise Wrong(f"begin: the prompt is {type(prompt).__name__} {shape}, not a tensor (P, C).")
    if not prompt.requires_grad or not prompt.is_leaf:
        raise Wrong("begin: the prompt is not a leaf that requires a gradient: nn.Parameter.")
    if prompt.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():
        raise Wrong("begin: the prompt lies in the embedding's memory: the model would learn too.")
    if not torch.equal(prompt, rows[WORDS]):
        raise Wrong("begin: the prompt does not start as the embedding's rows of `words`.")


def _right_optimizer(prompt, optimizer) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p is prompt for p in held):
        raise Wrong("begin: the prompt is not among what the optimizer updates.")
    if len(held) > 1:
        others = sum(p.numel() for p in held if p is not prompt)
        raise Wrong(
            f"begin: the optimizer holds {others:,} numbers besides the prompt's {prompt.numel()}: "
            "only the prompt learns."
        )
    group = optimizer.param_groups[0]
    if type(optimizer) is not torch.optim.Adam or group["weight_decay"] or group["lr"] != LR:
        raise Wrong(
            f"begin: the optimizer is {type(optimizer).__name__}, lr {group['lr']}, weight decay "
            f"{group['weight_decay']}; asked is Adam, lr {LR}, none."
        )


# ---- three steps


def _batches() -> list:
    return [right_batch(reference.random_pairs(4, seed)) for seed in (11, 12, 13)]


def _right_path(zero: bool = True) -> tuple[list, torch.Tensor]:
    """The losses and the prompt of three right steps; zero=False: gradients are added up."""
    model = reference.random_model()
    prompt = model.model.embed_tokens.weight.detach()[WORDS].clone().requires_grad_()
    optimizer, losses = torch.optim.Adam([prompt], lr=LR), []
    for tokens, targets in _batches():
        spelled = Spelled(model, prompt)
        loss = right_loss(spelled.logits(tokens), targets)
        loss.backward()
        before = prompt.grad if prompt.grad is not None and not zero else 0
        prompt.grad = spelled.gradients()[0] + before
        optimizer.step()
        losses.append(loss.item())
    return losses, prompt.detach()


def _right_steps(answer) -> None:
    model = reference.random_model()
    bits = _bits(model)
    prompt, optimizer = answer.begin(model, WORDS.clone(), LR)
    losses, right = _right_path()
    for number, (tokens, targets) in enumerate(_batches()):
        before = prompt.detach().clone()
        loss = answer.step(model, prompt, optimizer, tokens, targets)
        case = f"step {number + 1} of 3"
        if torch.equal(prompt, before):
            raise Wrong(f"{case}: the prompt is what it was. Does it get a gradient, and a step?")
        _only_the_prompt(model, case)
        _unchanged(model, bits, f"after {case}")
        if not isinstance(loss, float):
            raise Wrong(
                f"{case} returns {type(loss).__name__}, not a float: .item() lets the pass go."
            )
        if number == 0 and abs(loss - losses[0]) > 1e-9:
            raise Wrong(f"{case} returns the loss {loss:.6f}, not {losses[0]:.6f}.")
    if not torch.allclose(prompt, right, atol=1e-9):
        hint = "Three steps of Adam with the gradient of answer_loss make another prompt."
        if torch.allclose(prompt, _right_path(zero=False)[1], atol=1e-9):
            hint = "The gradients of earlier steps are still in it: optimizer.zero_grad()."
        raise Wrong(f"after 3 steps the prompt is not what it should be.\n{hint}")
    state = [t for t in optimizer.state[prompt].values() if t.ndim]
    if len(optimizer.state) != 1 or sum(t.numel() for t in state) != 2 * prompt.numel():
        raise Wrong("the optimizer keeps more than two numbers for each number of the prompt.")


def _only_the_prompt(model, case: str) -> None:
    held = [p.grad for p in model.parameters() if p.grad is not None]
    if held:
        size = sum(grad.numel() * grad.element_size() for grad in held)
        raise Wrong(
            f"{case}: {len(held)} weights of the model have got gradients, {size:,} bytes that "
            "nobody needs.\nFreeze it: model.requires_grad_(False)."
        )


# ---- what it comes to


def _learns_enough(answer) -> None:
    model, name, begun, begin = pretrained.load(), tasks.NAMES[0], [], answer.begin
    bits = _bits(model)

    def counted(*args, **keywords):
        begun.append(1)
        return begin(*args, **keywords)

    answer.begin = counted
    prompt, batches = tasks.tune(answer, name, model)
    shape = (tasks.LENGTHS[name], model.config.hidden_size)
    if not isinstance(prompt, torch.Tensor) or prompt.shape != shape:
        got = tuple(getattr(prompt, "shape", ()))
        raise Wrong(f"tune returns {type(prompt).__name__} {got}, not the prompt {shape}.")
    if batches.drawn < tasks.STEPS:
        raise Wrong(
            f"tune has looked at {batches.drawn} of the batches, and there are {tasks.STEPS}: "
            "one step for each."
        )
    _unchanged(model, bits, "after tune")
    right = tasks.accuracy(model, name, prompt.detach())
    if right < BAR:
        start = model.model.embed_tokens.weight[tasks.first_words(name)]
        moved, size = ((x.detach().abs().mean().item()) for x in (prompt - start, start))
        hint = "Do the losses fall from batch to batch?"
        if len(begun) > 1:
            hint = f"begin was called {len(begun)} times: one prompt goes through all batches."
        elif moved < size / 2:
            hint = (
                f"Its numbers have moved by {moved:.2g} on the average, and began at {size:.2g}: "
                "they are so few that\nthey need a learning rate a hundred times that of weights."
            )
        raise Wrong(
            f"{right:.0%} of {tasks.TO_MEASURE} held-out questions are answered, {BAR:.0%} are the "
            f"least.\n{hint}"
        )
