"""Given: what exercises 14a to 14d ask for, and how their check cells judge it.

Drawn models read drawn rows, and everything is compared with a GPT in fp64 that has the virtual
tokens among its words (reference.py). Where your values differ, typical mistakes are made on
purpose, and the one that gives your values is named.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.prompt_tuning import pretrained, reference, tasks
from labs.support.prompt_tuning.reference import (
    IGNORED,
    TYPES,
    Case,
    Spelled,
    compare,
    draw_case,
    draw_config,
    draw_lengths,
    right_loss,
    walk,
)
from utils.course.assertions import (
    Wrong,
    a_number,
    described,
    nothing_kept,
    same_bits,
    unchanged,
)
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.measure.traffic import Traffic
from utils.models.gpt import GPT
from utils.parallel.mesh import make_mesh
from utils.parallel.tensor import loss_function, tensor_parallel

LIBRARY = ("utils.prompts", "peft", "transformers")
SECONDS = 60.0  # for what takes a few seconds on a free core

# ---- what must be as before


@contextmanager
def left_alone(where: str, model: GPT, freezes: bool = False, **inputs: Any) -> Iterator[Look]:
    """Inside, a function of the answer runs. Raises Wrong where the model, an input or the source
    of random numbers is not what it was, and where the gradient of a weight is computed.

    freezes: whether the weights want gradients may change
    """

    def state() -> list:
        modules = [(id(m), m.training, len(m._forward_hooks)) for m in model.modules()]
        return modules + [(id(p), freezes or p.requires_grad) for p in model.parameters()]

    before, seed, made = state(), torch.initial_seed(), []
    hooks = [p.register_hook(made.append) for p in model.parameters() if p.requires_grad]
    with Look(**inputs, **{"a weight of the model": list(model.parameters())}) as look:
        yield look
    for hook in hooks:
        hook.remove()
    unchanged(where, look.changed())
    if made:
        raise Wrong(
            f"{where}: the gradients of {len(made)} weights are computed, "
            f"{sum(x.nbytes for x in made):,} bytes that nobody needs.\n"
            "Freeze the model, or ask for the gradient of the prompt alone."
        )
    if state() != before:
        raise Wrong(
            f"{where}: the modules, modes or parameters of the model are not what they were before "
            "the call."
        )
    if torch.initial_seed() != seed:
        raise Wrong(
            f"{where}: the random numbers of the whole program have a new seed; nothing here is "
            "left to chance."
        )


def a_tensor(what: str, value: Any, shape: tuple, hint: str = "") -> torch.Tensor:
    """Raises Wrong unless `value` is a tensor of this shape."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        found = f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else described(value)
        raise Wrong(f"{what} is {found}, and a tensor of the shape {shape} is right.\n{hint}")
    return value


def a_loss(where: str, value: Any) -> float:
    """The number that is returned as a loss."""
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        raise Wrong(
            f"{where}: the loss is a tensor with its graph, not a float: .item() lets the pass go."
        )
    return a_number(where, "the loss", value)


def two(what: str, value: Any, names: str) -> Sequence:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise Wrong(f"{what} returns {described(value)}, not {names}.")
    return value


def gradients(loss: torch.Tensor, of: list) -> list[torch.Tensor | None]:
    """None where nothing leads back. No weight of the model gets one."""
    if not loss.requires_grad:
        return [None] * len(of)
    return list(torch.autograd.grad(loss, of, allow_unused=True))


# ---- logits: 14a and 14c


