"""Tokens per second and time to first token of the served model, next to its alternatives.

    python -m utils.serving.bench --repo triton_model_repo --clients 1,4,16
    python -m utils.serving.bench --repo REPO --clients 1,4,16 --json > bench.json
    python -m utils.serving.bench --repo REPO --quick        # one short round, to see that it runs

Contenders, all with the same model, prompts, number of new tokens (greedy) and threads of torch: as
many as the repository's config.pbtxt gives to all ranks of gpt_engine together.

    engine          the engine in this process, whole answers
    engine stream   the same, token by token
    triton          its own tritonserver: HTTP generate, whole answers
    triton stream   HTTP generate_stream
    gateway         the gateway in front of that tritonserver; also as a stream
    sequential      transformers.generate, one request after another
    static          transformers.generate, a batch with one request per client
    ctranslate2     the same batches in C++, where it is installed: pip install ctranslate2

Clients form a closed loop: each sends its next request when it has its answer. The contenders take
turns, in a different order each round, while the others are idle; ratios are taken within a round,
so other load affects all alike. Each round has its own batch of prompts, the same for all; `--seed`
draws them from the corpus. No request ends early: only prompts with a greedy answer of full length
are chosen. Prompts repeat, so prefix caching is off. Answers that differ from transformers' are
counted.

Figures are medians and quartiles over the rounds. The interval of a ratio contains the true median
with a probability of at least 90 %, whatever the distribution: from the k-th smallest round to the
k-th largest (of five to seven rounds, minimum and maximum). A goal is met if the whole interval is
on its right side, not met if it is on the wrong side, and otherwise undecided.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

from tqdm import tqdm

from tests.bench.serving.contenders import ADDRESSES, LIMIT, World, newest
from utils.cli import check_options, option, parse_flags
from utils.measure.machine import cores, processor_name
from utils.serving.engine.version import Version
from utils.serving.load import Load

WHOLE = ("engine", *ADDRESSES, "ctranslate2")  # whose first token arrives with the last
RATIOS = (
    ("triton", "engine"),
    ("triton stream", "engine stream"),
    ("gateway", "triton"),
    ("gateway stream", "triton stream"),
    ("engine", "sequential"),
    ("engine", "static"),
    ("engine", "ctranslate2"),
    ("triton", "sequential"),
    ("triton", "static"),
)
GOALS = (  # pair, the most clients (-1) or the fewest (0), the wanted ratio
    ("triton / engine", -1, 0.9),
    ("gateway / triton", -1, 0.95),  # no number of rounds could show 1.0
    ("triton / sequential", -1, 5.0),
    ("engine / sequential", 0, 1.0),
    ("engine / ctranslate2", -1, 1.0),
    ("engine / ctranslate2", 0, 0.8),
)
BAR = "{percentage:3.0f}% {bar} {elapsed}, {remaining} left{postfix}"
CONFIDENCE = 0.9  # probability that the interval of a ratio contains its median
FIGURES = ("tokens_per_second", "first_p50", "latency_p50", "latency_p95")


@dataclass(frozen=True)
class Settings:
    """The options of a measurement. Raises ValueError for invalid ones."""

    repo: str = option("triton_model_repo", "model repository, filled by the export")
    clients: str = option("1,4,16", "numbers of clients, with commas between")
    rounds: int = option(5, "how often the contenders take turns")
    requests: int = option(2, "that each client sends in a load; four at least in all")
    seconds: float | None = option(None, "length of each load; instead of --requests")
    prompt_tokens: int = option(32, "of each prompt")
    max_tokens: int = option(64, "new tokens of each request")
    seed: int = option(0, "draws the prompts")
    json: bool = option(False, "print the figures as JSON")
    quick: bool = option(False, "one round of few tokens")

    def __post_init__(self):
        check_options(self)
        for name in ("rounds", "requests", "prompt_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is not above 0")
        if self.seconds is not None and not 0 < self.seconds <= LIMIT / 2:
            raise ValueError(f"--seconds {self.seconds} is not above 0 and at most {LIMIT / 2:g}")
        _ = self.counts

    @property
    def counts(self) -> list[int]:
        words = self.clients.split(",")
        if not all(word.strip().isdigit() and 1 <= int(word) <= 64 for word in words):
            raise ValueError(f"--clients {self.clients!r}: give numbers from 1 to 64, like 1,4,16")
        return sorted({int(word) for word in words})


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    try:
        texts = {
            "prog": "python -m utils.serving.bench",
            "description": "Compare the served model with its peers: tokens per second and time to "
            "first token.",
        }
        settings = Settings(**parse_flags(Settings, arguments, **texts))
        found = bench(settings, say=lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, RuntimeError) as problem:
        print(f"utils.serving.bench: {problem}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if settings.json else report(found))
    return 0


def bench(settings: Settings, say: Callable[[str], None] = lambda text: None) -> dict:
    """Run all contenders; return what --json prints. `say` gets lines of progress; a terminal also
    gets a bar."""
    version = Version.read(newest(settings.repo))
    rounds, new = (1, 8) if settings.quick else (settings.rounds, settings.max_tokens)
    with ExitStack() as stack:
        say("starting the engine, transformers and tritonserver; choosing prompts")
        world = World(stack, settings.repo, version, settings.prompt_tokens, new)
        world.choose_prompts(max(settings.counts), 1 + rounds, settings.seed)
        expected = warm_up(world, settings)
        seconds = sum(expected.values())
        say(
            f"{world.threads} thread(s) of torch for each contender; {rounds} round(s) of "
            f"{seconds:.0f} s: about {duration(rounds * seconds)}"
        )
        loads, different = {load: [] for load in expected}, dict.fromkeys(world.present, 0)
        bar, begin = stack.enter_context(progress(rounds * seconds)), time.monotonic()
        for turn in range(rounds):
            world.take_batch(1 + turn)
            start = turn % len(world.present)
            for many in settings.counts:
                for name in world.present[start:] + world.present[:start]:
                    bar.set_postfix_str(f"round {turn + 1}, {many} client(s), {name}")
                    requests = None if settings.seconds else requests_of(settings, name, many)
                    load = world.load(name, many, requests, settings.seconds)
                    loads[name, many].append(load)
                    bar.update(expected[name, many])
            different = {name: n + world.different[name] for name, n in different.items()}
            if bar.disable:
                say(f"round {turn + 1} of {rounds}: {duration(time.monotonic() - begin)} so far")
    facts = {
        "machine": f"{cores():g} cores, {processor_name()}",
        "tp": version.tp,
        "threads": world.threads,
        "parameters": version.manifest["parameters"],
        "prompt_tokens": settings.prompt_tokens,
        "max_tokens": new,
        "rounds": rounds,
        "expected_seconds": rounds * seconds,
        "seconds": time.monotonic() - begin,
        "absent": world.absent,
        "different_answers": different,
    }
    return facts | summary(loads, settings.counts)


def requests_of(settings: Settings, name: str, many: int) -> int:
    """The number of requests of a load, at least four. Each client of `sequential` sends only one,
    because its speed does not depend on how many wait."""
    return max(4, many * (1 if name == "sequential" else settings.requests))


def warm_up(world: World, settings: Settings) -> dict[tuple[str, int], float]:
    """Run a small load of each contender and number of clients, which does not count; return
    {(contender, clients): expected seconds of a load that counts}."""
    world.take_batch(0)
    expected = {}
    for many in settings.counts:
        for name in world.present:
            if many == settings.counts[0]:
                world.load(name, many, 2, None)  # the first ones are slow
            load = world.load(name, many, 2 if name == "sequential" else max(2, many), None)
            took = load.seconds * requests_of(settings, name, many) / len(load.requests)
            if settings.seconds:  # the last answers end half an answer's time later
                took = settings.seconds + load.summary["latency_p50"] / 2
            expected[name, many] = took
    return expected


def progress(seconds: float) -> tqdm:
    """A bar of the expected seconds on standard error, if that is a terminal."""
    return tqdm(total=seconds, disable=None, leave=False, bar_format=BAR)


def duration(seconds: float) -> str:
    """A rounded duration: "50 s", "4 min"."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


