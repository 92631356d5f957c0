"""The serving benchmark on a real server, and its arithmetic."""

import json
import math
import random
import re
import statistics
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from tests.bench.serving.__main__ import (
    Settings,
    interval,
    main,
    quartiles,
    report,
    summary,
    verdict,
)
from tests.bench.serving.contenders import CONTENDERS, SERVED, World, newest
from tests.serving.world import configure, kintsugi, ranks, repo_of
from utils.serving.engine.version import Version
from utils.serving.load import Load
from utils.serving.server import server_available

# transformers on two threads of a shared machine
pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]
STREAMED = {*(n for n in CONTENDERS if n.endswith("stream")), "sequential", "static"}


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    return repo_of("tiny", 1, tmp_path_factory.mktemp("bench") / "repo")


def test_bench_runs_all_contenders(repo, capsys):
    status = main(["--repo", str(repo), "--clients", "1,2", "--quick", "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    found = json.loads(printed.out)
    reason = server_available()
    absent = {} if reason is None else dict.fromkeys(SERVED, reason)
    if find_spec("ctranslate2") is None:
        absent["ctranslate2"] = "CTranslate2 is not installed: pip install ctranslate2"
    here = [name for name in CONTENDERS if name not in absent]
    assert list(found["results"]) == here
    assert found["absent"] == absent
    assert found["different_answers"] == dict.fromkeys(here, 0)
    assert (found["tp"], found["max_tokens"], found["rounds"]) == (1, 8, 1)
    for name, rows in found["results"].items():
        assert list(rows) == ["1", "2"]
        for figures in rows.values():
            assert figures["tokens_per_second"]["median"] > 0
            assert ("first_p50" in figures) == (name in STREAMED)
    speed = {name: rows["2"]["tokens_per_second"]["median"] for name, rows in
             found["results"].items()}
    for pair, rows in found["ratios"].items():
        a, b = pair.split(" / ")
        assert rows["2"]["median"] == pytest.approx(speed[a] / speed[b])
    assert {goal["verdict"] for goal in found["goals"]} == {"undecided"}  # after one round
    lines = printed.err.splitlines()  # without a terminal: lines, no bar
    assert re.match(
        r"\d+ thread\(s\) of torch for each contender; 1 round.*: about \d+ \w+$", lines[1]
    )
    assert re.match(r"round 1 of 1: \d+ \w+ so far$", lines[2]) and len(lines) == 3
    assert "\r" not in printed.err
    text = report(found)
    assert "undecided, 1 round(s), take more" in text
    assert re.search(r"engine +\d+ +\d+\n", text)
    assert "answers that differ from transformers': none" in text


def load_of(tokens, seconds, many=1):
    row = {"start": 0.0, "first": seconds / 2, "end": seconds, "tokens": tokens, "error": None}
    glances = pd.DataFrame({"seconds": [], "count": []})
    return Load(pd.DataFrame([row]), glances, seconds, many)


def test_ratios_are_taken_inside_a_round():
    """One of five rounds is ten times slower for all: the ratio is unaffected."""
    loads = {}
    for many in (1, 16):
        for name, tokens in (("engine", 100), ("triton", 95), ("sequential", 25)):
            loads[name, many] = [load_of(tokens, seconds) for seconds in (1.0, 10.0, 1.0, 1.0, 1.0)]
    found = summary(loads, [1, 16])
    assert found["ratios"]["triton / engine"]["16"] == pytest.approx(
        {"low": 0.95, "median": 0.95, "high": 0.95}
    )
    assert found["results"]["engine"]["1"]["tokens_per_second"] == {
        "q1": 100, "median": 100, "q3": 100,
    }
    assert [goal["verdict"] for goal in found["goals"]] == ["met", "not met", "met"]
    assert [goal["wanted"] for goal in found["goals"]] == [0.9, 5.0, 1.0]
    assert found["goals"][1]["median"] == pytest.approx(95 / 25)
    assert "static" not in found["results"]


def test_an_interval_holds_the_median_as_often_as_it_says():
    """Rounds drawn from two distributions whose median is 1."""
    draw = random.Random(7)
    for one in (lambda: draw.lognormvariate(0, 0.3), lambda: draw.expovariate(math.log(2))):
        for rounds in (5, 8, 13):
            found = [interval(one() for _ in range(rounds)) for _ in range(2000)]
            held = statistics.mean(f["low"] <= 1 <= f["high"] for f in found)
            assert 0.88 < held < 0.98, (rounds, held)
            said = [verdict(f, 1.0) for f in found]
            assert said.count("met") < 120 and said.count("not met") < 120  # expected: <= 100


def test_an_interval_narrows_with_more_rounds_and_needs_five():
    assert interval(range(4)) == {"low": None, "median": 1.5, "high": None}
    assert interval([4, 0, 3, 1, 2]) == {"low": 0, "median": 2, "high": 4}
    assert interval(range(7)) == {"low": 0, "median": 3, "high": 6}
    assert interval(range(8)) == {"low": 1, "median": 3.5, "high": 6}  # extremes may be outliers
    assert interval(range(100)) == {"low": 41, "median": 49.5, "high": 58}


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        ([1.0, 1.1, 1.2, 1.3, 1.4], "met"),
        ([0.99, 1.1, 1.2, 1.3, 1.4], "undecided"),  # the median alone would suffice
        ([0.6, 0.7, 0.8, 0.9, 0.99], "not met"),
        ([0.6, 0.7, 0.8, 0.9, 1.0], "undecided"),
        ([2.0, 2.1, 2.2, 2.3], "undecided"),  # four coins land on one side too often
        ([0.5, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "met"),
    ],
)
def test_a_goal_is_met_by_all_of_the_interval(rounds, said):
    assert verdict(interval(rounds), 1.0) == said


def test_prompts_come_in_batches_and_all_contenders_have_the_same_threads(repo):
    """Counted in the processes of the engine's and Triton's ranks; torch reports its own."""
    configure(repo, threads=3)
    try:
        with ExitStack() as stack:
            world = World(stack, repo, Version.read(newest(repo)), prompt_tokens=8, new=4)
            drawn = []
            for seed in (0, 0, 1):
                world.choose_prompts(size=3, batches=2, seed=seed)
                for batch in (0, 1):
                    world.take_batch(batch)
                    drawn.append([prompt.ids for prompt in world.prompts])
            assert drawn[:2] == drawn[2:4] and drawn[4:] != drawn[:2]
            assert len({tuple(ids) for ids in drawn[0] + drawn[1]}) == 6
            for name in world.present:
                assert len(world.load(name, 2, 4, None).requests) == 4
            assert set(world.different.values()) == {0}
            groups, found = [world.engine.pids], [world.engine.stats()["prefix_cache_hits_total"]]
            if "triton" in world.present:
                groups.append(ranks(world.server))
                found.append(kintsugi(world.server)["prefix_cache_hits_total"])
            assert set(found) == {0}  # no contender reuses a repeated prompt
            assert world.threads == world.peer.threads == 3
            tasks = [len(list(Path(f"/proc/{pid}/task").iterdir())) for (pid,) in groups]
            assert len(set(tasks)) == 1 and tasks[0] >= 3
    finally:
        configure(repo, threads=0)


def test_quartiles():
    assert quartiles(range(1, 6)) == {"q1": 2, "median": 3, "q3": 4}
    assert quartiles(iter([7.0])) == {"q1": 7, "median": 7, "q3": 7}


def test_the_newest_filled_version_counts(tmp_path):
    with pytest.raises(ValueError, match=r"has no weights: python -m utils\.serving\.export"):
        newest(tmp_path)
    for name in ("2", "10", "11", "draft"):
        (tmp_path / "gpt_engine" / name).mkdir(parents=True)
    for name in ("2", "10", "draft"):
        (tmp_path / "gpt_engine" / name / "manifest.json").write_text("{}")
    assert newest(tmp_path).name == "10"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clients": "1,x"}, "--clients '1,x': give numbers from 1 to 64"),
        ({"clients": "0"}, "--clients '0'"),
        ({"rounds": 0}, "--rounds 0 is not above 0"),
        ({"max_tokens": -1}, "--max-tokens -1"),
        ({"seconds": 0.0}, "--seconds 0.0"),
        ({"seconds": 1e9}, "at most 150"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Settings(**changes)


def test_the_command_line_says_what_is_wrong(tmp_path, capsys):
    assert main(["--repo", str(tmp_path)]) == 1
    assert "has no weights" in capsys.readouterr().err
    assert Settings(clients="16, 4,1,4").counts == [1, 4, 16]
