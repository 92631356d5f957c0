"""Given: your functions on the model of pretrained.py: a task's cost, and two tasks in a batch."""

import torch

from labs.support.prompt_tuning import pretrained, tasks
from utils.course.runner import attempted
from utils.models.gpt import GPT

SECONDS = 60.0  # of CPU time until an answer counts as an endless loop


def cost(file: str) -> dict | None:
    """Tuned parameters, the model's parameters, bytes of Adam's state, and its bytes if all weights
    were tuned; None if the answer is not ready."""
    found = attempted(file, 1, _cost)
    return found and found[0]


def two_tasks(file: str) -> dict | None:
    """{task: accuracies} on the same questions for both tasks; None if the answer is not ready.

    without: no prompt; alone: only rows of this task; in one batch: rows of both tasks alternate,
    through `together`; other prompt: the same with the prompts exchanged
    """
    if cost(file) is None:
        return None  # before the model is pretrained
    model = pretrained.load()
    found = attempted(file, 1, _two_tasks, model.state_dict(), seconds=SECONDS)
    if found is None:
        return None
    prompts, right, swapped, which = found[0]
    return {
        name: {
            "without": tasks.accuracy(model, name),
            "alone": tasks.accuracy(model, name, prompts[number]),
            "in one batch": right[which == number].float().mean().item(),
            "other prompt": swapped[which == number].float().mean().item(),
        }
        for number, name in enumerate(tasks.NAMES)
    }


def _cost(answer) -> dict:
    model, name = GPT(pretrained.CONFIG), tasks.NAMES[0]  # its weights do not matter here
    prompt, optimizer = answer.begin(model, tasks.first_words(name), 0.1)
    answer.step(model, prompt, optimizer, *next(iter(tasks.Batches(answer, name))))
    held = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    return {
        "tuned": prompt.numel(),
        "model": model.parameter_count(),
        "state": sum(t.numel() * t.element_size() for t in held),
        "whole state": 2 * 4 * model.parameter_count(),
    }


def _two_tasks(answer, weights: dict) -> tuple:
    model = GPT(pretrained.CONFIG)
    model.load_state_dict(weights)
    prompts = [
        answer.tune(model.eval(), tasks.first_words(name), tasks.Batches(answer, name)).detach()
        for name in tasks.NAMES
    ]
    tokens, targets, which = tasks.to_measure(*tasks.NAMES)
    with torch.no_grad():
        right = tasks.exact(answer.together(model, prompts, which, tokens), targets)
        swapped = tasks.exact(answer.together(model, prompts, 1 - which, tokens), targets)
    return prompts, right, swapped, which
