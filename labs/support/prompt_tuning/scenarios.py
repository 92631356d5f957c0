"""Given: what runs in processes of their own for a check: your functions, and what they leave."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from labs.support.prompt_tuning import pretrained, tasks
from labs.support.prompt_tuning.reference import IGNORED, Case, right_loss, walk
from utils.course.assertions import Wrong, a_number, described, not_called, unchanged
from utils.course.observe import Look
from utils.course.runner import fractions
from utils.measure.traffic import Traffic
from utils.models.gpt import GPT
from utils.parallel.mesh import make_mesh
from utils.parallel.tensor import loss_function, tensor_parallel

A_FEW = 64  # bytes
LIBRARY = "utils/prompts/"  # what the lab builds
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# ---- what must be as before


@contextmanager
def left_alone(case: str, model: GPT, freezes: bool = False, **inputs: Any) -> Iterator[Look]:
    """Inside runs a function of the answer. Raises Wrong where the model, an input or the source
    of random numbers is not what it was, and where a weight has got a gradient.

    freezes: whether the weights want gradients may change
    """
    before, seed = _state(model, freezes), torch.initial_seed()
    with not_called(LIBRARY), Look(**inputs, **{"a weight": list(model.parameters())}) as look:
        yield look
    if "a weight" in look.changed():
        raise Wrong(
            f"{case}: a weight of the model is not what it was before the call.\n"
            "The model is frozen: only the prompt may change."
        )
    unchanged(case, look.changed())
    held = [p.grad for p in model.parameters() if p.grad is not None]
    if held:
        size = sum(grad.numel() * grad.element_size() for grad in held)
        raise Wrong(
            f"{case}: {len(held)} weights of the model have got gradients, {size:,} bytes that "
            "nobody needs.\nFreeze it, or ask for the gradient of the prompt alone."
        )
    for what, state in _state(model, freezes).items():
        if state != before[what]:
            raise Wrong(f"{case}: {what} are not what they were before the call: who uses it next?")
    if torch.initial_seed() != seed:
        raise Wrong(
            f"{case}: the random numbers of the whole program have got a new seed, and nothing is "
            "left to\nchance here."
        )


def _state(model: GPT, freezes: bool) -> dict:
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    return {
        "the modules of the model": {name: id(module) for name, module in modules.items()},
        "the attributes of the model's modules": {
            name: frozenset(vars(module)) for name, module in modules.items()
        },
        "the hooks of the model": {
            name: [len(getattr(module, kind)) for kind in HOOKS] for name, module in modules.items()
        },
        "the modes of the model": {name: module.training for name, module in modules.items()},
        "the parameters of the model": {
            name: (id(parameter), freezes or parameter.requires_grad)
            for name, parameter in parameters.items()
        },
    }


def a_tensor(case: str, value: Any, shape: tuple, hint: str) -> torch.Tensor:
    """Raises Wrong unless `value` is a tensor of this shape."""
    if not isinstance(value, torch.Tensor):
        raise Wrong(f"{case} is {described(value)}, not a tensor {shape}.")
    if tuple(value.shape) != shape:
        raise Wrong(f"{case} has the shape {tuple(value.shape)}, and {shape} is right.\n{hint}")
    return value


def multiplications(look: Look, backward: bool = False) -> int:
    """Of all matrix products in one half of the step."""
    return sum(p.multiplications for p in look.products if p.backward == backward)


def gradients(loss: torch.Tensor, prompts: list) -> list[torch.Tensor | None]:
    """Of each prompt; None where nothing leads back to it. No weight gets one."""
    if not loss.requires_grad:
        return [None] * len(prompts)
    return list(torch.autograd.grad(loss, prompts, allow_unused=True))


# ---- a


def rows(answer, cases: list[tuple[list, int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What `batch` makes of pairs and the end."""
    found = []
    for pairs, end in cases:
        given = copy.deepcopy(pairs)
        with not_called(LIBRARY):
            result = answer.batch(given, end)
        if given != pairs:
            raise Wrong(
                "batch changes the lists that it was given: question + answer makes a new one."
            )
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise Wrong(f"batch returns {described(result)}, not the two tensors tokens, targets.")
        for name, one in zip(("tokens", "targets"), result):
            shape = len(pairs), max(len(q) + len(a) for q, a in pairs)
            longest = "The longest row, question + answer + [end], less its last token."
            a_tensor(f"batch: {name}", one, shape, longest)
            if one.dtype != torch.int64:
                raise Wrong(f"batch: {name} are {one.dtype}; ids are torch.int64.")
        found.append(tuple(result))
    return found


def logits(answer, cases: list[tuple[Case, tuple[int, int]]]) -> list[dict]:
    """What `decode` makes of vectors (rows, length), and `forward` of the case's rows."""
    models = [case.model() for case, _ in cases]
    return [_logits(answer, model, *case) for model, case in zip(models, cases)]