def right_logits(where: str, case: Case, read: Callable) -> Look:
    """Rows behind their prompts: logits and gradients, and nothing is kept; returns what was seen.

    read: (model, prompts, task, tokens) -> logits (B, T, V)
    """
    model, task, (tokens, targets) = case.model(), torch.tensor(case.rows_prompts), case.rows()
    prompts = [case.prompt(number).requires_grad_() for number in range(len(case.prompts))]
    where, given = f"{where}, {case}, prompts of the rows: {task.tolist()}", list(prompts)
    inputs = {"prompts": prompts, "task": task, "tokens": tokens}
    with left_alone(where, model, **inputs) as look:
        logits = read(model, given, task, tokens)
    if len(given) != len(prompts) or any(a is not b for a, b in zip(given, prompts)):
        raise Wrong(f"{where}: the list of prompts is not what it was before the call.")
    a_tensor(f"{where}: the result", logits, (*tokens.shape, case.config.vocab_size),
             "Every token has a row of logits, and virtual tokens have none: cut them off.")
    spelled = Spelled(model, *prompts)
    right = spelled.logits(tokens, task.tolist())
    for index, row in enumerate(logits.detach()):
        compare(
            f"{where}: row {index}", "a logit", row, right[index], case.dtype,
            _mistakes(index, case, prompts, tokens, right),
            "First its own prompt, then its words, then padding; cut at its prompt's length. Is "
            "every row so?",
        )
    right_loss(right, targets).backward()
    found = gradients(right_loss(logits, targets), prompts)
    for index, (mine, gradient) in enumerate(zip(found, spelled.gradients())):
        if mine is None and index in task:
            raise Wrong(
                f"{where}: the logits are right, and prompt {index} gets no gradient.\n"
                "Is it copied with .data, .detach(), torch.tensor() or under no_grad?"
            )
        if mine is not None:
            compare(where, f"the gradient of prompt {index}", mine, gradient, case.dtype,
                    otherwise="The logits are right: is the prompt itself before every row?")
    del logits, row
    nothing_kept(where, look.kept())
    work, enough = (sum(p.multiplications for p in x.products) for x in (look, one_pass(case)))
    if work > enough:
        raise Wrong(
            f"{where}: right, with {work:,} multiplications in matrix products, and {enough:,} "
            "will do: one pass of\nall rows, as long as the longest, P + T."
        )
    return look


def one_pass(case: Case) -> Look:
    """What a forward pass of all rows multiplies."""
    with Look() as look, torch.no_grad():
        walk(case.model(), case.vectors())
    return look


