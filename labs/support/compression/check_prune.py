"""Given: what the check cell of exercise c looks at: the smaller model, and the heads it has.

Drawn models are cut and compared with themselves, the other heads masked. Then a model is drawn in
which a few heads do most of the work, all other choices are tried on held-out text, and yours is
compared with them: whatever the measure, the choice counts.
"""

import copy
import itertools
import random
from dataclasses import replace

import torch

from labs.support.compression import drawn
from labs.support.compression.seen import during, left_alone, own_memory
from utils.course.assertions import Wrong, close, described, not_called
from utils.course.runner import Trial
from utils.models.config import GPTConfig
from utils.models.gpt import GPT

LIBRARY = ("utils.compression", "torch.nn.utils.prune", "prune_heads", "transformers")
PLACES = ("utils/compression/",)
MARGIN = 0.1  # of the way from the best choice to the mean of all
SECONDS = 60.0
BATCHES = (4, 2)  # of calibration text, and held out


def prune_heads(trial: Trial) -> str:
    """Judges `shrink`, `importance` and `prune`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        group.run("shrink", _all_shrunk, _cases(trial))
        seeds = [trial.new_seed() for _ in range(2)]
        group.run("prune", _all_pruned, seeds, seconds=SECONDS)
    return (
        "the smaller model is the large one with the other heads masked, in fp64, fp32 and\n"
        "bf16, with and without grouped queries, biases and tied words, with fewer bytes and in\n"
        "memory of its own; the model is as it was. In models drawn from the seed your choice of\n"
        "heads has the held-out loss of the best choice there is, or next to it."
    )


def _cases(trial: Trial) -> list[dict]:
    draw = trial.draw
    sizes = [  # hidden, H, K, D, kept
        (32, 4, 4, None, 2), (64, 8, 8, 6, 4), (48, 8, 4, 4, 2), (32, 8, 4, None, 1),
        (40, 4, 2, 14, 1), (24, 4, 4, None, 4),
    ]
    types = [torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float64]
    cases = []
    for number, (hidden, H, K, D, kept) in enumerate(sizes):
        config = GPTConfig(
            vocab_size=draw.randrange(20, 60), hidden_size=hidden, layers=draw.randrange(2, 4),
            heads=H, kv_heads=K, head_dim=D, intermediate_size=draw.randrange(9, 40),
            max_positions=64, attention_bias=number in (1, 2), tie_embeddings=number % 2 == 0,
            rope_theta=draw.choice((100.0, 10_000.0)),
        )
        keep = [draw.sample(range(K), kept) for _ in range(config.layers)]
        keep[0] = sorted(keep[0], reverse=True)
        dtype = types[number % len(types)]
        cases.append({
            "what": f"shrink, H {H}, K {K}, D {config.head_size}, {dtype}, keep {keep}",
            "config": config, "dtype": dtype, "keep": keep, "seed": trial.new_seed(),
            "train": draw.random() < 0.5,
        })
    return cases


def _model(case: dict) -> GPT:
    """All its numbers drawn, biases and norms too."""
    model = GPT(case["config"])
    generator = torch.Generator().manual_seed(case["seed"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(middle + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(case["dtype"]).train(case["train"])


# ---- shrink


def _all_shrunk(answer, cases: list[dict]) -> None:
    for case in cases:
        _shrunk(answer, case)


def _shrunk(answer, case: dict) -> None:
    model, what, keep = _model(case), case["what"], [list(heads) for heads in case["keep"]]
    with left_alone(what, model), not_called(*PLACES), during(what):
        small = answer.shrink(model, keep)
    if keep != case["keep"]:
        raise Wrong(f"{what}: the lists of heads are not what they were.")
    _right_sizes(what, small, case["config"], len(keep[0]), case["dtype"])
    own_memory(what, small, model)
    tokens = torch.randint(case["config"].vocab_size, (2, 11))
    right = _masked(copy.deepcopy(model).double(), keep)(tokens)
    hint = "Which rows of q, k and v, and which columns of o, belong to a head and to its group?"
    logits = copy.deepcopy(small).double()(tokens)
    close(what, "a logit, reckoned in fp64,", logits, right, hint=hint, slack=2**14)
    _is_its_config(what, small, tokens)


def _masked(model: GPT, keep: list) -> GPT:
    """The model, in which all other heads give 0."""
    config = model.config
    width = config.query_width // config.key_value_heads
    with torch.no_grad():
        for layer, heads in zip(model.model.layers, keep):
            for head in set(range(config.key_value_heads)) - set(heads):
                layer.self_attn.o_proj.weight[:, head * width : (head + 1) * width] = 0.0
    return model


def _right_sizes(what: str, small, config: GPTConfig, kept: int, dtype: torch.dtype) -> None:
    if not isinstance(small, GPT):
        raise Wrong(f"{what}: the result is {described(small)}, not a GPT.")
    group = config.heads // config.key_value_heads
    smaller = replace(config, heads=group * kept, kv_heads=kept, head_dim=config.head_size)
    right = {name: tuple(p.shape) for name, p in GPT.without_memory(smaller).named_parameters()}
    found = {name: tuple(p.shape) for name, p in small.named_parameters()}
    for name in [*right, *found]:
        if right.get(name) != found.get(name):
            raise Wrong(
                f"{what}: {name} is {found.get(name, 'missing')}, and "
                f"{right.get(name, 'nothing')} is right."
            )
    for name, parameter in small.named_parameters():
        if parameter.dtype != dtype:
            raise Wrong(f"{what}: {name} is {parameter.dtype}, and {dtype} is right.")
        if not parameter.requires_grad or not parameter.is_leaf:
            raise Wrong(f"{what}: {name} could not be trained: it is no leaf with a gradient.")
    if small.parameter_count() != smaller.parameter_count():
        raise Wrong(
            f"{what}: {small.parameter_count():,} numbers, and {smaller.parameter_count():,} are "
            "right. Is the last matrix tied to the embedding as before?"
        )


def _is_its_config(what: str, small: GPT, tokens: torch.Tensor) -> None:
    """Whoever makes a GPT from its config and loads its weights has the same model."""
    try:
        again = GPT(GPTConfig.from_hf(small.config.to_hf())).to(tokens.device)
        again.load_state_dict(small.state_dict())
        inside = small.model.config == small.config
    except Exception as error:
        raise Wrong(
            f"{what}: a GPT of its config cannot have its weights: {str(error)[:200]}\n"
            "heads, kv_heads and head_dim: which of them change, and which must be said now?"
        ) from None
    mine = again.double()(tokens)
    close(f"{what}, saved and loaded", "a logit", mine, copy.deepcopy(small).double()(tokens))
    if not inside:
        raise Wrong(f"{what}: model.model.config is not the config of the smaller model.")


# ---- which heads


def _all_pruned(answer, seeds: list[int]) -> None:
    """Two models, one after the other: what the first one taught does not fit the second."""
    for kept, seed in enumerate(seeds, start=1):
        _pruned(answer, seed, kept)


def _pruned(answer, seed: int, kept: int) -> None:
    """The held-out loss of the answer's choice beside those of all that were tried."""
    what = f"a model drawn from the seed, {kept} of {len(drawn.SIZES[kept])} heads"
    model = drawn.many_heads(torch.Generator().manual_seed(seed), drawn.SIZES[kept])
    calibration, held_out = drawn.batches(seed, *BATCHES)
    given = [(x.clone(), y.clone()) for x, y in calibration]
    with left_alone(what, model, **{"a batch": given}), not_called(*PLACES), during(what):
        small = answer.prune(model, given, kept)
    _right_sizes(what, small, model.config, kept, torch.float32)
    own_memory(what, small, model)
    yours = drawn.loss(small, held_out)
    masked = drawn.loss(_masked(copy.deepcopy(model), _heads_in(what, small, model)), held_out)
    if abs(yours - masked) > 1e-3:
        raise Wrong(
            f"{what}: the result has a held-out loss of {yours:.4f} nats, and the model with its "
            f"heads {masked:.4f}: prune leaves all other numbers as they are."
        )
    tried = _all_choices(model, held_out, kept, seed)
    best, mean = min(tried), sum(tried) / len(tried)
    if not yours <= best + MARGIN * (mean - best):
        raise Wrong(
            f"{what}: with your heads the held-out loss is {yours:.3f} nats; the best choice has "
            f"{best:.3f},\nand a choice by lot {mean:.3f} on the average. Weights alone do not "
            "tell what a head does: what does it do on the batches?"
        )