def _logits(answer, model: GPT, case: Case, sizes: tuple[int, int]) -> dict:
    x, prompt, (tokens, targets) = case.vectors(*sizes), case.prompt().requires_grad_(), case.rows()
    V = case.config.vocab_size
    with left_alone(f"decode, {case}", model, x=x):
        result = answer.decode(model, x)
    decoded = a_tensor(f"decode, {case}: the result", result, (*sizes, V), "A row for each vector.")
    with left_alone(f"forward, {case}", model, prompt=prompt, tokens=tokens) as look:
        result = answer.forward(model, prompt, tokens)
    hint = "Every token has a row of logits."
    if isinstance(result, torch.Tensor) and result.shape[1:-1] == (len(prompt) + case.T,):
        hint = "The virtual tokens' logits are still there: cut them off."
    a_tensor(f"forward, {case}: the result", result, (*tokens.shape, V), hint)
    found = {"decoded": decoded.detach().clone(), "logits": result.detach().clone()}
    (found["gradient"],) = gradients(right_loss(result, targets), [prompt])
    del result, decoded
    found["kept"], found["work"] = look.kept(), multiplications(look)
    with Look() as own, torch.no_grad():
        length = len(prompt) + case.T
        walk(model, case.vectors(len(tokens), length), torch.arange(length))
    return found | {"enough": multiplications(own)}


def losses(answer, cases: list[tuple]) -> list[dict]:
    """What `answer_loss` says of drawn logits, and their gradient."""
    found = []
    for case in cases:
        given, targets = spoken(*case)
        given.requires_grad_()
        with not_called(LIBRARY), Look(logits=given, targets=targets) as look:
            loss = answer.answer_loss(given, targets)
        words = f"answer_loss, {case[0]}"
        unchanged(words, look.changed())
        a_tensor(f"{words}: the result", loss, (), "The mean is one number.")
        (gradient,) = gradients(loss, [given])
        found.append({"loss": loss.detach().clone(), "gradient": gradient})
    return found


def spoken(words: str, shape: tuple, dtype: torch.dtype, seed: int, counting: list[int]) -> tuple:
    """logits (B, T, V), and targets of which so many count in each row, at any places."""
    B, T, V = shape
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full((B, T), IGNORED)
    for row, count in zip(targets, counting):
        places = torch.randperm(T, generator=generator)[:count]
        row[places] = torch.randint(V, (count,), generator=generator)
    return 2 * fractions(seed, B, T, V, dtype=dtype), targets


# ---- b


def train(answer, cases: list[tuple[Case, list[int], float, list[Case]]]) -> list[list[dict]]:
    """The trainings of all cases (a model, words, a learning rate, rows of each step), a step of
    each in turn."""
    runs = [_training(answer, *case) for case in cases]
    found = [[] for _ in runs]
    for steps in zip_longest(*runs):
        for results, step in zip(found, steps):
            results += [step] if step else []
    return found


def _training(answer, case: Case, words: list[int], lr: float, steps: list[Case]) -> Iterator[dict]:
    model, given = case.model(), torch.tensor(words)
    start = f"begin, {len(words)} words, lr {lr:.3g}, {case}"
    with left_alone(start, model, freezes=True, words=given):
        try:
            result = answer.begin(model, given, lr)
        except ValueError as error:
            if "leaf" not in str(error):
                raise
            raise Wrong(
                "begin: the prompt is not a leaf: it is computed from the embedding, and no "
                "optimizer takes it.\nDetach the rows, copy them, and make an nn.Parameter of the "
                "copy."
            ) from None
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise Wrong(f"begin returns {described(result)}, not the two things prompt, optimizer.")
    prompt, optimizer = result
    _right_prompt(start, prompt, model, words)
    _right_optimizer(start, prompt, optimizer)
    for number, some in enumerate(steps):
        where = f"step {number + 1} of {len(steps)}, {some}"
        tokens, targets = some.rows()
        before = prompt.detach().clone()
        with left_alone(where, model, tokens=tokens, targets=targets) as look:
            loss = answer.step(model, prompt, optimizer, tokens, targets)
        if torch.equal(prompt, before):
            raise Wrong(f"{where}: the prompt is what it was. Does it get a gradient, and a step?")
        if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
            raise Wrong(
                f"{where} returns a tensor with its past, not a float: .item() lets the pass go."
            )
        loss = a_number(where, "the loss that step returns", loss)
        _right_state(where, prompt, optimizer)
        state = [t for held in optimizer.state.values() for t in held.values()]
        yield {
            "loss": loss,
            "prompt": prompt.detach().clone(),
            "kept": look.kept(prompt.grad, state) if number else 0,
            "work": multiplications(look, backward=True),
            "enough": _least_work(model, before, tokens, targets),
        }


