"""Given: what the check cell of exercise b looks at: what learns, and what it comes to.

First small drawn models: what has a gradient, what the optimizer keeps, what some steps make of the
prompt, and whether a bit of the model changed. Then a model with some skills (pretrained.py): does
the tuned prompt answer questions that it has not seen?
"""

import torch

from labs.support.prompt_tuning import pretrained, scenarios, tasks
from labs.support.prompt_tuning.check_forward import LIBRARY
from labs.support.prompt_tuning.reference import (
    TYPES,
    Case,
    Spelled,
    draw_case,
    draw_lengths,
    right_loss,
)
from utils.course.assertions import Wrong, forbid
from utils.course.runner import Trial

BAR = 0.8  # part of the held-out questions
TOO_LONG = 60.0  # seconds for 60 steps; on a free core they take one
FEW = 0.03  # of the prompt's numbers: where the gradient is next to nothing, Adam makes of a
# rounding a step of full length
LOSS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}


def tuning(trial: Trial) -> str:
    """Judges `begin`, `step` and `tune`."""
    forbid(trial.path, LIBRARY)
    cases = [_case(trial, dtype) for dtype in TYPES]
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        for case, steps in zip(cases, group.run("begin and step", scenarios.train, cases)[0]):
            _right_steps(*case, steps)
        few = [(case, words, steps[:number]) for number, (case, words, _, steps)
               in enumerate(cases, start=1)]
        group.run("tune", scenarios.tune, few)
        name, seed = trial.draw.choice(tasks.NAMES), trial.draw.randrange(1000)
        words = [trial.draw.randrange(pretrained.LETTERS) for _ in range(tasks.LENGTHS[name])]
        model = pretrained.load()
        given = model.state_dict(), name, words, seed
        found = group.run("tune", scenarios.learn, *given, seconds=TOO_LONG)[0]
        _learns_enough(found, model, *given[1:])
    return (
        "the prompt is all that has a gradient and all that Adam knows; its path is that of a GPT\n"
        "whose words it is, with two prompts learned in turns; no bit of the model changed, and\n"
        f"nothing is kept; it answers more than {BAR:.0%} of questions that it has not seen."
    )


def _case(trial: Trial, dtype: torch.dtype) -> tuple[Case, list[int], float, list[Case]]:
    """A model, the words to begin with, one of them twice, a learning rate, and the rows of each
    step."""
    draw = trial.draw
    case = draw_case(trial, dtype, frozen=False)
    words = [draw.randrange(case.config.vocab_size) for _ in range(draw.randrange(1, 6))]
    words.append(words[0])
    first = draw_lengths(trial, draw.randrange(2, 5))
    steps = [
        draw_case(trial, dtype, config=case.config, prompts=(len(words),), lengths=lengths)
        for lengths in (first, draw_lengths(trial, 1), first, draw_lengths(trial, 3))
    ]
    return case, words, draw.uniform(0.01, 0.3), steps


# ---- steps


def _right_path(case: Case, words: list[int], lr: float, steps: list[Case], zero: bool = True):
    """The losses and prompts of right steps, in fp64; zero=False: gradients are added up."""
    model = case.model().double()
    prompt = model.model.embed_tokens.weight.detach()[words].clone().requires_grad_()
    optimizer, losses, prompts = torch.optim.Adam([prompt], lr=lr), [], []
    for some in steps:
        tokens, targets = some.rows()
        spelled = Spelled(model, prompt)
        loss = right_loss(spelled.logits(tokens), targets)
        loss.backward()
        before = prompt.grad if prompt.grad is not None and not zero else 0
        prompt.grad = spelled.gradients()[0] + before
        optimizer.step()
        losses.append(loss.item())
        prompts.append(prompt.detach().clone())
    return losses, prompts


def _equal(a: torch.Tensor, b: torch.Tensor, lr: float) -> bool:
    """Up to a thousandth of a step, but for a few numbers."""
    far = (a.double() - b).abs() > 1e-3 * lr
    return int(far.sum()) <= max(2, FEW * far.numel())


def _right_steps(case: Case, words: list[int], lr: float, steps: list[Case], found: list) -> None:
    losses, prompts = _right_path(case, words, lr, steps)
    for number, (some, step) in enumerate(zip(steps, found)):
        where = f"step {number + 1} of {len(steps)}, lr {lr:.3g}, {some}"
        loss, right = step["loss"], losses[number]
        if number == 0 and not abs(loss - right) <= LOSS[case.dtype] * max(1, right):
            raise Wrong(f"{where} returns the loss {loss:.6f}, and {right:.6f} is right.")
        if case.dtype != torch.bfloat16 and not _equal(step["prompt"], prompts[number], lr):
            hint = "Steps of Adam with the gradient of answer_loss make another prompt."
            wrong = _right_path(case, words, lr, steps[: number + 1], zero=False)[1][-1]
            if number and _equal(step["prompt"], wrong, lr):
                hint = "The gradients of earlier steps are still in it: optimizer.zero_grad()."
            raise Wrong(f"after {where}, the prompt is not what it should be.\n{hint}")
        if step["kept"]:
            raise Wrong(
                f"{where}: when it is over, {step['kept']:,} bytes that it made are still held, "
                "besides the prompt's gradient\nand Adam's state. Who remembers them, and what for?"
            )
        if step["work"] > 1.2 * step["enough"]:
            raise Wrong(
                f"{where}: {step['work']:,} numbers are multiplied in the backward pass, and "
                f"{step['enough']:,} will do.\nIs the gradient of weights worked out that nobody "
                "needs?"
            )


# ---- what it comes to


def _learns_enough(found: dict, model, name: str, words: list[int], seed: int) -> None:
    if found["drawn"] != tasks.STEPS:
        raise Wrong(
            f"tune has looked at {found['drawn']} of the batches, and there are {tasks.STEPS}: "
            "one step for each."
        )
    if found["passes"] > tasks.STEPS:
        raise Wrong(
            f"tune makes {found['passes']} passes for {tasks.STEPS} batches: one step for each."
        )
    prompt = found["prompt"]
    right = tasks.accuracy(model, name, prompt, seed)
    if right < BAR:
        start = model.model.embed_tokens.weight.detach()[words]
        moved, size = (x.abs().mean().item() for x in (prompt - start, start))
        hint = "Do the losses fall from batch to batch?"
        if found["begun"] > 1:
            hint = f"begin was called {found['begun']} times: one prompt goes through all batches."
        elif moved < size / 2:
            hint = (
                f"Its numbers have moved by {moved:.2g} on the average, and began at {size:.2g}: "
                "they are so few that\nthey need a learning rate a hundred times that of weights."
            )
        raise Wrong(
            f"tune, task {name}: {right:.0%} of {tasks.TO_MEASURE} held-out questions are answered,"
            f" {BAR:.0%} are the least.\n{hint}"
        )
