"""Ranks, nodes and agents of a run on two network nodes die; the run continues and loses nothing.

Each curve matches that of an undisturbed run in fp64, step by step and up to rounding, however many
ranks computed the step. Everything is real: torchrun's agents, network namespaces, SIGKILL and
SIGSTOP; torchrun's own log lines tell what happened.
"""

import json
import os
import re
import signal
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.patience import patience
from utils.ranks.elastic import ElasticRun, last_step
from utils.ranks.launch import LaunchError
from utils.ranks.nodes import Nodes
from utils.training.config import TrainConfig
from utils.training.train import train

REASON = Nodes.available()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.thorough]

EVERY = 5  # steps between two checkpoints
MODEL = {"layers": 2, "hidden": 32, "heads": 2, "batch": 16, "seq": 64, "sample": 0}
# no cooldown: a step does not depend on when the run ends
CONFIG = {**MODEL, "optimizer": "adamw", "precision": "fp64", "warmup": 0.0, "cooldown": 0.0}
LAUNCH = {"restarts": 9, "waits": (2, patience(5))}


@pytest.fixture(scope="module")
def nodes():
    with Nodes(2) as nodes:
        yield nodes


def start(nodes, folder, steps):
    """Start a run; return it and the path of its metrics."""
    metrics, limit = folder / "metrics.jsonl", patience(4)
    more = {"out": folder / "run", "metrics": metrics, "save_every": EVERY, "time_limit": limit}
    options = {**CONFIG, **more, "steps": steps, "held_out_every": 10**9, "auto_resume": True}
    return ElasticRun(nodes, "utils.train", folder, args=options, **LAUNCH), metrics


def go_on(run, metrics, met, worlds, steps=3):
    """Wait until, after another rendezvous, `worlds` ranks have done `steps` more steps."""
    before = last_step(metrics)

    def is_on():
        now = meetings(run)
        return len(now) > met and now[-1] == worlds and last_step(metrics) >= before + steps

    run.wait_until(is_on, patience(200))


def meetings(run, node=0):
    """The world size after each rendezvous, from the log of the node's agent."""
    found = (re.search(r"^Rendezvous complete .* global_world_sizes=(\d+)$", line)
             for line in run.story(node))
    return [int(match[1]) for match in found if match]


def together(run, metrics, steps):
    run.wait_until(lambda: last_step(metrics) >= steps and len(run.ranks()) == 2, patience(200))


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def assert_undisturbed(rows):
    """Assert that every step is there once and matches an undisturbed single-rank run."""
    _, plain = train(TrainConfig(**CONFIG, steps=len(rows)))
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for ours, other in zip(rows, plain, strict=True):
        for key in ("loss", "grad_norm", "lr", "tokens"):
            assert ours[key] == pytest.approx(other[key], rel=1e-9), f"{key}, step {ours['step']}"


def rows_of(lines):
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def lost(before, after):
    """The number of steps in the metrics `before` a fault that were computed again."""
    kept = 0
    for one, other in zip(before, after):
        if one != other:
            break
        kept += 1
    return len(rows_of(before)) - kept


@pytest.fixture(scope="module")
def storm(nodes, tmp_path_factory):
    """One run: kill a rank, then a node, revive it and drain it; keep the metrics before each."""
    run, metrics = start(nodes, tmp_path_factory.mktemp("storm"), steps=10**6)

    def lines():
        return metrics.read_bytes().splitlines(keepends=True)

    with run:
        together(run, metrics, EVERY + 2)
        met = len(meetings(run))
        os.kill(run.ranks()[1], signal.SIGKILL)
        rank_killed = lines()
        go_on(run, metrics, met, 2)
        together(run, metrics, 0)
        met = len(meetings(run))
        nodes.kill(1)
        node_killed = lines()
        assert run.statuses() == {0: None, 1: -signal.SIGKILL}
        go_on(run, metrics, met, 1)
        alone = set(run.ranks())
        met = len(meetings(run))
        nodes.revive(1)
        run.start(1)
        came_back = lines()
        go_on(run, metrics, met, 2)
        together(run, metrics, 0)
        met = len(meetings(run))
        run.stop(1)
        drained = lines()
        go_on(run, metrics, met, 1)
        run.wait_until(lambda: run.statuses()[1] is not None, patience(60))
        status = run.statuses()[1]
        stories = run.story(0), run.story(1)
        met = meetings(run)
    return SimpleNamespace(**{k: v for k, v in locals().items() if k != "lines"}, after=lines())


def test_a_killed_rank_costs_no_more_than_the_steps_since_the_checkpoint(storm):
    assert 0 <= lost(storm.rank_killed, storm.after) <= EVERY
    assert "failed (exitcode: -9) local_rank: 0" in storm.stories[1]
    assert any("will restart worker group" in line for line in storm.stories[1])