# ---- the figures


def quartiles(values: Iterable[float]) -> dict:
    """The quartiles of some values: {"q1", "median", "q3"}."""
    values = list(values)
    q1, median, q3 = statistics.quantiles(values * (1 + (len(values) == 1)), method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}


def interval(values: Iterable[float]) -> dict:
    """Return {"low", "median", "high"} of a ratio's rounds: low and high are the k-th smallest and
    the k-th largest, for the largest k with which they enclose the true median with CONFIDENCE. A
    round is above or below it like a coin toss, so they miss it with probability 2·P(fewer than k
    of n are heads). They are None if the rounds are too few even for k = 1.
    """
    values = sorted(values)
    n, k = len(values), 0
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) <= (1 - CONFIDENCE) * 2**n:
        k += 1
    low, high = (values[k - 1], values[n - k]) if k else (None, None)
    return {"low": low, "median": statistics.median(values), "high": high}


def verdict(ratio: dict, wanted: float) -> str:
    """Whether a ratio is at least `wanted`, judged by its interval."""
    if ratio["low"] is not None and ratio["low"] >= wanted:
        return "met"
    if ratio["low"] is not None and ratio["high"] < wanted:
        return "not met"
    return "undecided"


def summary(loads: dict[tuple[str, int], list[Load]], counts: list[int]) -> dict:
    """Return {"results": {contender: {clients: {figure: quartiles}}}, "ratios": {"a / b": {clients:
    interval}}, "goals": [{"goal", "wanted", "low", "median", "high", "verdict"}]} of `loads`,
    {(contender, clients): [Load]}."""
    names = list(dict.fromkeys(name for name, _ in loads))
    results = {
        name: {
            str(many): {
                figure: quartiles(load.summary[figure] for load in loads[name, many])
                for figure in FIGURES
                if not (figure == "first_p50" and name in WHOLE)
            }
            for many in counts
        }
        for name in names
    }
    ratios = {
        f"{a} / {b}": {
            str(many): interval(
                one.summary["tokens_per_second"] / other.summary["tokens_per_second"]
                for one, other in zip(loads[a, many], loads[b, many], strict=True)
            )
            for many in counts
        }
        for a, b in RATIOS
        if a in names and b in names
    }
    goals = [
        {"goal": f"{pair} with {counts[which]} clients", "wanted": wanted, **ratio,
         "verdict": verdict(ratio, wanted)}
        for pair, which, wanted in GOALS
        if pair in ratios
        for ratio in (ratios[pair][str(counts[which])],)
    ]
    return {"results": results, "ratios": ratios, "goals": goals}


