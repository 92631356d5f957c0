"""Given: what the check cell of exercise a looks at: rows, logits, the loss, the gradient.

Everything is compared with a GPT in fp64 that has the virtual tokens among its words (reference.py)
and runs the rows one by one. Where your numbers differ, typical mistakes are made on purpose, and
the one that gives your numbers is named.
"""

from pathlib import Path

import torch

from labs.support.prompt_tuning import reference
from labs.support.prompt_tuning.reference import END, Spelled, right_batch, right_loss, walk
from utils.course.checks import Wrong, load_answer

LENGTHS = (5, 1)  # of prompts


def forward(path: Path) -> str:
    """Judges `batch`, `decode`, `forward` and `answer_loss`."""
    answer = load_answer(path)
    for seed in range(3):
        _right_rows(answer, reference.random_pairs(6, seed))
    model = reference.random_model()
    _right_decode(answer, model)
    for length in LENGTHS:
        _right_logits(answer, model, length)
    _right_loss(answer)
    _right_gradient(answer, model)
    return (
        "questions and padding do not count, answers and their end do;\n"
        "logits, loss and the prompt's gradient equal those of a GPT in which the virtual tokens\n"
        "are words."
    )


def same(a, b, tolerance: float = 1e-5) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def a_tensor(value, shape: tuple, name: str, hint: str) -> None:
    """Raises Wrong unless `value` is a tensor of this shape."""
    if not isinstance(value, torch.Tensor):
        raise Wrong(f"{name} returns {type(value).__name__}, not a tensor {shape}.")
    if tuple(value.shape) != shape:
        raise Wrong(f"{name} returns the shape {tuple(value.shape)}, not {shape}.\n{hint}")


# ---- rows


def _right_rows(answer, pairs: list) -> None:
    given = [(list(question), list(answer)) for question, answer in pairs]
    result = answer.batch(given, END)
    if given != pairs:
        raise Wrong("batch changes the lists that it was given: question + answer makes a new one.")
    if not isinstance(result, tuple) or len(result) != 2:
        raise Wrong(f"batch returns {type(result).__name__}, not the two tensors tokens, targets.")
    tokens, targets = result
    right_tokens, right_targets = right_batch(pairs)
    shape = tuple(right_tokens.shape)
    longest = "The longest row, question + answer + [end], less its last token."
    a_tensor(tokens, shape, "batch's tokens", longest)
    a_tensor(targets, shape, "batch's targets", longest)
    if tokens.dtype != torch.int64 or targets.dtype != torch.int64:
        raise Wrong(f"batch returns {tokens.dtype} and {targets.dtype}; ids are torch.int64.")
    for number, (question, words) in enumerate(pairs):
        length = len(question) + len(words)
        case = f"batch, a row of {len(question)} + {len(words)} tokens and the end, T = {shape[1]}"
        row, right = tokens[number].tolist(), right_tokens[number].tolist()
        if row != right:
            hint = "A row is its question, its answer, the end; then filling up, on the right."
            if row[-length:] == right[:length]:
                hint = "The filling stands on the left: the words must begin at 0 in every row."
            raise Wrong(f"{case}: tokens are {row}, not {right}.\n{hint}")
        _right_targets(targets[number].tolist(), right_targets[number].tolist(), row, case)


def _right_targets(row: list, right: list, tokens: list, case: str) -> None:
    if row == right:
        return
    counts = [place for place, target in enumerate(right) if target != -100]
    first, last = counts[0], counts[-1]
    own = [place for place, target in enumerate(row) if target != -100]
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
    raise Wrong(f"{case}: targets are {row}, not {right}.\n{hint}")


