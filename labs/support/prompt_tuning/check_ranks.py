"""Given: what the check cell of exercise d looks at, on two real ranks.

Once they share every matrix (tensor parallel), once the rows (data parallel). Loss and gradient
must be one rank's on both, and no message is made that nobody needs.
"""

from pathlib import Path

import torch

from labs.support.prompt_tuning import reference
from labs.support.prompt_tuning.reference import Spelled, right_batch, right_loss
from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic
from utils.models.gpt import GPTConfig
from utils.parallel.mesh import make_mesh
from utils.parallel.tensor import loss_function, tensor_parallel

CONFIG = GPTConfig(
    vocab_size=37, hidden_size=24, layers=2, heads=6, kv_heads=3, intermediate_size=19,
    max_positions=64,
)  # fmt: skip
P = 4
HANG = "Does every rank call the same collectives, each on the axis's own group?"


def ranks(path: Path) -> str:
    """Judges `backward`."""
    results = on_ranks(2, path, _both, hang=HANG)
    for number, name in enumerate(("tensor parallel", "data parallel")):
        for rank, result in enumerate(results):
            _right(result[number], f"2 ranks, {name}, rank {rank}", name)
    return (
        "two tensor-parallel ranks both have one rank's gradient, without a message of yours;\n"
        "two data-parallel ranks add theirs up, in answers of unequal length: one rank's again."
    )


def _both(answer) -> tuple[dict, dict]:
    """On a rank: the two cases."""
    return _case(answer, make_mesh(tp=2)), _case(answer, make_mesh(dp=2))


def _case(answer, mesh) -> dict:
    whole = reference.random_model(CONFIG).requires_grad_(False)
    prompt = reference.random_prompt(P, 0, CONFIG)
    pairs = reference.random_pairs(6, seed=5)
    pairs = [(question, words[: 1 + index // 2]) for index, (question, words) in enumerate(pairs)]
    tokens, targets = right_batch(pairs)
    spelled = Spelled(whole, prompt)
    right = right_loss(spelled.logits(tokens), targets)
    right.backward()
    # the first rank has two rows of short answers, the second has four of longer ones
    own = slice(None) if mesh.dp.size == 1 else (slice(0, 2), slice(2, 6))[mesh.dp.index]
    tokens, targets = tokens[own], targets[own]
    model = tensor_parallel(reference.random_model(CONFIG), mesh.tp).requires_grad_(False)
    alone = _alone(model, prompt, tokens, targets)
    mine = prompt.clone().requires_grad_()
    with Traffic() as traffic:
        loss = answer.backward(model, mine, tokens, targets, mesh)
    return {
        "loss": loss, "right loss": right.item(), "own loss": alone["loss"],
        "gradient": mine.grad, "right gradient": spelled.gradients()[0],
        "own gradient": alone["gradient"], "counts": int((targets != -100).sum()),
        "calls": traffic.calls() - alone["calls"], "payload": traffic.payload() - alone["payload"],
    }  # fmt: skip


def _alone(model, prompt, tokens, targets) -> dict:
    """What this rank finds from its own rows, and the messages that the model makes for it."""
    prompt = prompt.clone().requires_grad_()
    with Traffic() as traffic:
        x = model.model.embed_tokens(tokens)
        x = torch.cat((prompt.expand(len(x), -1, -1), x), dim=1)
        logits = reference.walk(model, x, torch.arange(x.shape[1]))[:, P:]
        loss = loss_function(model)(logits, targets, reduction="sum") / (targets != -100).sum()
        loss.backward()
    return {"loss": loss.item(), "gradient": prompt.grad,
            "calls": traffic.calls(), "payload": traffic.payload()}  # fmt: skip


def _right(result: dict, case: str, name: str) -> None:
    gradient, right = result["gradient"], result["right gradient"]
    if gradient is None:
        raise Wrong(f"{case}: prompt.grad is None after backward.")
    if gradient.shape != right.shape or not torch.allclose(gradient, right, atol=1e-6):
        raise Wrong(f"{case}: prompt.grad is not one rank's.\n{_why(result, name)}")
    loss = result["loss"]
    if not isinstance(loss, float):
        raise Wrong(f"{case}: backward returns {type(loss).__name__}, not a float: .item().")
    if abs(loss - result["right loss"]) > 1e-5:
        hint = "The loss of all rows is the sum over all tokens that count, by their number."
        if abs(loss - result["own loss"]) < 1e-5:
            hint = "It is the mean over this rank's own rows."
        raise Wrong(
            f"{case}: the gradient is right, and the loss is {loss:.5f}, not "
            f"{result['right loss']:.5f}.\n{hint}"
        )
    most, bytes_ = (0, 0) if name == "tensor parallel" else (3, right.numel() * 8 + 32)
    if result["calls"] > most or result["payload"] > bytes_:
        raise Wrong(
            f"{case}: right, with {result['calls']} messages of {result['payload']:,} bytes besides"
            f" the model's own; {most} of {bytes_:,} bytes will do."
        )


def _why(result: dict, name: str) -> str:
    gradient, right, own = (result[key] for key in ("gradient", "right gradient", "own gradient"))
    if name == "tensor parallel":
        if torch.allclose(gradient, 2 * right, atol=1e-6):
            return (
                "It is twice that: added up over tp. The model's own all-reduces (f, lab 06) have "
                "already\nmade the gradient whole on each of the ranks that share the matrices."
            )
        if torch.allclose(gradient, right / 2, atol=1e-6):
            return "It is half of it: the same rows are on both ranks, and they count once."
        return "All tp ranks have the same rows and the whole prompt: each has all it needs."
    if torch.allclose(gradient, own, atol=1e-6):
        return "It is that of this rank's own rows: who adds up those of the others?"
    if torch.allclose(gradient, right / 2, atol=1e-6):
        return "It is half of it: the sum over the ranks was divided once more."
    return (
        f"This rank has {result['counts']} tokens that count, the other another number. The mean "
        "of two means\nis not the mean: divide each sum of losses by the tokens of both."
    )
