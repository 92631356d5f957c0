"""Given: what the check cell of exercise a looks at: rows, logits, the loss, the gradients.

Drawn models read drawn rows, and everything is compared with a GPT in fp64 that has the virtual
tokens among its words (reference.py) and runs the rows one by one. Where your numbers differ,
typical mistakes are made on purpose, and the one that gives your numbers is named.
"""

import torch

from labs.support.prompt_tuning import scenarios
from labs.support.prompt_tuning.reference import (
    IGNORED,
    NEAR,
    TYPES,
    Case,
    Spelled,
    draw_case,
    draw_config,
    draw_lengths,
    near,
    right_batch,
    right_loss,
    walk,
)
from utils.course.assertions import Wrong, close, forbid, number
from utils.course.runner import Trial

LIBRARY = ("utils.prompts", "peft", "transformers")


def forward(trial: Trial) -> str:
    """Judges `batch`, `decode`, `forward` and `answer_loss`."""
    forbid(trial.path, LIBRARY)
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        given = _pairs(trial)
        for (pairs, end), found in zip(given, group.run("batch", scenarios.rows, given)[0]):
            _right_rows(pairs, end, *found)
        cases = _cases(trial)
        for some in (cases[:2], cases[2:]):
            for case, found in zip(some, group.run("forward", scenarios.logits, some)[0]):
                _right_logits(*case, found)
        given = _losses(trial)
        for case, found in zip(given, group.run("answer_loss", scenarios.losses, given)[0]):
            _right_loss(case, found)
    return (
        "questions and padding do not count, answers and their end do, in rows of 1 to 300\n"
        "tokens; logits, loss and both gradients equal those of a GPT in which the virtual tokens\n"
        "are words, in fp64, fp32 and bf16; the model is as it was, and nothing is kept."
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to what a's type may be away."""
    if a.shape != b.shape or not a.numel():
        return False
    return bool((a.double() - b.double()).abs().max() <= NEAR[a.dtype] * b.double().abs().max())


# ---- cases


def _pairs(trial: Trial) -> list:
    """Pairs and an end, which may be a word of them; equal shapes, one row, many and long ones."""
    draw, cases = trial.draw, []
    few = draw_lengths(trial, draw.randrange(3, 8))
    long = ((draw.randrange(200, 300), draw.randrange(100, 150)), (1, 0))
    for lengths in (few, few, draw_lengths(trial, 1, 9), draw_lengths(trial, 80, 5), long):
        end = draw.choice((0, draw.randrange(1, 50_000)))
        pairs = [tuple([draw.randrange(50_000) for _ in range(n)] for n in row) for row in lengths]
        if len(pairs) > 1:  # the end where a target stands, and where none does
            question, answer = pairs[0]
            question[-1] = end
            answer += [end, 5]
        cases.append((pairs, end))
    return [*cases, ([([5], [])], 7)]


def _cases(trial: Trial) -> list[tuple[Case, tuple[int, int]]]:
    """Two models of the same sizes, then other types and sizes: the smallest, long, and many rows.
    With each the (rows, length) of vectors for `decode`."""
    draw = trial.draw
    alike = {
        "config": draw_config(trial), "lengths": draw_lengths(trial, 3), "spread": True,
        "prompts": (draw.randrange(2, 8),),
    }
    long = {
        "prompts": (draw.randrange(9, 20),),
        "lengths": ((draw.randrange(150, 200), 90), (3, 1)),
    }
    return [
        (draw_case(trial, torch.float64, **alike), (3, 7)),
        (draw_case(trial, torch.float64, **alike, frozen=False), (3, 7)),
        (
            draw_case(trial, torch.float32, config=draw_config(trial, layers=draw.randrange(3, 6))),
            (draw.randrange(1, 5), draw.randrange(1, 10)),
        ),
        (draw_case(trial, torch.bfloat16, frozen=False), (1, 5)),
        (draw_case(trial, draw.choice(TYPES), prompts=(1,), lengths=((1, 0),)), (1, 1)),
        (draw_case(trial, torch.bfloat16, config=draw_config(trial, layers=1), **long), (1, 300)),
        (draw_case(trial, torch.float32, lengths=draw_lengths(trial, 70, 3)), (2, 65)),
    ]


def _losses(trial: Trial) -> list[tuple]:
    """Few and many tokens that count, in rows of which one has none; more than bf16 counts to."""
    draw, cases = trial.draw, []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float32):
        B, T = draw.randrange(3, 7), draw.randrange(4, 12)
        counting = [draw.randrange(1, T + 1) for _ in range(B)]
        counting[draw.randrange(B)] = 0
        cases.append(((B, T, draw.choice((11, 300))), dtype, counting))
    cases.append(((1, 1, 37), draw.choice(TYPES), [1]))
    many = [draw.randrange(1, 130) for _ in range(3)]
    cases.append(((4, 130, 5), torch.bfloat16, [129, *many]))
    return [
        (f"logits of {shape} in {dtype}, {sum(counting)} tokens that count",
         shape, dtype, trial.new_seed(), counting)
        for shape, dtype, counting in cases
    ]