def _right_prompt(case: str, prompt: Any, model: GPT, words: list[int]) -> None:
    rows = model.model.embed_tokens.weight.detach()
    if not isinstance(prompt, torch.Tensor) or prompt.shape != (len(words), rows.shape[1]):
        shape = tuple(getattr(prompt, "shape", ()))
        raise Wrong(f"{case}: the prompt is {type(prompt).__name__} {shape}, not a tensor (P, C).")
    if not prompt.requires_grad or not prompt.is_leaf:
        raise Wrong(f"{case}: the prompt is not a leaf that requires a gradient: nn.Parameter.")
    if prompt.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():
        raise Wrong(
            f"{case}: the prompt lies in the embedding's memory: the model would learn too."
        )
    if prompt.dtype != rows.dtype:
        raise Wrong(f"{case}: the prompt is {prompt.dtype}, and the model {rows.dtype}.")
    if not torch.equal(prompt, rows[words]):
        raise Wrong(f"{case}: the prompt does not start as the embedding's rows of `words`.")


def _right_optimizer(case: str, prompt: torch.Tensor, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Wrong(f"{case}: the optimizer is {described(optimizer)}.")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p is prompt for p in held):
        raise Wrong(f"{case}: the prompt is not among what the optimizer updates.")
    if len(held) > 1:
        others = sum(p.numel() for p in held if p is not prompt)
        raise Wrong(
            f"{case}: the optimizer holds {others:,} numbers besides the prompt's "
            f"{prompt.numel()}: only the prompt learns."
        )
    decay = optimizer.param_groups[0].get("weight_decay", 0)
    if decay:
        raise Wrong(
            f"{case}: {type(optimizer).__name__} has a weight decay of {decay}: none is asked."
        )


def _right_state(case: str, prompt: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    numbers = sum(t.numel() for held in optimizer.state.values() for t in held.values() if t.ndim)
    if numbers > 2 * prompt.numel():
        raise Wrong(
            f"{case}: the optimizer keeps {numbers:,} numbers, and Adam needs two for each of the "
            f"prompt's {prompt.numel():,}."
        )


def _least_work(model: GPT, prompt: torch.Tensor, tokens, targets) -> int:
    """Multiplications of a backward pass that stays in no weight."""
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    model.requires_grad_(False)
    prompt = prompt.requires_grad_()
    with Look() as look:
        x = torch.cat((prompt.expand(len(tokens), -1, -1), model.model.embed_tokens(tokens)), 1)
        logits = walk(model, x, torch.arange(x.shape[1]))[:, len(prompt) :]
        torch.autograd.grad(right_loss(logits, targets), [prompt])
    for parameter, want in zip(model.parameters(), wanted):
        parameter.requires_grad_(want)
    return multiplications(look, backward=True)


def tune(answer, cases: list[tuple[Case, list[int], list[Case]]]) -> None:
    """`tune` with few batches of different shapes, of models of all types."""
    for case, words, steps in cases:
        model = case.model()
        where = f"tune, {len(steps)} batches, {case}"
        batches = [some.rows() for some in steps]
        with left_alone(where, model, freezes=True) as look:
            prompt = answer.tune(model, torch.tensor(words), batches)
        shape = len(words), case.config.hidden_size
        a_tensor(f"{where}: the result", prompt, shape, "The prompt is (P, C).")
        if torch.equal(prompt, model.model.embed_tokens.weight[words]):
            raise Wrong(f"{where}: the prompt is what it was at the beginning.")
        if kept := look.kept(prompt, prompt.grad):
            raise Wrong(
                f"{where}: when it is over, {kept:,} bytes that it made are still held, besides "
                "the prompt.\nWho remembers them, and what for?"
            )


def learn(answer, weights: dict, name: str, words: list[int], seed: int) -> dict:
    """`tune` on the model with its skills."""
    model, begun, passes = GPT(pretrained.CONFIG), [], []
    model.load_state_dict(weights)
    first, begin = model.model.layers[0].mlp, answer.begin
    hook = first.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))

    def counted(*args, **keywords):
        begun.append(1)
        return begin(*args, **keywords)

    answer.begin, batches = counted, tasks.Batches(answer, name, seed)
    try:  # without a look at each operator: `tune` above has that
        prompt = answer.tune(model.eval(), torch.tensor(words), batches)
    finally:
        answer.begin = begin
        hook.remove()
    if any(not torch.equal(now, weights[key]) for key, now in model.state_dict().items()):
        raise Wrong("tune: a weight of the model is not what it was before the call.")
    shape = len(words), model.config.hidden_size
    a_tensor("tune: the result", prompt, shape, "The prompt is (P, C).")
    return {"prompt": prompt.detach().clone(), "drawn": batches.drawn, "begun": len(begun),
            "passes": sum(passes)}


