"""Given: how the check cells judge your decisions, and the page of results.

The plan is held against the planner's own search. The rehearsal runs on real ranks, under a memory
limit and through a kill. The service is a real Triton server under load: what is judged is counted
(bytes, bits, tokens per step, refusals); times are measured and shown.
"""

import json
import operator
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from threading import Event
from typing import Any

import torch

from labs.support.deploy_to_triton import lab_server, served
from labs.support.final_project import brief
from labs.support.five_dimensions import limit
from labs.support.five_dimensions.contracts import NEAR, judged, strategy_of
from labs.support.inference_engine import streams
from utils.cli import flag
from utils.compression import INT4, INT8
from utils.compression.evaluate import cost, held_out
from utils.compression.matrices import quantized, size
from utils.course.assertions import NotHere, Wrong, a_number, described
from utils.course.runner import Group, Trial
from utils.data import library
from utils.models.shipped import load
from utils.planner import Strategy, failures, plan
from utils.ranks.elastic import last_step
from utils.ranks.pool import Dead
from utils.serving.client import Client
from utils.serving.server import ServerError
from utils.training.config import TrainConfig, parse
from utils.training.run_folder import checkpoints
from utils.training.train import train

CLOSE = 0.005  # a run may take longer than with the best interval by this part
SURE = 0.02  # of the days: how far your claim may be off
CURVE = 2e-3  # nats between two curves of STEPS steps in fp32
MIB = 2**20
SECONDS = 240.0  # of processor time for a run of STEPS steps; it takes some
FORMATS = ("fp32", "bf16", "int8", "int4")
results: dict[str, str] = {}  # what the checks have found, for the page at the end
numbers: dict[str, float] = {}  # and those that were predicted


# ---- a: the plan


def the_plan(trial: Trial) -> str:
    """Judge `training_plan`: the strategy, the interval between checkpoints, and the days."""
    made = trial.alone("training_plan", asked)
    strategy, case = strategy_of(made["strategy"]), brief.CASE
    said = judged(strategy, case, NEAR)
    found = plan(case.model, replace(strategy, global_batch=case.global_batch), case.machine)
    save = brief.STATE * found.parameters / brief.STORAGE
    takes = [
        failures.stretch(interval, save, brief.RESTART, brief.BETWEEN)
        for interval in (60 * positive("interval", made), failures.daly(save, brief.BETWEEN))
    ]
    if takes[0] > (1 + CLOSE) * takes[1]:
        raise Wrong(
            f"with a checkpoint every {made['interval']:.4g} minutes the run takes "
            f"{takes[0] / takes[1] - 1:.1%} longer than with the best interval.\n"
            "How long does a save take, and how often does this run fail?"
        )
    steps = brief.TOKENS / (case.global_batch * case.model.seq)
    bare = steps * found.seconds["total"] / brief.DAY
    days, claimed = bare * takes[0], positive("days", made)
    if abs(claimed / days - 1) > SURE:
        hint = "Steps, seconds per step, and what failures and saves add: which one differs?"
        if abs(claimed / bare - 1) < SURE:
            hint = "That is a run without saves, without failures and without restarts."
        raise Wrong(f"you say {claimed:.1f} days, but your plan takes {days:.1f}.\n{hint}")
    numbers["days"] = days
    results["days on 1,024 GPUs"] = f"{claimed:.1f} by your count, {days:.1f} by the planner's"
    return f"{said}\n{days:.1f} days, of which {1 - 1 / takes[0]:.1%} for saves and failures."


def asked(answer: Any) -> dict:
    """On a rank: what `training_plan` returns, its strategy as fields."""
    made = dict(answer.training_plan())
    if isinstance(made.get("strategy"), Strategy):
        return made | {"strategy": dict(vars(made["strategy"]))}
    return made | {"strategy": described(made.get("strategy"))}


def positive(name: str, made: dict) -> float:
    value = a_number("training_plan", name, made.get(name))
    if value <= 0:
        raise Wrong(f"training_plan: {name} is {value}, and must be positive.")
    return value


# ---- b: the rehearsal