# ---- rows


def _right_rows(pairs: list, end: int, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    right_tokens, right_targets = right_batch(pairs, end)
    for index, (question, words) in enumerate(pairs):
        length = len(question) + len(words)
        case = (
            f"batch, a row of {len(question)} + {len(words)} tokens and the end, "
            f"T = {tokens.shape[1]}"
        )
        row, right = tokens[index].tolist(), right_tokens[index].tolist()
        if row != right:
            hint = "A row is its question, its answer, the end; then filling up, on the right."
            if row[-length:] == right[:length]:
                hint = "The filling stands on the left: the words must begin at 0 in every row."
            raise Wrong(f"{case}: tokens are {_short(row)}, not {_short(right)}.\n{hint}")
        _right_targets(targets[index].tolist(), right_targets[index].tolist(), row, case)


def _right_targets(row: list, right: list, tokens: list, case: str) -> None:
    if row == right:
        return
    counts = [place for place, target in enumerate(right) if target != IGNORED]
    first, last = counts[0], counts[-1]
    own = [place for place, target in enumerate(row) if target != IGNORED]
    hint = "targets[t] is the token after tokens[t]."
    if own and all(row[place] == tokens[place] for place in own):
        hint = "A target is the token itself, not the one after it: nothing is to be predicted."
    elif own and min(own) < first:
        hint = "The loss goes over the question too: the prompt would learn to foretell questions."
    elif own and max(own) > last:
        hint = "The loss goes over the filling: those are IGNORED."
    elif own == counts[1:]:
        hint = "The answer's first token counts too: the question's last token has to say it."
    elif own == counts[:-1]:
        hint = "The end counts too: without it the model never learns to stop."
    raise Wrong(f"{case}: targets are {_short(row)}, not {_short(right)}.\n{hint}")


def _short(row: list) -> str:
    return str(row) if len(row) <= 20 else f"{str(row[:20])[:-1]}, …]"


# ---- logits


def _right_logits(case: Case, sizes: tuple[int, int], found: dict) -> None:
    model, prompt = case.model().double(), case.prompt().double()
    x, (tokens, targets) = case.vectors(*sizes).double(), case.rows()
    right = walk(model, x, torch.arange(sizes[1]))
    close(f"decode, {case}, x {(*sizes, x.shape[2])}", "a logit", found["decoded"], right,
          hint=_symptom_of_decode(found["decoded"], model, x), dtype=case.dtype,
          slack=near(case.dtype))
    spelled = Spelled(model, prompt)
    whole, T = spelled.all_logits(tokens), case.T
    whole = torch.stack(whole)
    words = f"forward, {case}"
    close(words, "a logit", found["logits"], whole[:, len(prompt) :],
          hint=_what_is_wrong(found["logits"], whole, model, prompt, tokens), dtype=case.dtype,
          slack=near(case.dtype))
    if found["gradient"] is None:
        raise Wrong(
            f"{words}: the logits are right, and the prompt gets no gradient.\n"
            "Is it copied with .data, .detach(), torch.tensor() or under no_grad?"
        )
    right_loss(whole[:, len(prompt) :], targets).backward()
    hint = "The logits are right: is the prompt itself what stands before every row?"
    close(words, "the prompt's gradient", found["gradient"], spelled.gradients()[0], hint=hint,
          dtype=case.dtype, slack=near(case.dtype))
    if found["kept"]:
        raise Wrong(
            f"{words}: when the logits are gone, {found['kept']:,} bytes that it made are still "
            "held.\nWho remembers them, and what for?"
        )
    if found["work"] > found["enough"]:
        raise Wrong(
            f"{words}: {found['work']:,} numbers are multiplied in matrix products, and "
            f"{found['enough']:,} will do:\n"
            f"one pass of P + T = {len(prompt)} + {T} positions a row."
        )


def _symptom_of_decode(logits: torch.Tensor, model, x: torch.Tensor) -> str:
    L = x.shape[1]
    if same(logits, walk(model, x, torch.zeros(L))):
        return "All vectors have the same position."
    if same(logits, _without_norm(model, x)):
        return "model.model.norm stands before the last matrix."
    return (
        "The logits are not the GPT's.\n"
        "Compare it with Decoder.forward and GPT.forward in utils/models/gpt.py, line by line."
    )


def _without_norm(model, x: torch.Tensor) -> torch.Tensor:
    decoder = model.model
    norm, decoder.norm = decoder.norm, torch.nn.Identity()
    logits = walk(model, x, torch.arange(x.shape[1]))
    decoder.norm = norm
    return logits


def _what_is_wrong(logits, whole, model, prompt, tokens) -> str:
    P, T = len(prompt), tokens.shape[1]
    x = model.model.embed_tokens(tokens)
    virtual = prompt.expand(len(tokens), P, -1)
    before, after = torch.cat((virtual, x), 1), torch.cat((x, virtual), 1)
    restarted = torch.cat((torch.arange(P), torch.arange(T)))
    behind = walk(model, after, torch.arange(P + T))
    if same(logits, whole[:, :T]):
        return (
            "These are the logits of the first T positions.\n"
            "The virtual tokens stand in front: cut off the first P positions, not the last."
        )
    if same(logits, whole[:, P - 1 : -1]):
        return "Cut one position too early: token t's own logits say what follows it."
    if same(logits, walk(model, x, torch.arange(T))) or same(logits, behind[:, P:]):
        return (
            "The virtual tokens do not act on the words as they should: do they stand behind them?"
            "\nA token sees what is before it: torch.cat((virtual, x), dim=1)."
        )
    if same(logits, walk(model, before, restarted)[:, P:]):
        return (
            "The positions start again at the text.\n"
            "The virtual tokens have the positions 0 … P-1, the first word has P."
        )
    if same(logits[:1], whole[:1, P:]):
        return "The first row is right and others are not: every row needs the prompt."
    return "They should be those of the prompt followed by the words."


# ---- loss


def _right_loss(case: tuple, found: dict) -> None:
    words, _, dtype, *_ = case
    (given, targets), loss = scenarios.spoken(*case), found["loss"]
    right = right_loss(given.double().requires_grad_(), targets)
    least = torch.promote_types(dtype, torch.float32)
    if loss.dtype != least:
        raise Wrong(
            f"{words}: answer_loss is {loss.dtype}, and {least} is asked for.\n"
            "Sums of many numbers are not made below fp32, and those of fp64 stay there."
        )
    close(words, "answer_loss", loss, right, hint=_symptom_of_loss(loss, given, targets),
          slack=NEAR[torch.float64] / torch.finfo(loss.dtype).eps)
    if found["gradient"] is None:
        raise Wrong(f"{words}: answer_loss is right, and no gradient comes back to the logits.")
    logits = given.double().requires_grad_()
    right_loss(logits, targets).backward()
    close(words, "the gradient of the logits", found["gradient"], logits.grad, dtype=dtype,
          slack=0.1 * near(dtype))


def _symptom_of_loss(loss, logits, targets) -> str:
    logits, counts = logits.double(), (targets != IGNORED).sum(dim=1)
    rows = [right_loss(one[None], other[None]) for one, other in zip(logits, targets)]
    sums = [row * count for row, count in zip(rows, counts) if count]
    means = torch.stack([row for row, count in zip(rows, counts) if count]).mean()
    if same(loss, means) or (loss.isnan() and 0 in counts):
        return (
            "The mean over rows of each row's mean? A token of a short answer weighs more there, "
            "and a row\nwithout any has none. All tokens that count are alike, in whatever row."
        )
    if same(loss, sum(sums) / targets.numel()):
        return "The sum is right, and it is divided by all B·T places: divide by those that count."
    if same(loss, sum(sums)):
        return "It is the sum; take the mean over the tokens that count."
    if targets.shape[1] > 1 and same(loss, right_loss(logits[:, :-1], targets[:, 1:])):
        return "Shifted once too often: `batch` has already put the next token beside each."
    return f"Which targets count? Those that are not IGNORED, each alike: {number(counts.sum())}."
