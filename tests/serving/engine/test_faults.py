"""Ranks that die or stop, killed leaders, damaged files: reported, and no process is left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from tests.serving.engines import ENDLESS, version_of
from tests.serving.processes import PATIENCE, alive, children, parent, until
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.engine import Engine
from utils.serving.engine.ranks import RankGroup
from utils.serving.engine.request import SamplingParams, Unavailable
from utils.serving.engine.version import LoadError, Version

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

LONG = SamplingParams(max_tokens=50_000)


@pytest.fixture(scope="module")
def version(tmp_path_factory):
    return version_of(ENDLESS, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture
def copy(version, tmp_path):
    """A version folder to damage."""
    return shutil.copytree(version, tmp_path / "1")


def all_end(streams, message):
    """Each stream ends with Unavailable and this message."""
    for stream in streams:
        with pytest.raises(Unavailable, match=message):
            while not stream.read(PATIENCE).finish:
                pass


def test_ranks_that_die_or_stop_are_named_and_replaced(version):
    with Engine(version, max_num_seqs=2, step_seconds=8.0) as engine:
        expected = engine.complete([5, 6], SamplingParams(max_tokens=8)).tokens
        for rank, sent, message in (
            (1, signal.SIGKILL, r"rank 1 of 2 \(process \d+\) was killed by SIGKILL: the request"),
            (0, signal.SIGKILL, r"rank 0 of 2 \(process \d+\) was killed by SIGKILL: the request"),
            (1, signal.SIGSTOP, r"rank 1 of 2 \(process \d+\) is stopped: no answer in 8 seconds"),
        ):
            before, streams = engine.pids, [engine.submit([n], LONG) for n in range(3)]
            for stream in streams[:2]:
                assert stream.read(PATIENCE).tokens  # mid-answer; the third waits
            failed = engine.stats()["requests_failed"]
            os.kill(before[rank], sent)
            all_end(streams, message)
            with pytest.raises(Unavailable, match=message.partition(":")[0]):
                engine.submit([1])
            assert not engine.ready
            until(lambda: engine.ready)
            assert engine.complete([5, 6], SamplingParams(max_tokens=8)).tokens == expected
            assert engine.stats()["requests_failed"] == failed + 3
            until(lambda pids=before: not any(map(alive, pids)))
        assert engine.stats()["restarts"] == 3
        last = engine.pids
    assert not any(map(alive, last)) and not engine.pids


def test_an_idle_rank_that_dies_is_noticed_at_once(copy):
    """As long as its ranks cannot restart, the engine says why."""
    with Engine(copy) as engine:
        expected = engine.complete([5, 6], SamplingParams(max_tokens=8)).tokens
        shard = copy / "rank-1-of-2.safetensors"
        whole = shard.read_bytes()
        shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        os.kill(engine.pids[0], signal.SIGKILL)
        until(lambda: not engine.ready)

        def reason():
            with pytest.raises(Unavailable) as refused:
                engine.submit([1])
            return str(refused.value)

        until(lambda: "failed to start" in reason() and str(shard) in reason())
        shard.write_bytes(whole)
        until(lambda: engine.ready)
        assert engine.complete([5, 6], SamplingParams(max_tokens=8)).tokens == expected


def test_without_restarts_an_engine_stays_down(version):
    """The parent of the ranks is killed, and the ranks with it."""
    with Engine(version, restarts=False) as engine:
        stream, pids = engine.submit([1], LONG), engine.pids
        assert parent(pids[0]) == parent(pids[1]) != os.getpid()
        os.kill(parent(pids[0]), signal.SIGKILL)
        all_end([stream], "rank 0 of 2")
        with pytest.raises(Unavailable, match=r"the engine is down: rank 0 .* SIGKILL$"):
            engine.submit([1])
        until(lambda: not any(map(alive, pids)))


SCRIPT = """
import sys, time
from utils.serving.engine.engine import Engine
from utils.serving.engine.request import SamplingParams
engine = Engine(sys.argv[1])
stream = engine.submit([1], SamplingParams(max_tokens=50_000))
stream.read()
print(*engine.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_end_when_their_leader_is_killed(version, stopped):
    leader = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(version)], stdout=subprocess.PIPE, text=True
    )
    try:
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
    finally:
        leader.kill()
        leader.wait(PATIENCE)
        leader.stdout.close()
    until(lambda: not any(map(alive, pids)))


