"""Tokens per second and time to first token of the served model, beside what one would do without.

    python -m utils.serving.bench --repo triton_model_repo --clients 1,4,16
    python -m utils.serving.bench --repo REPO --clients 1,4,16 --json > bench.json
    python -m utils.serving.bench --repo REPO --quick        # one short round, to see that it runs

Contenders, all with the same model, prompts and new tokens (greedy), and with as many threads of
torch as the repository's config.pbtxt gives to the ranks of gpt_engine together:

    engine          the engine in this process, whole answers
    engine stream   the same, token by token
    triton          a tritonserver of its own: HTTP generate, whole answers
    triton stream   HTTP generate_stream
    sequential      transformers.generate, one request after another
    static          transformers.generate, a batch of as many requests as there are clients

Each number of clients is a closed loop: a client sends its next request when it has its answer. The
contenders take turns inside each round, in another order each time, while the others wait idle; a
ratio is taken inside a round, so what else the machine does hits all alike. Given are the median
and the quartiles over the rounds. No request ends early: prompts are chosen whose greedy answer has
all its tokens. Answers are compared: those that differ from transformers' are counted.
"""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from utils.cli import check_options, option, parse_flags
from utils.measure.machine import cores, processor_name
from utils.serving.bench.contenders import LIMIT, World, newest
from utils.serving.engine.version import Version
from utils.serving.load import Load

WHOLE = ("engine", "triton")  # whose first token comes with the last one
RATIOS = (
    ("triton", "engine"),
    ("triton stream", "engine stream"),
    ("engine", "sequential"),
    ("engine", "static"),
    ("triton", "sequential"),
    ("triton", "static"),
)
FIGURES = ("tokens_per_second", "first_p50", "latency_p50", "latency_p95")


@dataclass(frozen=True)
class Settings:
    """What is measured. Raises ValueError for what makes no sense."""

    repo: str = option("triton_model_repo", "model repository, filled by the export")
    clients: str = option("1,4,16", "numbers of clients, with commas between")
    rounds: int = option(5, "how often the contenders take turns")
    requests: int = option(2, "that each client sends in a load; four at least in all")
    seconds: float | None = option(None, "length of each load; in place of --requests")
    prompt_tokens: int = option(32, "of each prompt")
    max_tokens: int = option(64, "new tokens of each request")
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
        """The numbers of clients."""
        words = self.clients.split(",")
        if not all(word.strip().isdigit() and 1 <= int(word) <= 64 for word in words):
            raise ValueError(f"--clients {self.clients!r}: give numbers from 1 to 64, like 1,4,16")
        return sorted({int(word) for word in words})


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns its exit status."""
    try:
        settings = Settings(**parse_flags(Settings, arguments, "utils.serving.bench"))
        found = bench(settings, say=lambda text: print(text, file=sys.stderr, flush=True))
    except (ValueError, RuntimeError) as problem:
        print(f"utils.serving.bench: {problem}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1) if settings.json else report(found))
    return 0


def bench(settings: Settings, say: Callable[[str], None] = lambda text: None) -> dict:
    """Runs all contenders; returns what --json prints. `say` gets a line now and then."""
    version = Version.read(newest(settings.repo))
    rounds, new = (1, 8) if settings.quick else (settings.rounds, settings.max_tokens)
    with ExitStack() as stack:
        say("starting the engine, transformers and tritonserver")
        world = World(stack, settings.repo, version, settings.prompt_tokens, new)
        world.choose_prompts(max(settings.counts))
        world.warm_up()
        loads = {(name, many): [] for many in settings.counts for name in world.present}
        for turn in range(rounds):
            for many in settings.counts:
                start = turn % len(world.present)
                for name in world.present[start:] + world.present[:start]:
                    load = world.load(name, many, settings.requests, settings.seconds)
                    loads[name, many].append(load)
                    say(f"round {turn + 1} of {rounds}: {name}: {load}")
    facts = {
        "machine": f"{cores():g} cores, {processor_name()}",
        "tp": version.tp,
        "threads": world.threads,
        "parameters": version.manifest["parameters"],
        "prompt_tokens": settings.prompt_tokens,
        "max_tokens": new,
        "rounds": rounds,
        "absent": world.absent,
        "different_answers": world.different,
    }
    return facts | summary(loads, settings.counts)


# ---- the figures


def quartiles(values: Iterable[float]) -> dict:
    """The quartiles of some values: {"q1", "median", "q3"}."""
    q1, median, q3 = np.quantile(list(values), (0.25, 0.5, 0.75))
    return {"q1": float(q1), "median": float(median), "q3": float(q3)}


def summary(loads: dict[tuple[str, int], list[Load]], counts: list[int]) -> dict:
    """{"results": {contender: {clients: {figure: quartiles}}}, "ratios": {"a / b": {clients:
    quartiles}}, "goals": [{"goal", "wanted", "found", "met"}]} of {(contender, clients): loads}."""
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
            str(many): quartiles(
                one.summary["tokens_per_second"] / other.summary["tokens_per_second"]
                for one, other in zip(loads[a, many], loads[b, many], strict=True)
            )
            for many in counts
        }
        for a, b in RATIOS
        if a in names and b in names
    }
    least, most = str(counts[0]), str(counts[-1])
    goals = []
    for pair, many, wanted in (
        ("triton / engine", most, 0.9),
        ("triton / sequential", most, 5.0),
        ("engine / sequential", least, 1.0),
    ):
        if pair in ratios:
            ratio = ratios[pair][many]["median"]
            goals.append({"goal": f"{pair} with {many} clients", "wanted": wanted, "found": ratio,
                          "met": ratio >= wanted})  # fmt: skip
    return {"results": results, "ratios": ratios, "goals": goals}


def report(found: dict) -> str:
    """The figures as a page of text."""
    lines = [
        f"{found['parameters']:,} parameters on {found['tp']} rank(s), {found['threads']} "
        f"thread(s) of torch; {found['machine']}",
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
        cells = (f"{r['median']:.2f} ({r['q1']:.2f}–{r['q3']:.2f})" for r in rows.values())
        lines.append(f"  {name:<32}" + "".join(f"{cell:>20}" for cell in cells))
    lines.append("")
    for goal in found["goals"]:
        mark = "met" if goal["met"] else "missed"
        lines.append(f"{goal['goal']}: {goal['found']:.2f}, goal {goal['wanted']:g}: {mark}")
    different = {name: n for name, n in found["different_answers"].items() if n}
    lines.append(f"answers that differ from transformers': {different or 'none'}")
    lines += [f"absent: {name}: {reason}" for name, reason in found["absent"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