def _mistakes(
    index: int, case: Case, prompts: list, tokens: torch.Tensor, right: torch.Tensor
) -> Iterator[tuple[torch.Tensor, str]]:
    """The logits of row `index` that typical mistakes give, and what to say of them."""
    model, wide = case.model().double(), [prompt.detach().double() for prompt in prompts]
    x, own = model.model.embed_tokens(tokens[index]).detach(), case.rows_prompts[index]
    prompt, longest = wide[own], max(case.prompts)
    T, (P, C) = len(x), prompt.shape
    empty = x.new_zeros(longest - P, C)

    def read(*parts: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return walk(model, torch.cat(parts)[None], positions)[0]

    whole = read(prompt, x)
    yield whole[:T], (
        "These are the logits of the first T positions.\n"
        "The virtual tokens stand in front: cut off the first P positions, not the last."
    )
    yield whole[P - 1 : -1], "Cut one position too early: token t's own logits say what follows it."
    behind = "The virtual tokens do not act on the words as they should: do they stand behind them?"
    for values in (read(x), read(x, prompt)[P:]):
        yield values, f"{behind}\nA token sees what is before it: torch.cat((virtual, x), dim=1)."
    restarted = torch.cat((torch.arange(P), torch.arange(T)))
    yield read(prompt, x, positions=restarted)[P:], (
        "The positions start again at the text.\n"
        "The virtual tokens have the positions 0 … P-1, the first word has P."
    )
    for other, its in enumerate(wide):
        if other != own:
            yield read(its, x)[len(its) :], (
                f"It is the row with prompt {other}: prompts[task[b]] belongs to row b."
            )
    for other in set(range(len(right))) - {index}:
        yield right[other], (
            f"It is what row {other} should be: are the rows sorted and not put back?"
        )
    for values in (read(prompt, empty, x), read(empty, prompt, x)):
        yield values[longest:], (
            "Its shorter prompt is padded, and the words see the padding: pad at the end."
        )
    for start, words in ((longest, "longest"), (min(case.prompts), "shortest")):
        yield read(prompt, x, empty)[start : start + T], (
            f"It is cut where the {words} prompt ends: its own has {P} tokens."
        )


# ---- 14a


def forward(trial: Trial) -> str:
    """Judges `batch`, `decode`, `forward` and `answer_loss`."""
    trial.forbid(LIBRARY)
    draw = trial.draw
    # a row so long that bf16 cannot count its positions, each of which matters to this model
    sharp = draw_config(trial, layers=1, heads=6, kv_heads=6, hidden_size=48)
    cases = [
        draw_case(trial, torch.float64, prompts=(draw.randrange(2, 8),), frozen=False),
        draw_case(trial, torch.float32, config=draw_config(trial, layers=draw.randrange(3, 6))),
        draw_case(trial, torch.bfloat16, frozen=False),
        draw_case(trial, draw.choice(TYPES), prompts=(1,), lengths=((1, 0),)),
        draw_case(trial, torch.bfloat16, config=sharp, lengths=((320, 90), (3, 1))),
        draw_case(trial, torch.float32, lengths=draw_lengths(trial, 70, 3)),
    ]
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        group.run("batch", right_rows, trial.new_seed())
        group.run("forward", right_readings, cases, seconds=SECONDS)
    return (
        "questions and padding do not count, answers and their end do, in rows of 1 to 300\n"
        "tokens; logits, loss and both gradients equal those of a GPT in which the virtual tokens\n"
        "are words, in fp64, fp32 and bf16; the model is as it was, and nothing is kept."
    )


def right_rows(answer, seed: int) -> None:
    """`batch`, for rows of drawn lengths; the smallest that is wrong is told."""
    question, reply = st.sampled_from((2, 1, *range(3, 10))), st.sampled_from((2, 1, 0, 3, 4, 7))
    rows = st.lists(st.tuples(question, reply), min_size=1, max_size=9)  # 2 is the clearest
    cases = st.tuples(rows, st.integers(0, 12))
    for_all(seed, cases, lambda case: _right_batch(answer, *case))
    _right_batch(answer, [(200 + seed % 100, 100 + seed % 50), (1, 0)], 0)


def _right_batch(answer, lengths: list[tuple[int, int]], end: int) -> None:
    """The words are 1, 2, 3 …: `end` may be one of them."""
    words, pairs = iter(range(1, 1000)), []
    for question, reply in lengths:
        pairs.append(([next(words) for _ in range(question)], [next(words) for _ in range(reply)]))
    given, where = copy.deepcopy(pairs), f"batch of {_short(pairs)}, end {end}"
    tokens, targets = two("batch", answer.batch(given, end), "the two tensors tokens, targets")
    if given != pairs:
        raise Wrong(
            "batch changes the lists that it was given: question + answer makes a new one."
        )
    right_tokens, right_targets = reference.right_batch(pairs, end)
    for name, one in (("tokens", tokens), ("targets", targets)):
        hint = "The longest row, question + answer + [end], less its last token."
        a_tensor(f"{where}: {name}", one, tuple(right_tokens.shape), hint)
        if one.dtype != torch.int64:
            raise Wrong(f"batch: {name} are {one.dtype}; ids are torch.int64.")
    for row, right, pair in zip(tokens.tolist(), right_tokens.tolist(), pairs):
        if row != right:
            length = sum(map(len, pair))
            hint = "A row is its question, its answer, the end; then padding, on the right."
            if row[-length:] == right[:length]:
                hint = "The padding is on the left: the words must begin at 0 in every row."
            raise Wrong(f"{where}: tokens are {_short(row)}, not {_short(right)}.\n{hint}")
    for row, right, its_tokens in zip(targets.tolist(), right_targets.tolist(), tokens.tolist()):
        if row != right:
            hint = _what_targets(row, right, its_tokens)
            raise Wrong(f"{where}: targets are {_short(row)}, not {_short(right)}.\n{hint}")


def _what_targets(row: list, right: list, tokens: list) -> str:
    counts, own = ([t for t, target in enumerate(x) if target != IGNORED] for x in (right, row))
    if own and all(row[t] == tokens[t] for t in own):
        return "A target is the token itself, not the one after it: nothing is to be predicted."
    if own and min(own) < counts[0]:
        return "The loss goes over the question too: the prompt would learn to predict questions."
    if own and max(own) > counts[-1]:
        return "The loss goes over the padding: those are IGNORED."
    if own and own == counts[1:]:
        return "The answer's first token counts too: the question's last token has to say it."
    if own == counts[:-1]:
        return "The end counts too: without it the model never learns to stop."
    return "targets[t] is the token after tokens[t]."


def _short(value: list) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def right_readings(answer, cases: list[Case]) -> None:
    """`decode`, `forward` and `answer_loss`."""
    for case in cases:
        _right_decode(f"decode, {case}", answer, case)
        right_logits("forward", case, lambda model, prompts, task, tokens: (
            answer.forward(model, prompts[0], tokens)
        ))
        _right_loss(answer, case)


def _right_decode(where: str, answer, case: Case) -> None:
    model, x = case.model(), case.vectors()
    with left_alone(where, model, x=x):
        logits = answer.decode(model, x)
    wide, x = case.model().double(), x.double()
    right = walk(wide, x)

    def mistakes():
        yield walk(wide, x, torch.zeros(x.shape[1])), "All vectors have the same position."
        wide.model.norm = torch.nn.Identity()
        yield walk(wide, x), "model.model.norm stands before the last matrix."

    compare(
        where, "a logit", logits, right, case.dtype, mistakes(),
        "The logits are not the GPT's. In which type are positions counted? Compare it with "
        "Decoder.forward\nand GPT.forward in utils/models/gpt.py, line by line.",
    )


def _right_loss(answer, case: Case) -> None:
    """`answer_loss` of drawn logits; where there are several rows, no token of the first counts."""
    _, targets = case.rows()
    if len(targets) > 1:
        targets[0] = IGNORED
    shape = *targets.shape, case.config.vocab_size
    logits = (2 * fractions(case.seed, *shape, dtype=case.dtype)).requires_grad_()
    where = f"answer_loss, logits {shape} in {case.dtype}"
    with Look(logits=logits, targets=targets) as look:
        loss = answer.answer_loss(logits, targets)
    unchanged(where, look.changed())
    a_tensor(f"{where}: the result", loss, (), "The mean is one number.")
    wide, counts = logits.detach().double().requires_grad_(), (targets != IGNORED).sum(dim=1)
    right, count = right_loss(wide, targets), counts.sum()
    rows = [right_loss(one[None], row[None]) for one, row, c in zip(wide, targets, counts) if c]
    mistakes = [
        (right * count / targets.numel(),
         "The sum is right, and it is divided by all B·T places: divide by those that count."),
        (right * count, "It is the sum; take the mean over the tokens that count."),
    ]
    if (targets[:, 1:] != IGNORED).any():
        shifted = right_loss(wide[:, :-1], targets[:, 1:])
        words = "Shifted once too often: `batch` has already put the next token beside each."
        mistakes.append((shifted, words))
    words = "The mean of the rows' means? A token of a short answer weighs more there, and a row "
    words += "without any\nhas none. All tokens that count are alike, in whatever row."
    otherwise = f"Which targets count? The {count} that are not IGNORED, each alike."
    if loss.isnan() and 0 in counts:
        otherwise = words
    least = torch.promote_types(case.dtype, torch.float32)  # for sums of many numbers
    mistakes.append((torch.stack(rows).mean(), words))
    compare(where, "the result", loss, right, least, mistakes, otherwise)
    (gradient,) = gradients(loss, [logits])
    if gradient is None:
        raise Wrong(f"{where}: the loss is right, and no gradient comes back to the logits.")
    right.backward()
    compare(where, "the gradient of the logits", gradient, wide.grad, case.dtype)


# ---- 14b

BAR = 0.8  # of the held-out questions
# of the loss, relative: the first step's, in which the prompts are equal
LOSS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}