# ---- c


def together(answer, cases: list[Case]) -> list[dict]:
    """Rows with prompts of their own."""
    models = [case.model() for case in cases]
    return [_together(answer, model, case) for model, case in zip(models, cases)]


def _together(answer, model: GPT, case: Case) -> dict:
    prompts = [case.prompt(number).requires_grad_() for number in range(len(case.prompts))]
    (tokens, targets), task, given = case.rows(), torch.tensor(case.task), list(prompts)
    where = f"{case}, rows {list(case.task)}"
    inputs = {"prompts": prompts, "task": task, "tokens": tokens}
    with left_alone(where, model, **inputs) as look:
        result = answer.together(model, given, task, tokens)
    if len(given) != len(prompts) or any(a is not b for a, b in zip(given, prompts)):
        raise Wrong(f"{where}: the list of prompts is not what it was before the call.")
    shape = *tokens.shape, case.config.vocab_size
    a_tensor(f"{where}: the result", result, shape, "Every row has T tokens.")
    found = {"logits": result.detach().clone()}
    found["gradients"] = gradients(right_loss(result, targets), prompts)
    del result
    with Look() as own, torch.no_grad():
        length = max(case.prompts) + case.T
        walk(model, case.vectors(len(tokens), length), torch.arange(length))
    count = _in_blocks(look, case), _in_blocks(own, case)
    work = multiplications(look), multiplications(own)
    return found | {"kept": look.kept(), "products": count, "work": work}


def _in_blocks(look: Look, case: Case) -> int:
    """Matrix products, but for those with the last matrix."""
    V = case.config.vocab_size
    return sum(V not in p.left + p.right for p in look.products)


# ---- d


def backward(answer, jobs: list[tuple[tuple[int, int], list[list[Case]]]]) -> list[list[dict]]:
    """On a rank: for each mesh of (dp, tp) ranks its rows of each case, cases[…][rank of dp]."""
    found = []
    for (dp, tp), cases in jobs:
        mesh = make_mesh(dp=dp, tp=tp)
        models = [tensor_parallel(some[0].model(), mesh.tp) for some in cases]
        found.append([
            _backward(answer, model, some[mesh.dp.index], mesh)
            for model, some in zip(models, cases)
        ])
        mesh.close()
    return found


def _backward(answer, model: GPT, case: Case, mesh) -> dict:
    prompt, (tokens, targets) = case.prompt(), case.rows()
    own = _own(model, case.prompt().requires_grad_(), tokens, targets)
    prompt, where = prompt.requires_grad_(), f"{_ranks(mesh)}, rank {dist.get_rank()}, {case}"
    inputs = {"prompt": prompt, "tokens": tokens, "targets": targets}
    with left_alone(where, model, **inputs) as look:
        loss = answer.backward(model, prompt, tokens, targets, mesh)
    if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
        raise Wrong(f"{where}: backward returns a tensor with its past, not a float: .item().")
    loss = a_number(where, "what backward returns", loss)
    kept = look.kept(prompt.grad)
    if prompt.grad is not None:  # it may be a part of a message, not of a larger buffer
        more = prompt.grad.untyped_storage().nbytes() - prompt.grad.nbytes
        kept += more if more > A_FEW else 0
    events = [event for event in look.events if event.group_size > 1]
    return {
        "where": where, "loss": loss, "gradient": prompt.grad, "kept": kept, "own": own,
        "tp": _on(events, mesh.tp), "dp": _on(events, mesh.dp), "all": len(events),
        "count": int((targets != IGNORED).sum()),
    }


def _ranks(mesh) -> str:
    return f"dp {mesh.dp.size} · tp {mesh.tp.size}"


def _on(events: list, axis) -> list[tuple[str, int]]:
    """(operation, bytes) on an axis."""
    name = None if axis.group is None else axis.group.group_name
    return [(event.op, event.payload) for event in events if event.group == name]


def _own(model, prompt, tokens, targets) -> dict:
    """What this rank finds from its own rows: the sum of its losses, in the model's type, and the
    messages that the model itself makes."""
    with Traffic() as traffic:
        x = torch.cat((prompt.expand(len(tokens), -1, -1), model.model.embed_tokens(tokens)), dim=1)
        logits = walk(model, x, torch.arange(x.shape[1]))[:, len(prompt) :]
        loss = loss_function(model)(logits, targets, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, [prompt])
    messages = sorted((e.op, e.payload) for e in traffic.events if e.group_size > 1)
    return {"loss": loss.item(), "gradient": gradient, "messages": messages}