def report(found: dict) -> str:
    """The figures as a page of text."""
    lines = [
        f"{found['parameters']:,} parameters on {found['tp']} rank(s), {found['threads']} "
        f"thread(s) of torch for each contender; {found['machine']}",
        f"{found['prompt_tokens']} tokens + {found['max_tokens']} new ones, {found['rounds']} "
        "rounds; medians",
        "",
    ]
    counts = list(next(iter(found["results"].values())))
    many = [f"{n} client" + ("s" if n != "1" else "") for n in counts]
    for title, figure, scale, form in (
        ("tokens/s", "tokens_per_second", 1, ".0f"),
        ("first token, ms", "first_p50", 1e3, ".1f"),
    ):
        lines.append(f"{title:<18}" + "".join(f"{name:>14}" for name in many))
        for name, rows in found["results"].items():
            if figure in rows[counts[0]]:
                cells = (rows[n][figure]["median"] * scale for n in counts)
                lines.append(f"  {name:<16}" + "".join(f"{cell:>14{form}}" for cell in cells))
        lines.append("")
    lines.append(f"{'ratio of tokens/s':<34}" + "".join(f"{name:>20}" for name in many))
    for name, rows in found["ratios"].items():
        cells = map(text_of, rows.values())
        lines.append(f"  {name:<32}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append("")
    for goal in found["goals"]:
        more = ", take more" if goal["verdict"] == "undecided" else ""
        lines.append(
            f"{goal['goal']}: {text_of(goal)}, goal {goal['wanted']:g}: {goal['verdict']}, "
            f"{found['rounds']} round(s){more}"
        )
    different = {name: n for name, n in found["different_answers"].items() if n}
    lines.append(f"answers that differ from transformers': {different or 'none'}")
    lines += [f"absent: {name}: {reason}" for name, reason in found["absent"].items()]
    return "\n".join(lines)


def text_of(ratio: dict) -> str:
    """A ratio with its interval, if it has one."""
    if ratio["low"] is None:
        return f"{ratio['median']:.2f} (?)"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


if __name__ == "__main__":
    sys.exit(main())