def tuning(trial: Trial) -> str:
    """Judges `begin`, `step` and `tune`."""
    trial.forbid(LIBRARY)
    draw = trial.draw
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        for dtype in TYPES:
            case = draw_case(trial, dtype, frozen=False)
            words = [draw.randrange(case.config.vocab_size) for _ in range(draw.randrange(1, 6))]
            words.append(words[0])
            given = {"config": case.config, "prompts": (len(words),)}
            rows = [draw_case(trial, dtype, **given) for _ in range(4)]
            group.run("begin and step", right_training, case, words, draw.uniform(0.01, 0.3), rows)
        name, seed = draw.choice(tasks.NAMES), draw.randrange(1000)
        words = [draw.randrange(pretrained.LETTERS) for _ in range(tasks.LENGTHS[name])]
        model = pretrained.load()
        given = model.state_dict(), name, words, seed
        (prompt,) = group.run("tune", learned, *given, seconds=SECONDS)
    right = tasks.accuracy(model, name, prompt, seed)
    if right < BAR:
        start = model.model.embed_tokens.weight.detach()[words]
        moved, size = (x.abs().mean().item() for x in (prompt - start, start))
        raise Wrong(
            f"tune, task {name}: {right:.0%} of {tasks.TO_MEASURE} held-out questions are answered,"
            f" {BAR:.0%} are the least.\nDo the losses fall from batch to batch? The prompt's "
            f"values have moved by {moved:.2g} on average, and began at {size:.2g}:\nthey are so "
            "few that they need a learning rate a hundred times that of weights."
        )
    return (
        "the prompt is all that has a gradient and all that Adam knows; its path is that of a GPT\n"
        "whose words it is; no bit of the model changed, and nothing is kept; it answers more "
        f"than\n{BAR:.0%} of questions that it has not seen."
    )


