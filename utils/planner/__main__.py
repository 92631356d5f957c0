"""The planner's command.

    python -m utils.planner --model gpt3-175b --machine dgx-a100 --gpus 1024          # a ranking
    python -m utils.planner --model gpt3-175b --machine dgx-a100 --gpus 1024 --recompute full \\
        --tp 8 --pp 8 --global-batch 1536                                             # one plan
    python -m utils.planner --layers 96 --hidden 12288 --heads 96 --vocab 51200 --seq 2048 \\
        --tp 8 --pp 8 --dp 24 --interleave 2 --global-batch 2304 --recompute full \\
        --machine dgx-a100 --gpus 1536 --json                                         # for programs
    python -m utils.planner --model llama3-8b --seq 131072 --machine dgx-h100 --gpus 64 \\
        --global-batch 16                                    # long sequences, split over ranks
    python -m utils.planner --errors             # its errors on published measurements

With --tp, --cp, --pp or --dp it prints one plan; otherwise it searches every strategy that fits,
with the given options (--recompute, --zero, --micro-batch …) fixed. Incompatible sizes end it with
exit status 2 and one sentence.
"""

import argparse
import json
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import NoReturn

from utils.cli import exit_status
from utils.planner.machine import HERE, MACHINES, measured
from utils.planner.model import MODELS, WORDS, Model, check_whole
from utils.planner.plan import counted, plan
from utils.planner.published import errors
from utils.planner.search import candidates, explain, search
from utils.planner.strategy import CHOICES, Strategy

SIZES = {
    "layers": "layers",
    "hidden": "hidden size",
    "heads": "query heads",
    "kv_heads": "key-value heads (grouped-query attention)",
    "ffn": "inner size of a gated MLP; without it the GPT layout: two matrices of 4 hidden",
    "vocab": "tokens in the vocabulary",
    "seq": "tokens per sequence",
    "experts": "experts of each MLP",
    "experts_per_token": "experts that a token is sent to",
}
WHOLE = {
    "tp": "tensor-parallel ranks",
    "cp": "context-parallel ranks, which divide the positions of each sequence",
    "pp": "pipeline stages",
    "dp": "data-parallel ranks",
    "ep": "of them, ranks that divide the experts",
    "interleave": "chunks of layers per stage",
    "micro_batch": "sequences per micro-batch",
    "global_batch": "sequences per step",
}
HIDES = {
    "overlap_tp": "with sequence parallelism, tensor parallelism's messages travel during products",
    "overlap_pp": "with interleave, hidden states travel during the pass of another chunk",
    "overlap_grad_reduce": "gradients travel during the backward pass",
    "overlap_param_gather": "ZeRO's weights travel during the passes",
}
SET = {
    "sequence_parallel": "split what tensor parallelism leaves whole over the sequence",
    "fused_loss": "Megatron's --cross-entropy-loss-fusion: fewer passes over the logits",
}
TEXTS = {
    "context": "how attention sees the positions of cp's other ranks: pass keys and values from "
    "rank to rank, exchange positions for heads, or gather all keys and values on every rank",
}
SEARCHED = {"tp", "cp", "pp", "dp"}  # any of them: one plan