def rehearsal(trial: Trial) -> str:
    """Judge `rehearsal`: two ranks under the limit, through a kill, with the curve of one rank."""
    options, every = trial.alone("rehearsal", rehearsed)
    try:
        config = limit.configured(options)
    except (TypeError, ValueError) as error:
        raise Wrong(f"{options}: {error}") from None
    costs = brief.SAVING, brief.RESTARTING, brief.FAILING
    best = failures.stretch(failures.daly(brief.SAVING, brief.FAILING), *costs)
    takes = failures.stretch(every, *costs)
    if takes > 1.01 * best:
        raise Wrong(
            f"a checkpoint every {every} steps makes this run {takes:.3f} times as long, and "
            f"{best:.3f} is possible.\nSaving costs {brief.SAVING} steps, a failure comes every "
            f"{brief.FAILING:g}: which interval balances the two?"
        )
    with trial.ranks(brief.RANKS) as group:
        found = group.run("under the limit", limit.train, config, brief.CAP, seconds=limit.SECONDS)
    peak = max(one.peak for one in found) / 1e6
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        alone = replace(limit.RUN, steps=brief.STEPS, device="cpu")
        with trial.ranks(1) as group:
            right = group.run("one rank", trained, command(alone), seconds=SECONDS)[0]
        config = replace(
            config, steps=brief.STEPS, device="cpu", save_every=every, auto_resume=True,
            out=f"{folder}/run", metrics=f"{folder}/metrics.jsonl",
        )
        killed = trial.draw.randrange(every + 1, brief.STEPS - 1)
        reached = kill_at(trial, config, killed)
        kept = max(int(path.name.rpartition("-")[2]) for path in checkpoints(config.out))
        with trial.ranks(brief.RANKS) as group:
            again = f"the same command after a kill in step {reached}"
            group.run(again, trained, command(config), seconds=SECONDS)
        curve = losses(config.metrics)
    if len(curve) != brief.STEPS:
        raise Wrong(f"the curve has {len(curve)} steps of {brief.STEPS}.")
    apart = max(abs(a - b) for a, b in zip(curve, right))
    allowed = {"fp32": CURVE, "bf16": 10 * CURVE}[config.precision]
    if not apart <= allowed:
        raise Wrong(f"a loss is {apart:.2g} from that of one rank that was never killed.")
    saves = brief.SAVING * (brief.STEPS // every)
    useful = brief.STEPS / (brief.STEPS + reached - kept + saves + brief.RESTARTING)
    numbers["peak"] = peak
    with suppress(ValueError):  # the planner has no offloaded activations
        numbers["planned"] = limit.planned(**options).memory["total"] / 1e6
    results["MB of the fullest rank"] = f"{peak:.1f} of {brief.CAP / 1e6:.0f}"
    results["useful share of the run"] = (
        f"{1 / takes:.0%} expected; here {useful:.0%}, killed in step {reached}, back to {kept}"
    )
    return (
        f"two ranks stay within {brief.CAP / 1e6:.0f} MB; after a kill at a drawn step the same "
        f"command resumes the run;\nits {brief.STEPS} losses match those of one rank, never killed."
    )


def rehearsed(answer: Any) -> tuple[dict, int]:
    made = answer.rehearsal()
    return dict(made["options"]), operator.index(made["save_every"])


def command(config: TrainConfig) -> list[str]:
    """The command line of `python -m utils.train` for this run."""
    words = []
    for entry in fields(config):
        value = getattr(config, entry.name)
        if value != entry.default:
            words += [flag(entry.name)] + [str(value)] * (value is not True)
    return words


def trained(answer: Any, words: list[str]) -> list[float]:
    """The trainer itself, on a rank: its losses by step."""
    return [row["loss"] for row in train(parse(words))[1]]


def kill_at(trial: Trial, config: TrainConfig, step: int) -> int:
    """Start the run and kill its ranks at `step`; return the last step that it reported."""
    with trial.ranks(brief.RANKS, may_die=True) as group, ThreadPoolExecutor(1) as pool:
        over = Event()
        pool.submit(kill_later, group, config.metrics, step, over)
        try:
            case = f"until a kill in step {step}"
            ended = group.run(case, trained, command(config), seconds=SECONDS)
        finally:
            over.set()
    if not all(isinstance(one, Dead) for one in ended):
        raise Wrong("the run was over before it could be killed; check again.")
    return last_step(config.metrics)


def kill_later(group: Group, metrics: str, step: int, over: Event) -> None:
    """Wait for `step` in the metrics, or for the end of the run."""
    while last_step(metrics) < step:
        if over.wait(0.01):
            return
    group.kill()


def losses(metrics: str) -> list[float]:
    """By step, of a metrics file."""
    return [json.loads(line)["loss"] for line in Path(metrics).read_text().splitlines()]


# ---- c and d: the service


def compressed(trial: Trial) -> str:
    """Judge the format of `serving`: its bytes on a rank, and its cost in bits per byte."""
    made, device = service(trial), brief.DEVICE / MIB
    weights, slot = (held / MIB for held in memory(made))
    held, dtype = weights + made["slots"] * slot, made["dtype"]
    if held > device:
        raise Wrong(
            f"a rank needs {held:.2f} MiB and has {device:.0f}: {weights:.2f} of weights in "
            f"{dtype} and {made['slots']} slots of {slot:.2f}.\n"
            "A slot holds max_model_len positions; weights and slots are divided among tp ranks."
        )
    lost = bits_lost(dtype)
    if lost > brief.COST:
        raise Wrong(
            f"{dtype} costs {lost:.4f} bits per byte on text that the model has never seen, and "
            f"{brief.COST} are allowed."
        )
    results["MiB of a serving rank"] = f"{held:.2f} of {device:.0f}"
    said = f"{lost:.4f} bits per byte" if lost > 5e-5 else "none that can be measured"
    results["cost of the format"] = f"{said}, {brief.COST} allowed"
    return (
        f"{dtype} on {made['tp']} rank(s): weights and slots fit in {device:.0f} MiB,\n"
        f"and the format costs less than {brief.COST} bits per byte."
    )


def promise(trial: Trial) -> str:
    """Judge `serving` behind a real server: room, tokens per step, refusals."""
    compressed(trial)  # the promise is kept within the memory, or not at all
    made, (prompt, tokens) = service(trial), brief.LONGEST
    users, crowd = brief.USERS, brief.CROWD
    if made["max_model_len"] < prompt + tokens:
        raise Wrong(
            f"a prompt of {prompt} tokens and its answer of {tokens} do not fit in "
            f"{made['max_model_len']} positions."
        )
    serve(made)
    longest = list(streams.prompt(1) * prompt)[:prompt]
    if not list(Client(lab_server.server()).tokens(longest, max_tokens=tokens)):
        raise Wrong(f"a prompt of {prompt} tokens gets no answer.")
    refused, rows = served.burst(users, lambda refused, rows: refused or rows >= brief.PER_STEP)
    if refused:
        raise Wrong(f"of {users} requests at the same moment {refused} are refused: who may wait?")
    if rows < brief.PER_STEP:
        raise Wrong(
            f"{users} requests make {rows:.1f} tokens per step, and {brief.PER_STEP} are "
            f"promised.\nThey run in groups of {made['slots']}, one after the other."
        )
    least = min(brief.REFUSED, crowd - made["slots"] - made["queue"])
    refused, _ = served.burst(crowd, lambda refused, _: refused >= least)
    if refused < brief.REFUSED:
        raise Wrong(
            f"of {crowd} requests at the same moment {refused} are refused, and {brief.REFUSED} is "
            "the least: the last in the queue would wait too long to be worth serving."
        )
    results["tokens per step"] = f"{rows:.1f} for {users} requests, {brief.PER_STEP} promised"
    return (
        f"the longest request is answered; {users} at once are all served, with {brief.PER_STEP} "
        f"tokens per step or more;\nof {crowd} at once, {brief.REFUSED} or more are refused "
        "immediately."
    )


def service(trial: Trial) -> dict[str, Any]:
    """What `serving` returns, in a process of its own."""

    def chosen(answer: Any) -> dict[str, Any]:
        made = answer.serving()
        whole = ("tp", "max_model_len", "slots", "queue")
        return {name: operator.index(made[name]) for name in whole} | {"dtype": made["dtype"]}

    made = trial.alone("serving", chosen)
    if made["dtype"] not in FORMATS:
        raise Wrong(f"dtype {made['dtype']!r} is not one of {', '.join(FORMATS)}.")
    if made["tp"] not in (1, 2) or min(made["max_model_len"], made["slots"]) < 1:
        raise Wrong("tp is 1 or 2, and there is room for one request at least.")
    return made


def memory(made: dict[str, Any]) -> tuple[float, float]:
    """Bytes of a rank: its weights as they are stored, and one slot of its KV cache (fp32)."""
    model, _ = load("small")
    stored = {
        "fp32": 4 * model.parameter_count(), "bf16": size(model),
        "int8": size(model, INT8), "int4": size(model, INT4),
    }
    config = model.config
    position = 2 * config.layers * config.key_value_heads * config.head_size * 4
    return stored[made["dtype"]] / made["tp"], made["max_model_len"] * position / made["tp"]


def bits_lost(dtype: str) -> float:
    """Bits per byte that models/small loses in a format, on held-out text."""
    scheme = {"int8": INT8, "int4": INT4}.get(dtype)
    if scheme is None:  # models/small is stored in bf16: it loses nothing
        return 0.0
    torch.set_num_threads(1)
    model, tokenizer = load("small")
    text = torch.tensor(tokenizer.encode(library.split()[1][:20_000]))[:2560]
    whole, less = (
        held_out(one, tokenizer, text, window=256, stride=224)
        for one in (model, quantized(model, scheme))
    )
    return cost(less, whole).mean


def serve(made: dict[str, Any]) -> None:
    """Load models/small in the server with these settings."""
    served.serve(
        made["tp"], made["dtype"], max_num_seqs=made["slots"], queue=made["queue"],
        max_model_len=made["max_model_len"],
    )


def measured(file: str | Path) -> float | None:
    """Goodput of the service on this machine, in requests per second: eight clients, answers within
    brief.PATIENCE. None where `serving` is not written or not right."""
    try:
        serve(service(Trial(file)))
    except (NotImplementedError, NotHere, Wrong, ServerError) as error:
        return print(f"Not yet: {error}")
    load, (first, later) = served.requests(8, 48, brief.LONGEST[1]), brief.PATIENCE
    lab_server.take(served.ENGINE)
    found = load.goodput(first, later)
    results["goodput of the service"] = (
        f"{found:.1f} requests/s within {first:g} s and {later:g} s per token; "
        f"{load.summary['tokens_per_second']:.0f} tokens/s in all"
    )
    return found


def page() -> None:
    """Print what the checks have found."""
    for name, found in results.items():
        print(f"{name:<26}{found}")
    if not results:
        print("Nothing yet: the checks fill this page.")