class Path:
    """The prompt in fp64. zero: whether each step starts from a gradient of zero."""

    def __init__(self, model: GPT, words: list[int], lr: float, zero: bool):
        self.model, self.zero = model, zero
        self.prompt = model.model.embed_tokens.weight.detach().double()[words].requires_grad_()
        self.optimizer = torch.optim.Adam([self.prompt], lr=lr)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """The loss before it."""
        spelled = Spelled(self.model, self.prompt)
        loss = right_loss(spelled.logits(tokens), targets)
        loss.backward()
        before = 0 if self.zero or self.prompt.grad is None else self.prompt.grad
        self.prompt.grad = spelled.gradients()[0] + before
        self.optimizer.step()
        return loss.item()

    def is_at(self, prompt: torch.Tensor) -> bool:
        """Up to a thousandth of a step, except for a few values: where the gradient is next to
        nothing, Adam makes a full step of a rounding error."""
        far = (prompt.double() - self.prompt).abs() > 1e-3 * self.optimizer.param_groups[0]["lr"]
        return int(far.sum()) <= max(2, 0.03 * far.numel())


def right_training(answer, case: Case, words: list[int], lr: float, rows: list[Case]) -> None:
    """`begin`, a step for each of `rows`, then `tune` with the same."""
    model, given = case.model(), torch.tensor(words)
    start = f"begin, {len(words)} words, lr {lr:.3g}, {case}"
    with left_alone(start, model, freezes=True, words=given):
        result = answer.begin(model, given, lr)
    prompt, optimizer = two("begin", result, "the two things prompt, optimizer")
    _right_beginning(start, prompt, optimizer, model, words)
    right, added_up = (Path(case.model(), words, lr, zero) for zero in (True, False))
    for index, some in enumerate(rows):
        where, (tokens, targets) = f"step {index + 1} of {len(rows)}, {some}", some.rows()
        before, wanted = prompt.detach().clone(), right.step(tokens, targets)
        added_up.step(tokens, targets)
        with left_alone(where, model, tokens=tokens, targets=targets) as look:
            loss = answer.step(model, prompt, optimizer, tokens, targets)
        if torch.equal(prompt, before):
            raise Wrong(f"{where}: the prompt is what it was. Does it get a gradient, and a step?")
        loss = a_loss(where, loss)
        if index == 0 and not abs(loss - wanted) <= LOSS[case.dtype] * max(1, wanted):
            raise Wrong(f"{where} returns the loss {loss:.6f}, and {wanted:.6f} is right.")
        if case.dtype != torch.bfloat16 and not right.is_at(prompt):
            hint = "Steps of Adam with the gradient of answer_loss make another prompt."
            if index and added_up.is_at(prompt):
                hint = "The gradients of earlier steps are still in it: optimizer.zero_grad()."
            raise Wrong(f"after {where}, the prompt is not what it should be.\n{hint}")
        state = [t for held in optimizer.state.values() for t in held.values()]
        if index:
            nothing_kept(where, look.kept(prompt.grad, state))
    model, where = case.model(), f"tune, {len(rows)} batches, {case}"
    with left_alone(where, model, freezes=True) as look:
        prompt = answer.tune(model, torch.tensor(words), [some.rows() for some in rows])
    _right_result(prompt, model, words)
    nothing_kept(where, look.kept(prompt, prompt.grad))


