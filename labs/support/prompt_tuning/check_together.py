"""Given: what the check cell of exercise c looks at: rows with prompts of their own, in one batch.

Each row must have the logits that it has alone with its prompt, each prompt the gradient of its own
rows, in one pass through the blocks. Where a row is another, typical mistakes are made on purpose,
and the one that gives your numbers is named.
"""

from pathlib import Path

import torch

from labs.support.prompt_tuning import reference
from labs.support.prompt_tuning.check_forward import a_tensor, make_tokens, same
from labs.support.prompt_tuning.reference import Spelled, right_loss, walk
from utils.course.checks import Wrong, load_answer


def together(path: Path) -> str:
    """Judges `together`."""
    answer = load_answer(path)
    model = reference.random_model()
    for lengths, tasks in (
        ((4, 4), [0, 1, 1, 0, 1]),
        ((3, 3, 3), [2, 0, 2, 1, 0]),
        ((2, 5), [0, 1, 1, 0, 0]),
        ((6, 1, 3), [1, 1, 2, 0, 2]),
        ((3, 2, 5), [1, 1, 1, 0, 0]),
    ):
        prompts = [reference.random_prompt(P, seed) for seed, P in enumerate(lengths)]
        _rows_as_alone(answer, model, prompts, torch.tensor(tasks))
    return (
        "each row has the logits that it has alone with its prompt, also where prompts differ in\n"
        "length; each prompt gets the gradient of its own rows; and the blocks run once."
    )


def _rows_as_alone(answer, model, prompts: list, task: torch.Tensor) -> None:
    model.zero_grad()
    for prompt in prompts:
        prompt.requires_grad_()
    tokens, targets = (
        make_tokens(len(task), 6, seed=len(prompts)),
        make_tokens(len(task), 6, seed=20),
    )
    case = f"prompts of {', '.join(str(len(p)) for p in prompts)} tokens, rows {task.tolist()}"
    passes = []
    hook = model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    try:
        logits = answer.together(model, list(prompts), task.clone(), tokens)
    finally:
        hook.remove()
    a_tensor(logits, (*tokens.shape, reference.CONFIG.vocab_size), case, "Every row has T tokens.")
    spelled = Spelled(model, *prompts)
    right = spelled.logits(tokens, task.tolist())
    for number, row in enumerate(logits):
        if not same(row, right[number]):
            raise Wrong(
                f"{case}: row {number}, of task {int(task[number])}, is not what it is alone.\n"
                + _whose_row(row, number, model, prompts, task, tokens, spelled)
            )
    if len(passes) != 1:
        raise Wrong(f"{case}: right, but the blocks ran {len(passes)} times: one pass for all.")
    right_loss(right, targets).backward()
    if logits.requires_grad:
        right_loss(logits, targets).backward()
    for number, (prompt, gradient) in enumerate(zip(prompts, spelled.gradients())):
        mine = torch.zeros_like(prompt) if prompt.grad is None else prompt.grad
        if not same(mine, gradient):
            raise Wrong(
                f"{case}: the logits are right, and the gradient of prompt {number} is not that of "
                "its rows.\nIs it copied with .data, .detach() or under no_grad?"
            )


def _whose_row(row, number: int, model, prompts, task, tokens, spelled) -> str:
    T, longest = tokens.shape[1], max(map(len, prompts))
    for other in range(len(prompts)):
        if other != int(task[number]) and same(
            row, spelled.logits(tokens[number][None], [other])[0]
        ):
            return f"It is the row with prompt {other}: prompts[task[b]] belongs to row b."
    for other in range(len(task)):
        alone = spelled.logits(tokens[other][None], [int(task[other])])[0]
        if other != number and same(row, alone):
            return f"It is what row {other} should be: are the rows sorted and not put back?"
    prompt, x = prompts[int(task[number])].detach(), model.model.embed_tokens(tokens[number])
    empty = x.new_zeros(longest - len(prompt), x.shape[1])
    P = len(prompt)

    def alone(*parts):
        x = torch.cat(parts)[None]
        return walk(model, x, torch.arange(x.shape[1]))[0]

    if same(row, alone(x)):
        return "It has no prompt before it."
    if len(empty) and same(row, alone(prompt, empty, x)[longest:]):
        return "Its shorter prompt is filled up, and the words see the filling: fill up at the end."
    if len(empty) and same(row, alone(empty, prompt, x)[longest:]):
        return "Its shorter prompt is filled up in front, and all see the filling."
    filled = alone(prompt, x, empty)
    for start, words in ((longest, "longest"), (min(map(len, prompts)), "shortest")):
        if start != P and same(row, filled[start : start + T]):
            return f"It is cut where the {words} prompt ends: its own has {P} tokens."
    if len({len(prompt) for prompt in prompts}) == 1:
        mean = torch.stack([prompt.detach() for prompt in prompts]).mean(0)
        if same(row, alone(mean, x)[P:]):
            return "It has the mean of all prompts before it: each row has one."
    return "First its own prompt, then its words, then filling up; cut at its prompt's length."
