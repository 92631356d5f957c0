"""Given: what the check cell of exercise c looks at: rows with prompts of their own, in one batch.

Each row must have the logits that it has alone with its prompt, each prompt the gradient of its own
rows, in one pass through the blocks. Where a row is another, typical mistakes are made on purpose,
and the one that gives your numbers is named.
"""

import torch

from labs.support.prompt_tuning import scenarios
from labs.support.prompt_tuning.check_forward import LIBRARY, same
from labs.support.prompt_tuning.reference import (
    TYPES,
    Case,
    Spelled,
    draw_case,
    draw_config,
    draw_lengths,
    near,
    right_loss,
    walk,
)
from utils.course.assertions import Wrong, close, forbid
from utils.course.runner import Trial


def together(trial: Trial) -> str:
    """Judges `together`."""
    forbid(trial.path, LIBRARY)
    cases = _cases(trial)
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        for some in (cases[:3], cases[3:]):
            for case, found in zip(some, group.run("together", scenarios.together, some)[0]):
                _right(case, found)
    return (
        "each row has the logits that it has alone with its prompt, also where prompts differ in\n"
        "length, with 1 to 12 prompts, in fp64, fp32 and bf16; each prompt gets the gradient of\n"
        "its own rows; the blocks run once; the model is as it was, and nothing is kept."
    )


def _cases(trial: Trial) -> list[Case]:
    """Prompts of one length, of two, of many; prompts that no row wants, one row, one prompt."""
    draw = trial.draw
    config, P = draw_config(trial), draw.randrange(2, 6)
    short, long = draw.randrange(1, 4), draw.randrange(4, 8)
    some = [
        (torch.float64, (P, P), [0, 1, 1, 0, 1]),
        (torch.float64, (P, P), [1, 1, 0]),  # other prompts of the same lengths
        (torch.float64, (short, long), draw.sample([0, 1, 1, 0, 0], 5)),
        (torch.float64, (P, P, P), [2, 0, 2, 1, 0]),
        (torch.float32, (long, 1, short), [1, 1, 2, 0, 2]),
        (torch.bfloat16, (short, 2, long), [draw.randrange(3) for _ in range(4)]),
        (draw.choice(TYPES[:2]), (draw.randrange(1, 9),), [0] * draw.randrange(1, 4)),
        (torch.float32, (long, short), [draw.randrange(2)]),
        (draw.choice(TYPES[:2]), tuple(draw.randrange(1, 9) for _ in range(12)),
         [draw.randrange(12) for _ in range(20)]),
    ]
    cases = []
    for index, (dtype, prompts, task) in enumerate(some):
        lengths = draw_lengths(trial, len(task)) if index < 7 else ((1, 0),) * len(task)
        more = {"config": config} if index < 4 else {}
        cases.append(
            draw_case(trial, dtype, prompts=prompts, task=tuple(task), lengths=lengths, **more)
        )
    return cases


def _right(case: Case, found: dict) -> None:
    model = case.model().double()
    prompts = [case.prompt(number).double() for number in range(len(case.prompts))]
    (tokens, targets), where = case.rows(), f"{case}, rows {list(case.task)}"
    spelled = Spelled(model, *prompts)
    right = spelled.logits(tokens, case.task)
    for number, row in enumerate(found["logits"]):
        if row.dtype != case.dtype or not same(row, right[number]):
            close(
                f"{where}: row {number}, of task {case.task[number]}, is not what it is alone",
                "a logit", row, right[number], dtype=case.dtype, slack=near(case.dtype),
                hint=_whose_row(row, number, model, prompts, case.task, tokens, spelled),
            )
    made, enough = found["products"]
    if made > enough or found["work"][0] > found["work"][1]:
        raise Wrong(
            f"{where}: right, with {made} matrix products in the blocks and {found['work'][0]:,} "
            f"multiplications in all; {enough} and\n{found['work'][1]:,} will do: one pass for all "
            "rows, as long as the longest."
        )
    right_loss(right, targets).backward()
    for number, (mine, gradient) in enumerate(zip(found["gradients"], spelled.gradients())):
        if mine is None and number not in case.task:
            continue
        hint = "Is it copied with .data, .detach() or under no_grad?"
        what = f"the gradient of prompt {number}"
        if mine is None:
            raise Wrong(f"{where}: the logits are right, and {what} is not there.\n{hint}")
        close(where, what, mine, gradient, hint=f"The logits are right. {hint}", dtype=case.dtype,
              slack=near(case.dtype), scale=1e-3)
    if found["kept"]:
        raise Wrong(
            f"{where}: when the logits are gone, {found['kept']:,} bytes that it made are still "
            "held.\nWho remembers them, and what for?"
        )


def _whose_row(row, number: int, model, prompts, task, tokens, spelled) -> str:
    T, longest = tokens.shape[1], max(map(len, prompts))
    for other in range(len(prompts)):
        if other != task[number] and same(row, spelled.logits(tokens[number][None], [other])[0]):
            return f"It is the row with prompt {other}: prompts[task[b]] belongs to row b."
    for other in range(len(task)):
        alone = spelled.logits(tokens[other][None], [task[other]])[0]
        if other != number and same(row, alone):
            return f"It is what row {other} should be: are the rows sorted and not put back?"
    prompt, x = prompts[task[number]], model.model.embed_tokens(tokens[number])
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
        mean = torch.stack(prompts).mean(0)
        if same(row, alone(mean, x)[P:]):
            return "It has the mean of all prompts before it: each row has one."
    return "First its own prompt, then its words, then filling up; cut at its prompt's length."