def _right_beginning(
    where: str, prompt: Any, optimizer: Any, model: GPT, words: list[int]
) -> None:
    rows = model.model.embed_tokens.weight.detach()
    a_tensor(f"{where}: the prompt", prompt, (len(words), rows.shape[1]), "It is (P, C).")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Wrong(f"{where}: the optimizer is {described(optimizer)}.")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    memory = prompt.untyped_storage().data_ptr(), rows.untyped_storage().data_ptr()
    for wrong, told in (
        (not prompt.requires_grad or not prompt.is_leaf,
         "the prompt is not a leaf that requires a gradient: nn.Parameter."),
        (memory[0] == memory[1],
         "the prompt lies in the embedding's memory: the model would learn too."),
        (prompt.dtype != rows.dtype, f"the prompt is {prompt.dtype}, and the model {rows.dtype}."),
        (not torch.equal(prompt, rows[words]),
         "the prompt does not start as the embedding's rows of `words`."),
        (not any(p is prompt for p in held),
         "the prompt is not among what the optimizer updates."),
        (len(held) > 1,
         f"the optimizer holds {len(held) - 1} tensors besides the prompt, which alone learns."),
        (optimizer.param_groups[0].get("weight_decay"),
         "the optimizer has a weight decay: none is asked."),
    ):
        if wrong:
            raise Wrong(f"{where}: {told}")


def _right_result(prompt: Any, model: GPT, words: list[int]) -> None:
    a_tensor("tune: the result", prompt, (len(words), model.config.hidden_size), "It is (P, C).")
    if torch.equal(prompt, model.model.embed_tokens.weight[words]):
        raise Wrong("tune: the prompt is what it was at the beginning.")


def learned(answer, weights: dict, name: str, words: list[int], seed: int) -> torch.Tensor:
    """The prompt that `tune` finds on the model with its skills, (P, C)."""
    model, calls = GPT(pretrained.CONFIG).eval(), Counter()
    model.load_state_dict(weights)
    functions, batches = (answer.begin, answer.step), tasks.Batches(answer, name, seed)

    def counted(function: Callable, *args: Any, **keywords: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **keywords)

    answer.begin, answer.step = (functools.partial(counted, function) for function in functions)
    prompt = answer.tune(model, torch.tensor(words), batches)
    answer.begin, answer.step = functions
    if any(not torch.equal(now, weights[key]) for key, now in model.state_dict().items()):
        raise Wrong("tune: a weight of the model is not what it was before the call.")
    _right_result(prompt, model, words)
    if calls["begin"] > 1:
        raise Wrong(
            f"begin was called {calls['begin']} times: one prompt goes through all batches."
        )
    if batches.drawn != tasks.STEPS or calls["step"] > tasks.STEPS:
        raise Wrong(
            f"tune looks at {batches.drawn} of the batches, takes {calls['step']} steps, and there "
            f"are {tasks.STEPS}: one step for each."
        )
    return prompt.detach().clone()


# ---- 14c


def together(trial: Trial) -> str:
    """Judges `together`."""
    trial.forbid(LIBRARY)
    draw = trial.draw
    config, P = draw_config(trial, vocab_size=draw.randrange(101, 131)), draw.randrange(2, 6)
    short, long = draw.randrange(1, 4), draw.randrange(4, 8)
    some = [  # dtype, prompts, the task of each row: one length, two, many; one row, one prompt
        (torch.float64, (P, P), [0, 1, 1, 0, 1]),
        (torch.float64, (short, long), draw.sample([0, 1, 1, 0, 0], 5)),
        (torch.float64, (P, P, P), [2, 0, 2, 1, 0]),
        (torch.float32, (long, 1, short), [1, 1, 2, 0, 2]),
        (torch.bfloat16, (short, 2, long), [draw.randrange(3) for _ in range(4)]),
        (draw.choice(TYPES[:2]), (draw.randrange(1, 9),), [0] * draw.randrange(1, 4)),
        (torch.float32, (long, short), [draw.randrange(2)]),
        (draw.choice(TYPES[:2]), tuple(draw.randrange(1, 9) for _ in range(12)),
         [draw.randrange(12) for _ in range(20)]),
    ]
    cases = [
        draw_case(trial, dtype, prompts=prompts, task=tuple(task), config=config,
                  lengths=draw_lengths(trial, len(task)))
        for dtype, prompts, task in some
    ]
    trial.alone("together", right_together, cases, seconds=SECONDS)
    return (
        "each row has the logits that it has alone with its prompt, also where prompts differ in\n"
        "length, with 1 to 12 prompts, in fp64, fp32 and bf16; each prompt gets the gradient of\n"
        "its own rows; the blocks run once; the model is as it was, and nothing is kept."
    )


