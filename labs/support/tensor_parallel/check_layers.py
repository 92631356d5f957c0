"""Given: what the check cells of a, b and c look at: values, gradients, messages, memory, work.

1 to 6 real ranks run your functions and layers (scenarios.py) at sizes that N need not divide;
everything must equal the whole layer in float64.
"""

from collections.abc import Callable

import torch

from labs.support.tensor_parallel import scenarios
from labs.support.tensor_parallel.judging import (
    ASKED,
    HALVES,
    HANG,
    LIBRARY,
    TYPES,
    equal,
    messages,
    name_of,
    no_messages,
    no_tensor_held,
    nothing_kept,
    numbers,
    own_size,
    runs,
    slack_of,
    sum_hint,
    words_of,
)
from labs.support.tensor_parallel.scenarios import cuts, part_of
from utils.course.assertions import Wrong, bitwise_equal, close, same_bits, unchanged
from utils.course.runner import Group, Trial
from utils.models.gpt import GPTConfig
from utils.shares import shares

# ---- a


def pair(trial: Trial) -> str:
    """Judges `Enter` and `Leave`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        cases = [_pair_case(trial, group.size, name, i) for i in range(3) for name in _PAIR]
        for some, late in runs(group, cases):
            ranks = group.run(group.case("some tensors"), scenarios.functions, some, late=late)
            for i, case in enumerate(some):
                _right_pair(group, case, [found[i] for found in ranks], late)
    return (
        "Enter: nothing forward, a sum backward; Leave: a sum forward, nothing backward;\n"
        "one all-reduce each, of as many bytes as the tensor has; on 1 to 6 ranks, with tensors\n"
        "of many shapes and layouts and three types, with gradients and without; no tensor that\n"
        "was given is changed, and nothing is kept."
    )


_PAIR = ("Enter", "Leave")


def _pair_case(trial: Trial, size: int, name: str, i: int) -> dict:
    """One of the three cases of a function: type and oddity differ, the rest is drawn. The third is
    long, on 2 ranks of more than 50,000 numbers."""
    draw = trial.draw
    shape = tuple(draw.randrange(2, 8) for _ in range(draw.randrange(2, 5)))
    if i == 1:
        shape = tuple(draw.randrange(1, 8) for _ in range(draw.randrange(1, 5)))
    elif i == 2:
        shape = draw.randrange(9, 20), draw.randrange(1, 4)
        shape += (50_000 // (shape[0] * shape[1]) + 1,) * (size == 2)
    odd = trial.draw.randrange(size), ("", "zeros", "a NaN")[i]
    return {
        "function": name, "more": (), "dtype": TYPES[(i + size) % 3],
        "x": numbers(trial, [shape] * size, i, odd), "dy": numbers(trial, [shape] * size, i, odd),
    }


def _right_pair(group: Group, case: dict, ranks: list[dict], late: bool) -> None:
    size, name = group.size, case["function"]
    x, dy = ([scenarios.tensor_of(case, r, part) for r in range(size)] for part in ("x", "dy"))
    summed, passed = (dy, x) if name == "Enter" else (x, dy)
    total = sum(t.double() for t in summed)
    there, back = ("dx", "y") if name == "Enter" else ("y", "dx")
    of_sum, of_nothing = ("backward", "forward") if name == "Enter" else ("forward", "backward")
    sums = [found[there] for found in ranks]
    nbytes = x[0].numel() * x[0].element_size()
    for rank, found in enumerate(ranks):
        where = words_of(group, case, rank, late)
        for half in ("forward", "backward"):
            unchanged(where, found[half]["changed"], "Others may hold it too: all-reduce a clone.")
        unchanged(f"{where}, {ASKED}", found["asking"]["changed"], "Sum a clone, here too.")
        if not bitwise_equal(found[back], passed[rank]):
            raise Wrong(
                f"{where}: {name}.{of_nothing} must hand on what comes, as it is.\n"
                + ("The forward pass of f says nothing: x is the same on all ranks."
                   if name == "Enter" else
                   "Every rank holds the same sum y and the same loss of it: y grows by what x "
                   "grows by.")
            )
        no_messages(f"{where}: {name}.{of_nothing}", found[of_nothing]["events"], size)
        what = f"what {name}.{of_sum} returns"
        hint = sum_hint(found[there], total, summed, rank)
        slack = slack_of(8, summed, total)
        close(where, what, found[there], total, hint=hint, dtype=case["dtype"], slack=slack)
        right = {"all_reduce": [nbytes]}
        messages(f"{where}: {name}.{of_sum}", found[of_sum]["events"], right, size)
        what, events = f"{where}, {ASKED}: {name}.forward", found["asking"]["events"]
        if name == "Enter":
            close(what, "the result", found["asked"], x[rank], dtype=case["dtype"], slack=0)
            no_messages(what, events, size)
        else:
            close(what, "the sum", found["asked"], total, dtype=case["dtype"], slack=slack)
            messages(what, events, right, size)
        no_tensor_held(f"{where}: {name}", found["held"])
        own_size(f"{where}: {name}", found["spare"])
        if not late:
            _no_copy(f"{where}: {name}.{of_nothing}", found[of_nothing]["largest"])
            nothing_kept(where, found["kept"])
    same_bits(words_of(group, case, None, late), f"what {name}.{of_sum} returns", sums)


def _no_copy(where: str, largest: int) -> None:
    if largest:
        raise Wrong(
            f"{where} makes a tensor of {largest:,} bytes. It has nothing to compute: can it hand "
            "on\nwhat it was given?"
        )


# ---- b and c


def mlp(trial: Trial) -> str:
    """Judges `column`, `row` and `ParallelMLP`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        _cut_linears(trial, group)
        layers(trial, group, mlp_cases(trial, "ParallelMLP", group))
    return (
        "column and row cut at any lengths; output, gradient of x and of every part equal the\n"
        "whole layer's on 1 to 6 ranks; one all-reduce forward, one backward; each rank holds its\n"
        "part and no more, and multiplies with nothing else."
    )