def _heads_in(what: str, small: GPT, model: GPT) -> list[list[int]]:
    """The heads that each layer has kept, by the bits of their values."""
    found = []
    for index, (layer, before) in enumerate(zip(small.model.layers, model.model.layers)):
        whole = before.self_attn.v_proj.weight.unflatten(0, (-1, model.config.head_size))
        own = layer.self_attn.v_proj.weight.unflatten(0, (-1, model.config.head_size))
        same = [[h for h, rows in enumerate(whole) if torch.equal(rows, mine)] for mine in own]
        if not all(same) or len({heads[0] for heads in same}) < len(same):
            raise Wrong(
                f"{what}: layer {index} has values of a head that the model has not, or one twice."
            )
        found.append([heads[0] for heads in same])
    return found


def _all_choices(model: GPT, held_out: list, kept: int, seed: int) -> list[float]:
    """The held-out loss of every choice; of so many that the best is among them, where kept > 1."""
    layers, heads = model.config.layers, model.config.heads
    options = list(itertools.combinations(range(heads), kept))
    masks = _Masks(model)
    if kept == 1:
        return [
            masks.loss(choice, held_out) for choice in itertools.product(options, repeat=layers)
        ]
    draw = random.Random(seed)
    lot = [[draw.choice(options) for _ in range(layers)] for _ in range(12)]
    tried = [masks.loss(choice, held_out) for choice in lot]
    choice = lot[tried.index(min(tried))]
    best = min(tried)
    for _ in range(2):
        for layer in range(layers):
            for option in options:
                other = [*choice[:layer], option, *choice[layer + 1 :]]
                found = masks.loss(other, held_out)
                if found < best:
                    best, choice = found, other
    return [*tried, best]


class _Masks:
    """A model whose heads can be masked in turn."""

    def __init__(self, model: GPT):
        self.model, self.width = copy.deepcopy(model), model.config.head_size
        self.whole = [
            layer.self_attn.o_proj.weight.detach().clone() for layer in model.model.layers
        ]

    @torch.no_grad()
    def loss(self, choice, held_out: list) -> float:
        for layer, whole, heads in zip(self.model.model.layers, self.whole, choice):
            layer.self_attn.o_proj.weight.zero_()
            for head in heads:
                places = slice(head * self.width, (head + 1) * self.width)
                layer.self_attn.o_proj.weight[:, places] = whole[:, places]
        return drawn.loss(self.model, held_out)