def right_together(answer, cases: list[Case]) -> None:
    for case in cases:
        look = right_logits("together", case, answer.together)
        made, enough = (  # but for the last matrix, which may multiply row by row
            sum(p.right[-1] != case.config.vocab_size for p in x.products)
            for x in (look, one_pass(case))
        )
        if made > enough:
            raise Wrong(
                f"together, {case}: right, with {made} matrix products in the blocks, and {enough} "
                "will do: one pass for all rows, as long as the longest."
            )


# ---- 14d

# of the loss, relative
LOSS_OF_ALL = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1.5e-3}


def ranks(trial: Trial) -> str:
    """Judges `backward`."""
    trial.forbid(LIBRARY)
    meshes = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 1: [(1, 1)], 4: [(2, 2)]}  # (dp, tp)
    meshes |= {5: [trial.draw.choice([(5, 1), (1, 5)])], 6: [trial.draw.choice([(3, 2), (2, 3)])]}
    types = {2: TYPES, 3: TYPES[:2]}
    hang = "Does every rank call the same collectives, each on the axis's own group?"
    for group in trial.groups(hang=hang):
        for dtype in types.get(group.size, [trial.draw.choice(TYPES[:2])]):
            for sizes in meshes[group.size]:
                cases, late = _rows_of_ranks(trial, *sizes, dtype), dtype == torch.float64
                case = group.case("dp {} · tp {}, ".format(*sizes) + str(cases[0]))
                found = group.run(case, right_backward, sizes, cases, late=late)
                same_bits(case, "prompt.grad", found, "Every rank takes the same step with it.")
    return (
        "tensor-parallel ranks all have one rank's gradient, without a message of yours;\n"
        "data-parallel ranks add theirs up, in answers of unequal length, also where a rank has\n"
        "none: one rank's again, bit by bit the same on all; on 1 to 6 ranks, in fp64, fp32 and\n"
        "bf16, with late messages; three messages over dp at most, and nothing is kept."
    )


