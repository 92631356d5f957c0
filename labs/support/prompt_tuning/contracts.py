"""Given: the contracts of exercises 14a to 14d, and the judges behind their check cells.

Drawn models read drawn rows, and everything is compared with the course's own prompts in fp64
(reference.py). If your values differ, typical mistakes are reproduced, and the one that gives your
values is named.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from labs.support.prompt_tuning import pretrained, tasks
from labs.support.prompt_tuning.reference import (
    Case,
    compare,
    draw_case,
    draw_config,
    right_batch,
    right_logits,
    right_loss,
    walk,
)
from utils.course.assertions import Wrong, a_number, close, same_bits, unchanged
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.measure.traffic import Traffic
from utils.models.gpt import GPT
from utils.parallel.mesh import make_mesh
from utils.parallel.tensor import loss_function, tensor_parallel
from utils.prompts.data import IGNORED

LIBRARY = ("utils.prompts", "peft", "transformers")
SECONDS = 60.0  # for what takes a few seconds on a free core
LOSS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}  # relative


@contextmanager
def left_alone(where: str, model: GPT, freezes: bool = False, **inputs: Any) -> Iterator[Look]:
    """Run a function of the answer inside this context. Raises Wrong if the model or an input
    changes, or if a weight's gradient is computed.

    freezes: whether requires_grad of the weights may change
    """
    weights, made = list(model.parameters()), []
    wanted = [p.requires_grad for p in weights]
    hooks = [p.register_hook(made.append) for p in weights if p.requires_grad]
    with Look(**inputs, **{"a weight of the model": weights}) as look:
        yield look
    for hook in hooks:
        hook.remove()
    unchanged(where, look.changed())
    if made:
        raise Wrong(
            f"{where}: the gradients of {len(made)} weights are computed, "
            f"{sum(x.nbytes for x in made):,} bytes that are not needed.\n"
            "Freeze the model, or compute only the prompt's gradient."
        )
    if not freezes and wanted != [p.requires_grad for p in weights]:
        raise Wrong(f"{where}: some weights of the model no longer require a gradient.")


def a_loss(where: str, value: Any, right: float, dtype: torch.dtype) -> None:
    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
        raise Wrong(
            f"{where}: the loss is a tensor with its graph, not a float: .item() frees the graph."
        )
    if not abs(a_number(where, "the loss", value) - right) <= LOSS[dtype] * max(1, right):
        raise Wrong(f"{where}: the loss is {float(value):.6f}, and {right:.6f} is right.")


# ---- logits: 14a and 14c


def reads(case: Case, read: Callable) -> Look:
    """Check logits and gradients of rows that follow their prompts; returns the `Look`.

    read: (model, prompts, task, tokens) -> logits (B, T, V)
    """
    model, task, (tokens, targets) = case.model(), torch.tensor(case.task), case.rows()
    prompts = [case.prompt(number) for number in range(len(case.prompts))]
    where = f"{case}, prompts of the rows: {list(case.task)}"
    with left_alone(where, model, prompts=prompts, task=task, tokens=tokens) as look:
        logits = read(model, prompts, task, tokens)
    right = right_logits(model, prompts, case.task, tokens)
    if getattr(logits, "shape", ()) != right.shape:
        close(where, "the result", logits, right,
              hint="Every token has a row of logits; virtual tokens have none: cut them off.")
    for index, row in enumerate(logits.detach()):
        compare(
            f"{where}: row {index}", "a logit", row, right[index], case.dtype,
            _mistakes(index, case, prompts, tokens, right.detach()),
            "Is every row its own prompt, then its words, then padding, cut at its prompt's "
            "length?",
        )
    mine, wanted = (
        torch.autograd.grad(right_loss(x, targets), prompts, allow_unused=True)
        if x.requires_grad else [None] * len(prompts)
        for x in (logits, right)
    )
    for index, (gradient, its) in enumerate(zip(mine, wanted)):
        if its is not None and gradient is None:
            raise Wrong(
                f"{where}: the logits are right, but prompt {index} gets no gradient.\n"
                "Is it copied with .data, .detach(), torch.tensor() or under no_grad?"
            )
        if its is not None:
            compare(where, f"the gradient of prompt {index}", gradient, its, case.dtype,
                    otherwise="The logits are right: is the prompt itself before every row?")
    return look


def _mistakes(
    index: int, case: Case, prompts: list, tokens: torch.Tensor, right: torch.Tensor
) -> Iterator[tuple[torch.Tensor, str]]:
    """The logits of row `index` that typical mistakes give, and a hint for each."""
    model, wide = case.model().double(), [prompt.detach().double() for prompt in prompts]
    x, own = model.model.embed_tokens(tokens[index]).detach(), case.task[index]
    prompt, longest = wide[own], max(case.prompts)
    T, (P, C) = len(x), prompt.shape
    empty = x.new_zeros(longest - P, C)

    def read(*parts: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return walk(model, torch.cat(parts)[None], positions)[0]

    whole = read(prompt, x)
    yield whole[:T], (
        "These are the logits of the first T positions.\n"
        "The virtual tokens come first: cut off the first P positions, not the last."
    )
    yield whole[P - 1 : -1], (
        "It is cut one position too early: token t's own logits predict the next token."
    )
    for values in (read(x), read(x, prompt)[P:]):
        yield values, (
            "The virtual tokens do not affect the words as they should: do they follow them?"
            "\nA token sees what is before it: torch.cat((virtual, x), dim=1)."
        )
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
            "Its shorter prompt is padded, and the words see the padding: pad at the end instead."
        )
    for start, words in ((longest, "longest"), (min(case.prompts), "shortest")):
        yield read(prompt, x, empty)[start : start + T], (
            f"It is cut where the {words} prompt ends: its own has {P} tokens."
        )


# ---- 14a


def forward(trial: Trial) -> str:
    """Judge `batch`, `decode`, `forward` and `answer_loss`."""
    trial.forbid(LIBRARY)
    # a row too long for bf16 to count its positions, each of which matters to this model
    sharp = draw_config(trial, layers=1, heads=6, kv_heads=6, hidden_size=48)
    cases = [
        draw_case(trial, torch.float64),
        draw_case(trial, torch.float32, config=draw_config(trial, layers=3)),
        draw_case(trial, torch.bfloat16, config=sharp, lengths=((320, 90), (3, 1))),
    ]
    with trial.ranks(1) as group:  # nothing here depends on the number of ranks
        group.run("batch", right_rows, trial.new_seed())
        group.run("forward", right_readings, cases, seconds=SECONDS)
    return (
        "questions and padding do not count, answers and their end do; logits, loss and the\n"
        "prompt's gradient equal those of a GPT in which the virtual tokens are words, in fp64,\n"
        "fp32 and bf16; the model is unchanged."
    )


def right_rows(answer, seed: int) -> None:
    """Check `batch` for rows of drawn lengths; reports the smallest failing case."""
    question, reply = st.sampled_from((2, 1, *range(3, 10))), st.sampled_from((2, 1, 0, 3, 4, 7))
    rows = st.lists(st.tuples(question, reply), min_size=1, max_size=9)  # 2 is the clearest
    cases = st.tuples(rows, st.integers(0, 12))
    for_all(seed, cases, lambda case: _right_batch(answer, *case), examples=50)


def _right_batch(answer, lengths: list[tuple[int, int]], end: int) -> None:
    """The words are 1, 2, 3 …: `end` may be one of them."""
    words = iter(range(1, 1000))
    pairs = [tuple([next(words) for _ in range(n)] for n in both) for both in lengths]
    given, where = copy.deepcopy(pairs), f"batch of {pairs}, end {end}"
    tokens, targets = answer.batch(given, end)
    if given != pairs:
        raise Wrong(
            "batch changes the lists that it is given: question + answer makes a new one."
        )
    right = right_batch(pairs, end)
    close(where, "tokens", tokens, right[0], hint="A row is its question, its answer and the end, "
          "without the last of these; then padding, on the right.")
    rows = zip(*(x.tolist() for x in (targets, right[1], right[0])))
    close(where, "targets", targets, right[1],
          hint=next((_what_targets(*row) for row in rows if row[0] != row[1]), ""))


def _what_targets(row: list, right: list, tokens: list) -> str:
    counts, own = ([t for t, target in enumerate(x) if target != IGNORED] for x in (right, row))
    if own and all(row[t] == tokens[t] for t in own):
        return "A target is the token itself, not the next one: there is nothing to predict."
    if own and min(own) < counts[0]:
        return "The loss includes the question: the prompt would learn to predict questions."
    if own and max(own) > counts[-1]:
        return "The loss includes the padding: those targets are IGNORED."
    if own and own == counts[1:]:
        return "The answer's first token counts too: the question's last token must predict it."
    if own == counts[:-1]:
        return "The end counts too: without it the model never learns to stop."
    return "targets[t] is the token after tokens[t]."


def right_readings(answer, cases: list[Case]) -> None:
    """Check `decode`, `forward` and `answer_loss`."""
    for case in cases:
        model, (tokens, _) = case.model(), case.rows()
        x = model.model.embed_tokens(tokens).detach()
        compare(
            f"decode, {case}", "a logit", answer.decode(model, x),
            walk(case.model().double(), x.double()), case.dtype,
            otherwise="The logits are not the GPT's. In which type are positions counted? Compare\n"
            "decode with Decoder.forward and GPT.forward in utils/models/gpt.py, line by line.",
        )
        reads(case, lambda model, prompts, task, tokens: answer.forward(model, *prompts, tokens))
        _right_loss(answer, case)


def _right_loss(answer, case: Case) -> None:
    """Check `answer_loss` on drawn logits; no token of the first row counts."""
    _, targets = case.rows()
    targets[0] = IGNORED
    shape = *targets.shape, case.config.vocab_size
    logits = 2 * fractions(case.seed, *shape, dtype=case.dtype)
    right, count = right_loss(logits, targets), (targets != IGNORED).sum()
    rows = torch.stack([right_loss(*pair) for pair in zip(logits[:, None], targets[:, None])])
    of_rows = "Is it the mean of the rows' means? Then a token of a short answer weighs more, and "
    of_rows += "a row\nwithout any has no mean. All tokens that count weigh the same, in any row."
    compare(
        f"answer_loss, logits {shape} in {case.dtype}", "the result",
        answer.answer_loss(logits, targets), right, torch.promote_types(case.dtype, torch.float32),
        [
            (right * count / targets.numel(), "The sum is right, but it is divided by all B·T "
             "places: divide by those that count."),
            (right * count, "It is the sum; take the mean over the tokens that count."),
            (right_loss(logits[:, :-1], targets[:, 1:]), "It is shifted once too often: `batch` "
             "has already shifted the targets."),
            (rows.mean(), of_rows),
            (rows.nanmean(), of_rows),
        ],
        f"Which targets count? The {count} that are not IGNORED, each with the same weight.",
    )


# ---- 14b

BAR = 0.8  # fraction of the held-out questions


def tuning(trial: Trial) -> str:
    """Judge `begin`, `step` and `tune`."""
    trial.forbid(LIBRARY)
    draw = trial.draw
    with trial.ranks(1) as group:
        for dtype in (torch.float64, torch.bfloat16):
            first = draw_case(trial, dtype)
            words = [draw.randrange(first.config.vocab_size) for _ in range(first.prompts[0])]
            rows = [first, *(replace(first, seed=trial.new_seed()) for _ in range(2))]
            group.run("begin and step", right_training, words, draw.uniform(0.01, 0.3), rows)
        name, seed = draw.choice(tasks.NAMES), draw.randrange(1000)
        words = [draw.randrange(pretrained.LETTERS) for _ in range(tasks.LENGTHS[name])]
        model = pretrained.load()
        given = model.state_dict(), name, words, seed
        (prompt,) = group.run("tune", learned, *given, seconds=SECONDS)
    right = tasks.accuracy(model, name, prompt, seed)
    if right < BAR:
        raise Wrong(
            f"tune, task {name}: {right:.0%} of {tasks.TO_MEASURE} held-out questions are answered;"
            f" at least {BAR:.0%} are required.\nDo the losses fall from batch to batch? So few "
            "parameters need a learning rate a hundred times that\nof weights."
        )
    return (
        "only the prompt has a gradient, and Adam holds nothing else; its gradient equals that of\n"
        "a GPT in which it is words; no bit of the model changed; it answers more than\n"
        f"{BAR:.0%} of unseen questions."
    )


def right_training(answer, words: list[int], lr: float, rows: list[Case]) -> None:
    """Check `begin`, and a step for each of `rows`."""
    model, given, where = rows[0].model(), torch.tensor(words), f"begin, {rows[0]}"
    with left_alone(where, model, freezes=True, words=given):
        prompt, optimizer = answer.begin(model, given, lr)
    close(where, "the prompt", prompt, model.model.embed_tokens.weight[words], slack=0,
          hint="It starts as the embedding's rows of `words`.")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for wrong, why in (
        (not prompt.requires_grad or not prompt.is_leaf,
         "the prompt is not a leaf that requires a gradient: nn.Parameter."),
        (not any(p is prompt for p in held),
         "the optimizer does not update the prompt."),
        (len(held) > 1,
         f"the optimizer holds {len(held) - 1} other tensors: only the prompt learns."),
        (optimizer.param_groups[0].get("weight_decay"),
         "the optimizer has weight decay: it should have none."),
    ):
        if wrong:
            raise Wrong(f"{where}: {why}")
    seen, added_up = [], 0.0  # the gradients that the optimizer gets
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(None if prompt.grad is None else prompt.grad.clone())
    )
    for number, case in enumerate(rows, start=1):
        where, (tokens, targets) = f"step {number} of {len(rows)}, {case}", case.rows()
        before = prompt.detach().clone().requires_grad_()
        wanted = right_loss(right_logits(model, [before], case.task, tokens), targets)
        (right,) = torch.autograd.grad(wanted, [before])
        with left_alone(where, model, tokens=tokens, targets=targets):
            loss = answer.step(model, prompt, optimizer, tokens, targets)
        if torch.equal(prompt, before):
            raise Wrong(f"{where}: the prompt does not change. Does it get a gradient and a step?")
        a_loss(where, loss, wanted.item(), case.dtype)
        added_up = added_up + right
        added = [(added_up, "It includes earlier steps' gradients: optimizer.zero_grad().")]
        compare(where, "the gradient that Adam gets", seen[-1], right, case.dtype, added,
                "It should be that of answer_loss, computed afresh in each step.")


def learned(answer, weights: dict, name: str, words: list[int], seed: int) -> torch.Tensor:
    """The prompt that `tune` finds on the pretrained model, (P, C)."""
    model, begun, begin = GPT(pretrained.CONFIG).eval(), [], answer.begin
    model.load_state_dict(weights)
    batches = tasks.Batches(answer, name, seed)
    answer.begin = lambda *args, **named: begun.append(True) or begin(*args, **named)
    prompt = answer.tune(model, torch.tensor(words), batches)
    answer.begin = begin
    changed = [key for key, now in model.state_dict().items() if not now.equal(weights[key])]
    unchanged("tune", changed)
    if len(begun) > 1:
        raise Wrong(f"begin was called {len(begun)} times: train one prompt on all batches.")
    if batches.drawn != tasks.STEPS:
        raise Wrong(
            f"tune uses {batches.drawn} batches, but there are {tasks.STEPS}: a step for each."
        )
    return prompt.detach().clone()


# ---- 14c


def together(trial: Trial) -> str:
    """Judge `together`."""
    trial.forbid(LIBRARY)
    draw = trial.draw
    P, short, long = draw.randrange(2, 6), draw.randrange(1, 4), draw.randrange(4, 8)
    cases = [
        draw_case(trial, dtype, rows=len(task), prompts=prompts, task=tuple(task))
        for dtype, prompts, task in (
            (torch.float64, (P, P), [0, 1, 1, 0, 1]),
            (torch.float64, (short, long), draw.sample([0, 1, 1, 0, 0], 5)),
            (torch.float32, (long, 1, short), [1, 1, 2, 0, 2]),
            (torch.bfloat16, (short, 2, long), [0, 2, 2]),
        )
    ]
    trial.alone("together", right_together, cases, seconds=SECONDS)
    return (
        "each row has the logits that it has on its own with its prompt, even where prompts\n"
        "differ in length, with two and three prompts, in fp64, fp32 and bf16; each prompt gets\n"
        "the gradient of its own rows; the blocks run once; the model is unchanged."
    )


def right_together(answer, cases: list[Case]) -> None:
    for case in cases:
        look = reads(case, answer.together)
        with Look() as once, torch.no_grad():
            case.model()(case.rows()[0])
        made, enough = (  # except for the last matrix, which may multiply row by row
            sum(p.right[-1] != case.config.vocab_size for p in x.products) for x in (look, once)
        )
        if made > enough:
            raise Wrong(
                f"together, {case}: right, but with {made} matrix products in the blocks; {enough} "
                "are enough: one pass for all rows, as long as the longest."
            )


# ---- 14d

MESHES = {  # (dp, tp) and types, by the number of ranks
    2: [((2, 1), torch.float64), ((2, 1), torch.bfloat16), ((1, 2), torch.float32)],
    3: [((3, 1), torch.float64)],
    4: [((2, 2), torch.float32)],
}


def ranks(trial: Trial) -> str:
    """Judge `backward`."""
    trial.forbid(LIBRARY)
    hang = "Does every rank call the same collectives, each on the axis's own group?"
    for group in trial.groups(tuple(MESHES), hang=hang):
        for (dp, tp), dtype in MESHES[group.size]:
            late, whole = dtype == torch.float64, draw_case(trial, dtype, rows=3 * dp)
            cases = [  # in one of them, where messages are late, no token counts
                replace(whole, lengths=whole.lengths[: 3 * rank + 1], task=(0,) * (3 * rank + 1),
                        silent=late and rank == dp - 1)
                for rank in range(dp)
            ]
            case = group.case(f"dp {dp} · tp {tp}, {cases[0]}")
            found = group.run(case, right_backward, (dp, tp), cases, late=late)
            same_bits(case, "prompt.grad", found, "Every rank takes the same step with it.")
    return (
        "tensor-parallel ranks all have one rank's gradient, without a message of yours;\n"
        "data-parallel ranks add theirs up, for answers of unequal length, even where a rank has\n"
        "none: again one rank's gradient, with the same bits on all ranks; on 2 to 4 ranks, in\n"
        "fp64, fp32 and bf16, with late messages; at most three messages over dp."
    )


def right_backward(answer, sizes: tuple[int, int], cases: list[Case]) -> torch.Tensor:
    """On a rank: prompt.grad after `backward`. cases: the rows of each rank of dp."""
    (dp, tp), mesh = sizes, make_mesh(dp=sizes[0], tp=sizes[1])
    case, where = cases[mesh.dp.index], f"rank {dist.get_rank()}"
    right, loss, count = _alone(cases)
    own, _, counts = _alone([case])
    model = tensor_parallel(case.model().requires_grad_(False), mesh.tp)
    prompt, (tokens, targets) = case.prompt(), case.rows()
    with left_alone(where, model, prompt=prompt, tokens=tokens, targets=targets) as look:
        value = answer.backward(model, prompt, tokens, targets, mesh)
    with Traffic() as traffic:  # the model's own
        logits = answer.forward(model, case.prompt(), tokens)
        loss_function(model)(logits, targets, reduction="sum").backward()
    if prompt.grad is None:
        raise Wrong(f"{where}: prompt.grad is None after backward.")
    compare(where, "prompt.grad", prompt.grad, right, case.dtype, [
        (tp * right, f"It is {tp} times that: it was added up over tp. The model's own all-reduces "
         "(f, lab 06) have\nalready completed the gradient on each rank of tp."),
        (right / tp, f"It is 1/{tp} of it: the same rows are on all ranks of tp, and count once."),
        (right / dp, f"It is 1/{dp} of it: the sum over the ranks was divided once more."),
        *[(x, "It is that of this rank's own rows: where are the others' added up?")
          for x in (own, own * counts / count)],
    ], (
        f"This rank has {counts} tokens that count, all ranks together have {count}. The mean of "
        "two means\nis not the mean: divide each sum of losses by the tokens of all ranks."
    ))
    a_loss(f"{where}: the gradient is right", value, loss, case.dtype)
    mine, models = (
        Counter((e.op, e.group) for e in x.events if e.group_size > 1) for x in (look, traffic)
    )
    over_dp = "all_reduce", mesh.dp.group and mesh.dp.group.group_name
    more = mine - models
    if set(more) - {over_dp} or more.total() > 3:
        raise Wrong(
            f"{where}: right, but in addition to the model's own messages there are "
            f"{', '.join(f'{n} {op}' for (op, _), n in more.items())}; 3 all-reduces over dp are "
            "enough."
        )
    mesh.close()
    return prompt.grad


def _alone(cases: list[Case]) -> tuple[torch.Tensor, float, int]:
    """One rank with all rows, in fp64: the gradient, the loss, and the number of tokens that
    count."""
    model, prompt, total, count = cases[0].model(), cases[0].prompt(), 0.0, 0
    for tokens, targets in (case.rows() for case in cases):
        logits = right_logits(model, [prompt], [0] * len(tokens), tokens)
        total = total + right_loss(logits, targets, reduction="sum")
        count += int((targets != IGNORED).sum())
    loss = total / max(1, count)
    return torch.autograd.grad(loss, [prompt])[0].double(), loss.item(), count