# ---- logits


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Any words, int64 (rows, length)."""
    generator = torch.Generator().manual_seed(300 + seed)
    return torch.randint(reference.CONFIG.vocab_size, (rows, length), generator=generator)


def _right_decode(answer, model) -> None:
    x = reference.random_prompt(3 * 7, seed=9).view(3, 7, -1)
    logits = answer.decode(model, x)
    a_tensor(logits, (3, 7, reference.CONFIG.vocab_size), "decode", "A row of logits per vector.")
    right = walk(model, x, torch.arange(7))
    if same(logits, right):
        return
    hint = "Compare it with Decoder.forward and GPT.forward in utils/models/gpt.py, line by line."
    if same(logits, walk(model, x, torch.zeros(7))):
        hint = "All vectors have the same position."
    else:
        with _without_norm(model):
            if same(logits, walk(model, x, torch.arange(7))):
                hint = "model.model.norm stands before the last matrix."
    raise Wrong(f"decode: the logits are not the GPT's.\n{hint}")


class _without_norm:
    """The model without its last norm, for a while."""

    def __init__(self, model):
        self.decoder = model.model

    def __enter__(self):
        self.norm, self.decoder.norm = self.decoder.norm, torch.nn.Identity()

    def __exit__(self, *exception):
        self.decoder.norm = self.norm


def _right_logits(answer, model, length: int) -> None:
    prompt, tokens = reference.random_prompt(length, seed=length), make_tokens(4, 7, seed=length)
    V, case = reference.CONFIG.vocab_size, f"forward, P = {length}, T = 7"
    spelled = Spelled(model, prompt)
    logits = answer.forward(model, prompt, tokens)
    hint = "Every token has a row of logits."
    if isinstance(logits, torch.Tensor) and logits.shape[1:-1] == (length + 7,):
        hint = "The virtual tokens' logits are still there: cut them off."
    a_tensor(logits, (4, 7, V), case, hint)
    whole = torch.stack(spelled.all_logits(tokens))
    if not same(logits, whole[:, length:]):
        raise Wrong(f"{case}: {_what_is_wrong(logits, whole, model, prompt, tokens)}")


def _what_is_wrong(logits, whole, model, prompt, tokens) -> str:
    P, T = len(prompt), tokens.shape[1]
    x = model.model.embed_tokens(tokens)
    virtual = prompt.expand(len(tokens), P, -1)
    before, after = torch.cat((virtual, x), 1), torch.cat((x, virtual), 1)
    restarted = torch.cat((torch.arange(P), torch.arange(T)))
    behind = walk(model, after, torch.arange(P + T))
    if same(logits, whole[:, :T]):
        return (
            "these are the logits of the first T positions.\n"
            "The virtual tokens stand in front: cut off the first P positions, not the last."
        )
    if same(logits, whole[:, P - 1 : -1]):
        return "cut one position too early: token t's own logits say what follows it."
    if same(logits, walk(model, x, torch.arange(T))) or same(logits, behind[:, P:]):
        return (
            "the virtual tokens do not act on the words as they should: do they stand behind them?"
            "\nA token sees what is before it: torch.cat((virtual, x), dim=1)."
        )
    if same(logits, walk(model, before, restarted)[:, P:]):
        return (
            "the positions start again at the text.\n"
            "The virtual tokens have the positions 0 … P-1, the first word has P."
        )
    if same(logits[:1], whole[:1, P:]):
        return "the first row is right and others are not: every row needs the prompt."
    return "the logits are not those of the prompt followed by the words."


# ---- loss and gradient


def _right_loss(answer) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = right_batch(reference.random_pairs(5, seed=7))
    V = reference.CONFIG.vocab_size
    logits = 2 * torch.randn(*tokens.shape, V, generator=generator, dtype=torch.float64)
    right, loss = right_loss(logits, targets), answer.answer_loss(logits, targets)
    if not isinstance(loss, torch.Tensor) or loss.shape != ():
        shape = tuple(getattr(loss, "shape", ()))
        raise Wrong(f"answer_loss returns {type(loss).__name__} {shape}, not one number.")
    if same(loss, right):
        return
    counts = (targets != -100).sum(dim=1)
    rows = [right_loss(one[None], other[None]) for one, other in zip(logits, targets)]
    sums = [row * count for row, count in zip(rows, counts)]
    hint = "Which targets count? Those that are not IGNORED, each alike."
    if same(loss, torch.stack(rows).mean()):
        hint = (
            "It is the mean over rows of each row's mean: a token of a short answer weighs more.\n"
            "All tokens that count are alike, in whatever row they are."
        )
    elif same(loss, sum(sums) / targets.numel()):
        hint = "The sum is right, and it is divided by all B·T places: divide by those that count."
    elif same(loss, sum(sums)):
        hint = "It is the sum; take the mean over the tokens that count."
    elif same(loss, right_loss(logits[:, :-1], targets[:, 1:])):
        hint = "Shifted once too often: `batch` has already put the next token beside each."
    raise Wrong(f"answer_loss is {loss.item():.4f}, not {right.item():.4f}.\n{hint}")


def _right_gradient(answer, model) -> None:
    prompt = reference.random_prompt(4, seed=1).requires_grad_()
    tokens, targets = right_batch(reference.random_pairs(5, seed=3))
    loss = answer.answer_loss(answer.forward(model, prompt, tokens), targets)
    if loss.requires_grad:
        loss.backward()
    if prompt.grad is None:
        raise Wrong(
            "the loss is right, and the prompt gets no gradient.\n"
            "Is it copied with .data, .detach(), torch.tensor() or under no_grad?"
        )
    spelled = Spelled(model, prompt)
    right_loss(spelled.logits(tokens), targets).backward()
    if not same(prompt.grad, spelled.gradients()[0]):
        raise Wrong("the loss is right, and the prompt's gradient is not: it is used in every row.")