def _rows_of_ranks(trial: Trial, dp: int, tp: int, dtype: torch.dtype) -> list[Case]:
    """For each rank of dp its rows, in which answers have other lengths: on one none may count. In
    bf16 an odd number above 256 counts: bf16 does not count so far."""
    draw = trial.draw
    lengths = [draw_lengths(trial, draw.randrange(1, 5), most=3 + 2 * rank) for rank in range(dp)]
    if dtype == torch.bfloat16:  # with its end, an answer counts one more
        lengths = [((2, 9),) * (26 // dp) for _ in range(dp)]
        lengths[0] += ((3, 2 * draw.randrange(8)),)
    whole = draw_case(trial, dtype, config=draw_config(trial, ranks=tp), frozen=True)
    silent = draw.randrange(dp) if dp > 1 and dtype == torch.float64 else None
    return [replace(whole, lengths=some, task=(rank,), silent=rank == silent)
            for rank, some in enumerate(lengths)]


def right_backward(answer, sizes: tuple[int, int], cases: list[Case]) -> torch.Tensor:
    """On a rank: prompt.grad after `backward`. cases: the rows of each rank of dp."""
    (dp, tp), mesh = sizes, make_mesh(dp=sizes[0], tp=sizes[1])
    case, where = cases[mesh.dp.index], f"rank {dist.get_rank()}"
    model, prompt, (tokens, targets) = tensor_parallel(case.model(), mesh.tp), None, case.rows()
    right, total, count = _alone(cases)
    own_loss, own, messages = _own(model, case, mesh)
    prompt = case.prompt().requires_grad_()
    inputs = {"prompt": prompt, "tokens": tokens, "targets": targets}
    with left_alone(where, model, **inputs) as look:
        loss = answer.backward(model, prompt, tokens, targets, mesh)
    loss, gradient, counts = a_loss(where, loss), prompt.grad, int((targets != IGNORED).sum())
    if gradient is None:
        raise Wrong(f"{where}: prompt.grad is None after backward.")
    mistakes = [
        (tp * right, f"It is {tp} times that: added up over tp. The model's own all-reduces (f, "
         "lab 06) have already\nmade the gradient whole on each of the ranks that share the "
         "matrices."),
        (right / tp, f"It is 1/{tp} of it: the same rows are on all ranks of tp, and they count "
         "once."),
        (right / dp, f"It is 1/{dp} of it: the sum over the ranks was divided once more."),
        *[(own / n, "It is that of this rank's own rows: who adds up those of the others?")
          for n in (counts, count) if n],
    ]
    otherwise = (
        f"This rank has {counts} tokens that count, all have {count}. The mean of two means\nis "
        "not the mean: divide each sum of losses by the tokens of all."
    )
    compare(where, "prompt.grad", gradient, right, case.dtype, mistakes, otherwise)
    if case.dtype == torch.bfloat16:  # whose rounding is more than a wrong count would do
        total = own_loss
    if not abs(loss - total / count) <= LOSS_OF_ALL[case.dtype] * max(1, total / count):
        raise Wrong(
            f"{where}: the gradient is right, and the loss is {loss:.6g}, where {total / count:.6g}"
            f" is right.\nThe loss of all rows is the sum over all {count} tokens that count, by "
            "their number."
        )
    _right_messages(where, look, mesh, messages, gradient)
    more = gradient.untyped_storage().nbytes() - gradient.nbytes  # of a message, not of a buffer
    nothing_kept(where, look.kept(gradient) + more * (more > 64))
    mesh.close()
    return gradient


def _alone(cases: list[Case]) -> tuple[torch.Tensor, float, int]:
    """One rank with all rows, in fp64: the gradient, the sum of losses, how many tokens count."""
    spelled, total, count = Spelled(cases[0].model(), cases[0].prompt()), 0, 0
    for tokens, targets in (case.rows() for case in cases):
        if counting := int((targets != IGNORED).sum()):
            total = total + right_loss(spelled.logits(tokens), targets) * counting
            count += counting
    (total / count).backward()
    return spelled.gradients()[0], total.item(), count


def _own(model: GPT, case: Case, mesh) -> tuple[float, torch.Tensor, list]:
    """In the model's type: the sum of the losses of all ranks, the gradient of this rank's, and the
    messages that the model itself sends, (operation, bytes)."""
    prompt, (tokens, targets) = case.prompt().requires_grad_(), case.rows()
    with Traffic() as traffic:
        x = torch.cat((prompt.expand(len(tokens), -1, -1), model.model.embed_tokens(tokens)), dim=1)
        logits = walk(model, x)[:, len(prompt) :]
        loss = loss_function(model)(logits, targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, [prompt])
    total = loss.detach().double()
    if mesh.dp.size > 1:
        dist.all_reduce(total, group=mesh.dp.group)
    events = [event for event in traffic.events if event.group_size > 1]
    return total.item(), gradient, sorted((event.op, event.payload) for event in events)


def _right_messages(where: str, look: Look, mesh, model: list, gradient: torch.Tensor) -> None:
    """Three all-reduces over dp at most: of the number of tokens, the gradient and the loss."""
    name = None if mesh.dp.group is None else mesh.dp.group.group_name
    events = [event for event in look.events if event.group_size > 1]
    over_dp = [(event.op, event.payload) for event in events if event.group == name]
    others = sorted((event.op, event.payload) for event in events if event.group != name)
    size, enough = sum(n for _, n in over_dp), gradient.numel() * max(4, gradient.itemsize) + 16
    names = sorted({op for op, _ in over_dp})
    if others != model or len(over_dp) > 3 or size > enough or names not in ([], ["all_reduce"]):
        raise Wrong(
            f"{where}: right, but besides the model's own messages there are {len(over_dp)} of "
            f"{size:,} bytes over dp ({', '.join(names)})\nand {len(others) - len(model)} others; "
            f"3 all-reduces over dp, of {enough:,} bytes, do."
        )