def test_closing_ends_what_is_served_and_nothing_stays(version):
    before = children()
    engine = Engine(version, max_num_seqs=2)
    streams = [engine.submit([n], LONG) for n in range(4)]
    streams[0].read(PATIENCE)
    engine.close()
    all_end(streams, "the engine was closed")
    engine.close()
    with pytest.raises(Unavailable, match="the engine was closed"):
        engine.submit([1])
    assert not engine.stats()["ready"] and not engine.cancel(streams[0].id)
    assert children() == before


def test_closing_ends_ranks_that_are_starting(version):
    before = children()
    engine = Engine(version)
    os.kill(engine.pids[1], signal.SIGKILL)
    until(lambda: not engine.ready)
    engine.close()
    assert children() == before


def test_a_start_that_takes_too_long_is_given_up(version):
    before = children()
    with pytest.raises(Unavailable, match=r"ranks 0, 1 of 2 did not answer in 0\.01 seconds"):
        Engine(version, start_seconds=0.01)
    assert children() == before


def cut_short(folder):
    file = folder / "rank-1-of-2.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    return file, "bytes and should have"


def flipped(folder):
    file = folder / "rank-1-of-2.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 255
    file.write_bytes(data)
    return file, "SHA-256"


def other_shape(folder):
    """A shard that fits its manifest but not its configuration."""
    import hashlib

    (folder / "rank-0-of-2.safetensors").write_bytes(
        (folder / "rank-1-of-2.safetensors").read_bytes()
    )
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 2
    (folder / "config.json").write_text(json.dumps(config))
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("config.json", "rank-0-of-2.safetensors"):
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder / "rank-", "has shape"


def missing(name):
    def damage(folder):
        (folder / name).unlink()
        return folder / name, "No such file|is missing"

    return damage


def changed(name):
    def damage(folder):
        text = (folder / name).read_text()
        (folder / name).write_text(text[:-2] + " " + text[-1])
        return folder / name, "SHA-256"

    return damage


def manifest_with(**values):
    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | values))
        return folder / "manifest.json", "."

    return damage


def not_json(folder):
    (folder / "manifest.json").write_text('{"format": 1,')
    return folder / "manifest.json", "cannot be read as JSON"


@pytest.mark.parametrize(
    "damage",
    [cut_short, flipped, other_shape, missing("manifest.json"), missing("config.json"),
     missing("rank-0-of-2.safetensors"), missing("tokenizer.json"), changed("config.json"),
     changed("tokenizer.json"), not_json, manifest_with(format=3), manifest_with(tp=3),
     manifest_with(files={}), manifest_with(tp="two")],
)
def test_damaged_versions_are_refused_by_file_name(copy, damage):
    before, threads = children(), threading.active_count()
    file, why = damage(copy)
    with pytest.raises(LoadError, match=why) as refused:
        Engine(copy)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)
    assert children() == before
    until(lambda: threading.active_count() <= threads)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_rank_that_failed_first_is_believed(copy, rank):
    """The other rank then failed as well, and both reports have arrived."""
    shard = copy / f"rank-{rank}-of-2.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    before = children()
    group = RankGroup(Version.read(copy), EngineConfig())
    try:
        until(lambda: children() == before)
        with pytest.raises(LoadError, match="SHA-256") as refused:
            group.ready()
        assert str(shard) in str(refused.value)
    finally:
        group.close()