def test_without_a_node_the_other_goes_on_alone(storm):
    """It gets no message about its neighbour's death and learns of it from the time limit."""
    assert 0 <= lost(storm.node_killed, storm.after) <= EVERY
    assert storm.alone == {0}
    sentence = r"utils\.train: waited \d+ s in vain: rank 1 gives no sign of life"
    assert any(re.fullmatch(sentence, line) for line in storm.stories[0]), storm.stories[0]


def test_a_node_that_is_back_takes_part_and_costs_no_step(storm):
    """The ranks are asked to stop, so they save."""
    assert lost(storm.came_back, storm.after) == 0
    assert "Detected 1 new nodes from group_rank=0; will restart worker group" in storm.stories[0]
    assert "Sending process closing signal SIGTERM" in storm.stories[0]


def test_a_node_that_is_asked_to_end_costs_no_step_and_does_not_end_the_run(storm):
    assert lost(storm.drained, storm.after) == 0
    assert storm.status == 1  # tells docs/cluster/slurm_requeue.sbatch that the run is not over
    sentence = r"utils\.train: stopped and saved after step \d+: the same command resumes"
    assert any(re.fullmatch(sentence, line) for line in storm.stories[0]), storm.stories[0]
    assert not any("successfully finished" in line for line in storm.stories[0])


def test_after_all_faults_the_curve_is_that_of_an_undisturbed_run(storm):
    worlds = [size for size, before in zip(storm.met, [0, *storm.met]) if size != before]
    assert worlds[-4:] == [2, 1, 2, 1]
    assert_undisturbed(rows_of(storm.after))


def test_a_rank_that_hangs_and_then_the_death_of_agent_0(nodes, tmp_path):
    """torchrun kills a rank that hangs. No agent replaces agent 0: the others exit, and the same
    command starts all of them again."""
    steps = 20 * EVERY  # so that it still runs at the second fault
    run, metrics = start(nodes, tmp_path, steps)
    with run:
        together(run, metrics, EVERY + 2)
        still = psutil.Process(run.ranks()[1])
        still.suspend()
        before = metrics.read_bytes().splitlines(keepends=True)
        run.wait_until(lambda: len(meetings(run)) > 1, patience(200))
        assert has_ended(still)
        ended = [line for line in run.story(1) if "forcefully exiting" in line]
        assert ended == ["Unable to shutdown process via 15, forcefully exiting via 9"]
        assert any("rank 1 gives no sign of life" in line for line in run.story(0))

        together(run, metrics, 0)
        ranks = [psutil.Process(pid) for pid in run.ranks().values()]
        psutil.Process(run.ranks()[0]).parent().kill()
        statuses = run.wait(patience(120))
        assert statuses == {0: 128 + signal.SIGKILL, 1: 1}
        story = run.story(1)
        assert "RendezvousConnectionError: The connection to the C10d store has failed" in story
        until = time.monotonic() + patience(30)
        while not all(map(has_ended, ranks)) and time.monotonic() < until:
            time.sleep(0.02)
        assert all(map(has_ended, ranks)) and run.ranks() == {}

        for node in range(2):
            run.start(node)
        assert run.wait(patience(200)) == {0: 0, 1: 0}
        assert run.story(0)[-1] == "worker group successfully finished"
    after = metrics.read_bytes().splitlines(keepends=True)
    assert 0 <= lost(before, after) <= EVERY
    assert len(rows_of(after)) == steps
    assert_undisturbed(rows_of(after))


def test_a_run_that_ends_too_early_is_quoted(nodes, tmp_path):
    script = tmp_path / "script.py"
    script.write_text('import sys; sys.exit("an unhappy rank")\n')
    with ElasticRun(nodes, script, tmp_path / "logs", restarts=1, waits=LAUNCH["waits"]) as run:
        with pytest.raises(ValueError, match="the agent of node1 is still running"):
            run.start(1)
        with pytest.raises(LaunchError, match="It did not happen within 0 s"):
            run.wait_until(lambda: False, 0)
        with pytest.raises(LaunchError, match=r"The run ended before that:\nnode0: ") as error:
            run.wait_until(lambda: False, patience(100))
        assert "\nnode1: " in str(error.value) and "exitcode" in str(error.value)
        assert run.wait() == {0: 1, 1: 1}
    # one of them may be too late for the second attempt
    stories = run.story(0) + run.story(1)
    assert any("will restart worker group" in line for line in stories)
    assert any("an unhappy rank" in run.log(node).read_text() for node in range(2))