def attention(trial: Trial) -> str:
    """Judges `head_sizes` and `ParallelAttention`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        _head_sizes(trial, group)
        types, wide = _types(trial, group), group.size == 2
        cases = [_attention_case(trial, group.size, t, wide and not i) for i, t in enumerate(types)]
        layers(trial, group, cases)
    return (
        "whole heads, each group with its key-value head, for many numbers of heads on 1 to 6\n"
        "ranks; output and all gradients equal the whole layer's; one all-reduce forward, one\n"
        "backward; each rank holds its part and no more, and multiplies with nothing else."
    )


def _types(trial: Trial, group: Group) -> list[torch.dtype]:
    """Of the layers: all where ranks are few, one where each message costs more."""
    if group.size == 2:
        return [*trial.draw.sample(TYPES[:2], 2), TYPES[2]]
    return trial.draw.sample(TYPES, 2 if group.size == 3 else 1)


def _cut_linears(trial: Trial, group: Group) -> None:
    """column and row by themselves, at lengths that no rule makes."""
    cases = []
    for name, dim in (("column", 0), ("row", 1)):
        most = 99 if group.size == 2 else 9
        lengths = [trial.draw.randrange(1, most) for _ in range(group.size)]
        if group.size > 2 and name == "row":
            lengths[trial.draw.randrange(group.size)] = 0
        shape = [trial.draw.randrange(2, 9), trial.draw.randrange(2, 9)]  # (inputs, outputs)
        shape[1 - dim] = sum(lengths)
        dtype = trial.draw.choice(TYPES)
        cases.append({"function": name, "shape": shape, "lengths": lengths, "dtype": dtype,
                      "dim": dim, "seed": trial.new_seed()})
    ranks = group.run(group.case("single layers"), scenarios.cut_linears, cases)
    for rank, found in enumerate(ranks):
        for case, one in zip(cases, found):
            whole, cut = scenarios.linear_of(case), (case["dim"], case["lengths"])
            lengths = ", ".join(map(str, case["lengths"]))
            where = group.case(f"lengths {lengths} in {name_of(case['dtype'])}, rank {rank}")
            where += f": {case['function']}"
            bias = part_of(whole.bias, cut if case["dim"] == 0 else None, rank)
            _right_part(where, "weight", one["weight"], part_of(whole.weight, cut, rank))
            _right_part(where, "bias", one["bias"], bias)
            _own_memory(where, "weight", one["weight"], one["stored"])
            unchanged(where, ["the whole layer"] if one["changed"] else [])


def mlp_cases(trial: Trial, layer: str, group: Group) -> list[dict]:
    """Layers of any sizes; on three ranks one has two columns, so that a rank has none; on two
    ranks one is wide."""
    cases = []
    for dtype in _types(trial, group):
        few, wide = group.size == 3 and cases, group.size == 2 and not cases
        columns = 2 if few else trial.draw.randrange(4, 40) + 130 * wide
        config = _config(trial.draw.randrange(5, 30) + 64 * wide, intermediate_size=columns)
        cases.append(_layer_case(trial, layer, config, dtype, wide))
    return cases


def _attention_case(trial: Trial, size: int, dtype: torch.dtype, wide: bool) -> dict:
    """Key-value heads for all ranks; groups and heads of any size, not tied to the hidden size."""
    keys = size + trial.draw.randrange(3)
    group = trial.draw.randrange(9, 17) if wide else trial.draw.randrange(1, 5)
    sizes = {"heads": keys * group, "kv_heads": keys, "head_dim": trial.draw.choice((2, 4, 6, 10))}
    times = trial.draw.randrange(1, 4) + wide * 250 // (keys * group)
    config = _config(keys * group * times, **sizes)
    return _layer_case(trial, "ParallelAttention", config, dtype, wide)


def _config(hidden: int, **sizes: int) -> GPTConfig:
    sizes = {"heads": 1, "head_dim": 2} | sizes
    return GPTConfig(
        vocab_size=2, hidden_size=hidden, layers=1, attention_bias=True, mlp_bias=True, **sizes
    )


def _layer_case(
    trial: Trial, layer: str, config: GPTConfig, dtype: torch.dtype, wide: bool
) -> dict:
    """Two steps: of two batches of different shapes, whose gradients add up, and of one, after the
    weights have changed. The second has rows of one position, which attends to itself whatever q
    and k are; wide: the last has more than 50,000 numbers."""
    draw = trial.draw
    least = 2 if layer == "ParallelAttention" else 1
    shapes = [(draw.randrange(1, 4), draw.randrange(least, 14)) for _ in range(3)]
    shapes[1] = draw.randrange(9, 13), 1
    if wide:
        shapes[2] = 10, 50_000 // (10 * config.hidden_size) + 1
    steps = [
        {"shape": shape, "seed": trial.new_seed(), "last": i > 0, "transposed": i != 1,
         "start": draw.randrange(50)}
        for i, shape in enumerate(shapes)
    ]
    return {"layer": layer, "config": config, "dtype": dtype, "seed": trial.new_seed(),
            "steps": steps}


def layers(
    trial: Trial, group: Group, cases: list[dict], right_messages: Callable | None = None
) -> None:
    """The parts of the layers, and then their training steps.

    right_messages: judges what a rank sends in a pass, and keeps for the backward pass."""
    words = [_layer_words(case) for case in cases]
    both = group.case(" and ".join(words))
    for rank, found in enumerate(group.run(both, scenarios.parts, cases)):
        for case, what, one in zip(cases, words, found):
            _right_parts(group.case(f"{what}, rank {rank}"), case, rank, group.size, one)
    for late in (False, True) if group.size == 2 else (False,):
        cases = cases[1:2] if late else cases  # a small one
        words = [_layer_words(case) + ", results coming late" * late for case in cases]
        ranks = group.run(both, scenarios.steps, cases, late=late)
        for i, case in enumerate(cases):
            passes = [found[i] for found in ranks]
            _right_steps(group, words[i], case, passes, late, right_messages or _right_messages)


def _layer_words(case: dict) -> str:
    config = case["config"]
    if case["layer"] == "ParallelAttention":
        return (
            f"{config.heads} query heads, {config.kv_heads} key-value heads of {config.head_size} "
            f"in {name_of(case['dtype'])}"
        )
    return f"{config.mlp_size} columns in {name_of(case['dtype'])}"


def _right_parts(where: str, case: dict, rank: int, size: int, found: dict) -> None:
    whole = dict(scenarios.whole_layer(case).named_parameters())
    for name, cut in cuts(case, size).items():
        _right_part(where, name, found["parts"][name], part_of(whole[name], cut, rank))
    for name, stored in found["stored"].items():
        _own_memory(where, name, found["parts"][name], stored)
    unchanged(where, found["changed"])
    if found["beside"]:
        raise Wrong(
            f"{where}: {found['beside']:,} bytes beside the parts stay in memory when the whole "
            "layer\nis no longer needed. Who still holds it, or a copy?"
        )


def _right_part(where: str, name: str, got: torch.Tensor, right: torch.Tensor) -> None:
    if got.shape != right.shape:
        raise Wrong(
            f"{where}: {name} has the shape {tuple(got.shape)}, and this rank's part is "
            f"{tuple(right.shape)} (outputs, inputs).\nA column layer is cut along its outputs, "
            "a row layer along its inputs."
        )
    if not bitwise_equal(got, right):
        raise Wrong(
            f"{where}: {name} has the right shape, but is not this rank's part of the whole, to "
            "the bit.\nWhere does the part of this rank begin?"
        )


def _own_memory(where: str, name: str, part: torch.Tensor, stored: int) -> None:
    if stored > part.numel() * part.element_size():
        raise Wrong(
            f"{where}: {name} is a view: it keeps {stored:,} bytes alive, of which "
            f"{part.numel() * part.element_size():,} are its own.\n"
            "Nothing is saved so: .clone() the part."
        )


def _right_steps(group, words: str, case: dict, ranks: list, late: bool, right_messages) -> None:
    size, sequence = group.size, case["layer"] == "SequenceMLP"
    for i, right in enumerate(scenarios.right_steps(case)):
        step, passes = case["steps"][i], [found[i] for found in ranks]
        b, t = step["shape"]
        here = f"{words}, batch {i + 1} of shape {(b, t, case['config'].hidden_size)}"
        positions = (1, shares(t, size)) if sequence else None
        _right_output(group, here, case, right, positions, [one["y"] for one in passes])
        for rank, one in enumerate(passes):
            where = group.case(f"{here}, rank {rank}")
            unchanged(where, one["forward"]["changed"] + one["backward"]["changed"])
            unchanged(f"{where}, {ASKED}", one["asking"]["changed"])
            right_messages(where, one, case, step, rank, size)
            by_rank = [] if sequence else [other["dx"] for other in passes]
            dx = part_of(right["dx"], positions, rank)
            hint = _gradient_hint(one["dx"], dx, by_rank)
            _close(where, "the gradient of x", one["dx"], dx, hint, case, right)
            for name, cut in cuts(case, size).items():
                if cut or step["last"] or not sequence:
                    _right_gradient(where, name, cut, right, rank, passes, case)
            _right_work(where, case, one, right, rank, size)
            y = part_of(right["y"], positions, rank)
            _close(where, f"the output {ASKED}", one["again"], y, "", case, right)
            own_size(where, one["spare"])
        if not sequence:
            same_bits(group.case(here), "the output", [one["y"] for one in passes])
    for rank, found in enumerate(ranks):
        if not late:
            nothing_kept(group.case(f"{words}, rank {rank}"), found[-1]["kept"])


def _right_output(group, here, case, step, positions, ys) -> None:
    """The output on all ranks; positions: how they are cut, None where each rank has all."""
    size, (bias,) = group.size, [b for n, b in step["biases"].items() if _is_row(n)]
    for rank, y in enumerate(ys):
        where, right = group.case(f"{here}, rank {rank}"), part_of(step["y"], positions, rank)
        hint = "Does every part take its turn, as in the whole layer?"
        if equal(y, right - bias):
            hint = "It lacks the bias of the row layer: add it after g."
        for n in range(1, size):
            if equal(y, right + n * bias):
                hint = f"It has the bias of the row layer {n + 1} times: add it after g."
        if size > 1 and not positions and _same_shapes(ys, right):
            total = sum(y.double() for y in ys).to(y.dtype)
            if any(equal(total, right + n * bias) for n in (0, size - 1)):
                hint = "Each rank has another output, and they add up to the right one: g."
        _close(where, "the output", y, right, hint, case, step)


def _close(where: str, what: str, got, right: torch.Tensor, hint: str, case, step: dict) -> None:
    """As `close`, for results of many operations: they hand on roundings of all other results."""
    roundings = 24 if case["dtype"] == torch.bfloat16 else 512  # products add up in fp32
    own = right.abs().max().item() if right.numel() else 0.0
    slack = roundings * max(1.0, step["largest"] / own) if own else roundings
    close(where, what, got, right, hint=hint, dtype=case["dtype"], slack=slack)


def _same_shapes(tensors: list, right: torch.Tensor) -> bool:
    return all(isinstance(t, torch.Tensor) and t.shape == right.shape for t in tensors)


def _is_row(name: str) -> bool:
    return name in ("o_proj.bias", "down_proj.bias")


def _gradient_hint(got, right: torch.Tensor, by_rank: list) -> str:
    """A question about a gradient, with a cause where the numbers show it."""
    size = len(by_rank)
    if size > 1 and _same_shapes(by_rank, right):
        if equal(sum(g.double() for g in by_rank).to(got.dtype), right):
            return "Each rank has a part of it, and these add up to the right one: who adds?"
        for times in (size, 1 / size):
            if equal(got, times * right):
                return f"It is {times:.3g} times that. What is counted on every rank?"
    return "The output is right. What does each rank know of this gradient?"


def _right_gradient(where, name, cut, step, rank, passes, case) -> None:
    right = part_of(step["gradients"][name], cut, rank)
    by_rank = [one["gradients"][name] for one in passes]
    hint = _gradient_hint(by_rank[rank], right, by_rank if cut is None else [])
    _close(where, f"the gradient of {name}", by_rank[rank], right, hint, case, step)


def _right_messages(where: str, one: dict, case: dict, step: dict, rank: int, size: int) -> None:
    (b, t), hidden = step["shape"], case["config"].hidden_size * case["dtype"].itemsize
    hint = "x enters once for all matrices that read it, and leaves once."
    for half, when in HALVES.items():
        right = {"all_reduce": [b * t * hidden]}
        messages(f"{where}, {when}", one[half]["events"], right, size, hint)


def _right_work(where, case, one, step, rank, size) -> None:
    """Products with this rank's part, twice as many backward; scores of its heads, and the norm's
    backward pass, which has a product."""
    (b, t, _), lengths = step["y"].shape, cuts(case, size)
    matrices = {n: w for n, w in step["gradients"].items() if n.endswith("proj.weight")}
    parts = sum(part_of(w, lengths[n], rank).numel() for n, w in matrices.items())
    others = b * t * case["config"].hidden_size
    if case["layer"] == "ParallelAttention":
        others = 2 * b * t * t * lengths["q_proj.weight"][1][rank]
    for times, half in enumerate(("forward", "backward"), start=1):
        most = times * (b * t * parts + times * others)
        if one[half]["work"] > most:
            raise Wrong(
                f"{where}: {one[half]['work']:,} multiplications in the {half} pass, and {most:,} "
                "will do.\nDoes a rank compute with its own part only, and once?"
            )


def _head_sizes(trial: Trial, group: Group) -> None:
    cases = []
    for most in (9, 9, 9, 9, 9, 40, 40, 100):
        keys = group.size + trial.draw.randrange(most)
        cases.append((keys * trial.draw.randrange(1, most), keys, trial.draw.randrange(1, 130)))
    for rank, found in enumerate(group.run(group.case("head_sizes"), scenarios.head_sizes, cases)):
        for (heads, keys, head), got in zip(cases, found):
            mine = shares(keys, group.size)
            right = tuple(n * heads // keys * head for n in mine), tuple(n * head for n in mine)
            if got != right:
                raise Wrong(
                    f"{group.case()}, rank {rank}: head_sizes({heads}, {keys}, {head}) is "
                    f"{got}, not {right}.\nA rank has whole heads, and the query heads that "
                    "attend to its key-value heads."
                )