class Parser(argparse.ArgumentParser):
    """Errors in one sentence, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        print(f"utils.planner: {message}", file=sys.stderr)
        sys.exit(2)


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="python -m utils.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = made.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help=f"a preset: {', '.join(MODELS)}")
    for name, text in SIZES.items():
        model.add_argument(_flag(name), type=int, metavar="N", help=text)
    strategy = made.add_argument_group("strategy")
    for name, text in WHOLE.items():
        strategy.add_argument(_flag(name), type=int, metavar="N", help=text)
    for name, known in CHOICES.items():
        if name in SET:
            strategy.add_argument(_flag(name), action="store_const", const=True, help=SET[name])
        elif name in HIDES:
            text = f"{HIDES[name]}; default: as in the machine's time"
            strategy.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=text)
        else:
            values, text = "|".join(map(str, known)), TEXTS.get(name)
            strategy.add_argument(_flag(name), type=type(known[0]), metavar=values, help=text)
    machine = made.add_argument_group("machine")
    machine.add_argument(
        "--machine",
        default="dgx-a100",
        metavar="NAME",
        help=f"one of {', '.join(MACHINES)}; {HERE}: this one, measured in a few seconds",
    )
    machine.add_argument("--gpus", type=int, metavar="N", help="devices; dp · pp · cp · tp")
    made.add_argument("--top", type=int, default=10, metavar="N", help="rows of the ranking")
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.add_argument("--errors", action="store_true", help="published runs, planner's errors")
    return made


def _flag(name):
    return "--" + name.replace("_", "-")


def chosen(what: str, name: str, known: Collection[str]) -> str:
    """The name of a preset, or the only one that contains `name`: v100, 405b."""
    found = [name] if name in known else [other for other in known if name.lower() in other]
    if len(found) != 1:
        raise ValueError(f"{what} {name!r} is not one of {', '.join(known)}")
    return found[0]


def read_model(given: argparse.Namespace) -> Model:
    """The preset with the given sizes, or a model of these sizes alone."""
    sizes = {name: getattr(given, name) for name in SIZES if getattr(given, name) is not None}
    missing = [_flag(name) for name in ("layers", "hidden", "heads") if name not in sizes]
    of_option = {option: field for field, option in WORDS.items()}
    sizes = {of_option.get(name, name): size for name, size in sizes.items()}
    if given.model is not None:
        if "intermediate_size" in sizes:
            sizes["gated"] = True
        return replace(MODELS[chosen("model", given.model, MODELS)], **sizes)
    if missing:
        raise ValueError(f"no model: give --model or {', '.join(missing)}")
    return Model(gated="intermediate_size" in sizes, **sizes)


def read_strategy(given: argparse.Namespace) -> dict:
    """The given fields of `Strategy`."""
    names = {field.name for field in fields(Strategy)}
    found = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    Strategy(**found)  # raises for invalid values, by name
    return found


def one_strategy(found: dict, gpus: int | None, model: Model) -> Strategy:
    """The strategy of these fields on `gpus` devices: dp follows from the rest."""
    names = ["tp", *(["cp"] if found.get("cp", 1) > 1 else []), "pp"]
    split = math.prod(found.get(name, 1) for name in names)
    if "dp" not in found:
        if gpus is None:
            found["dp"] = 1
        elif gpus % split:
            raise ValueError(f"gpus {gpus} is not a multiple of {' · '.join(names)} = {split}")
        else:
            found["dp"] = gpus // split
    strategy = Strategy(**({"global_batch": model.batch} | found))
    if gpus is not None and strategy.gpus != gpus:
        names = ["dp", *names]
        sizes = "·".join(str(getattr(strategy, name)) for name in names)
        raise ValueError(
            f"gpus {gpus} is not {'·'.join(names)} = {sizes} = {strategy.gpus}: change one of them"
        )
    return strategy


def run(given: argparse.Namespace) -> str:
    """The command's output. Raises ValueError for incompatible sizes."""
    if given.errors and given.json:
        raise ValueError("--json cannot be combined with --errors, which prints a table: omit it")
    if given.errors:
        return errors()
    name = chosen("machine", given.machine, (*MACHINES, HERE))
    model, found = read_model(given), read_strategy(given)
    machine = measured() if name == HERE else MACHINES[name]
    if SEARCHED & set(found):
        result = plan(model, one_strategy(found, given.gpus, model), machine)
        return json.dumps(result.as_dict(), indent=1) if given.json else str(result)
    if given.gpus is None:
        raise ValueError(
            "no strategy and no devices: give --gpus to search, or --tp, --cp, --pp, --dp"
        )
    check_whole("top", given.top)
    batch = found.pop("global_batch", None)
    ranking = search(model, machine, given.gpus, batch, given.top, **found)
    tried = len(candidates(model, machine, given.gpus, batch, **found))
    if not tried:
        raise ValueError(
            f"gpus {given.gpus}: no tp · cp · pp · dp of this product divides the model and a "
            f"batch of {batch or model.batch}: give another number or another --global-batch"
        )
    if given.json:
        rows = [one.as_dict() for one in ranking]
        return json.dumps({"tried": tried, "ranking": rows}, indent=1)
    title = (
        f"{model.name or 'model'}: {counted(model.parameters)} parameters on {given.gpus}"
        f" x {machine.name}, batch {batch or model.batch} of {model.seq} tokens"
    )
    if not ranking:
        return f"{title}\nnone of {tried} strategies fits: more devices, --recompute, --offload?"
    return f"{title}\n{tried} strategies, the fastest that fit:\n\n{explain(ranking)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m utils.planner`; return the exit status."""
    given = parser().parse_args(arguments)
    return exit_status("utils.planner", lambda: print(run(given)))


if __name__ == "__main__":
    sys.exit(main())
