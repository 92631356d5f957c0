"""Reports on a trace of real ranks, one of which is late, and on synthetic traces.

Lesson 11 shows that every planted cause of a real run is found.
"""

import gzip
import itertools
import json
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from utils.measure import profile, traces
from utils.measure import report as command
from utils.measure.findings import report
from utils.measure.traces import KINDS, TraceError
from utils.paths import ROOT
from utils.ranks import Ranks


def kinds(made):
    return [finding.kind for finding in made.findings]


def finding(made, kind):
    (found,) = (one for one in made.findings if one.kind == kind)
    return found


def comes_late(folder, seconds):
    """Runs on a rank: five steps to which rank 1 is late, the last three under the profiler."""
    with profile.tracing(folder) as profiler:
        for _ in range(5):
            dist.barrier()  # so that load delays a rank by a step at most
            if dist.get_rank() == 1:
                time.sleep(seconds)
            dist.all_reduce(torch.ones(1000))
            profiler.step()


def test_a_delay_of_d_ms_is_found_as_d(tmp_path):
    with Ranks(2, device="cpu", timeout=patience(60)) as two:
        two.run(comes_late, tmp_path, 0.4)
    made = report(tmp_path)
    assert [trace.marked for trace in made.traces] == [True, True]
    assert len(made.steps) == 6
    assert 200 < made.late[1] < 800
    assert made.late[0] < made.late[1] / 2
    straggler = finding(made, "straggler")
    assert straggler.rank == 1 and straggler.ms == made.late[1]
    assert "time in no operator" in straggler.text
    assert made.ranks[1].host >= 399  # a sleep is never shorter
    assert made.ranks[0].communication > 200
    assert made.table().groupby("rank")["host"].mean()[1] == pytest.approx(made.ranks[1].host)


# ── synthetic traces ──────────────────────────────────────────────────────────────────────────


def op(name, start, end, tid=1, cat="cpu_op", **args):
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid,
        "ts": 1e3 * start, "dur": 1e3 * (end - start), "args": args,
    }


def written(path, events, **top):
    path.write_text(json.dumps({"schemaVersion": 1, **top, "traceEvents": events}))
    return path


def step_marks(*edges):
    pairs = itertools.pairwise(edges)
    return [op(f"ProfilerStep#{n}", a, b, cat="user_annotation") for n, (a, b) in enumerate(pairs)]


def ms(one):
    return {kind: round(getattr(one, kind), 6) for kind in KINDS if getattr(one, kind)}


def test_on_a_cpu_the_thread_of_the_steps_counts(tmp_path):
    events = [
        *step_marks(10, 30, 50),
        op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 13),
        op("aten::stack", 11, 12),  # inside the loader
        op("aten::linear", 14, 18),
        op("aten::addmm", 15, 17),
        op("gloo:all_reduce", 16, 22, tid=2, cat="user_annotation"),  # 16 to 18 is covered
        op("autograd::engine::evaluate_function: MulBackward0", 21, 24),  # 21 to 22: may be a wait
        op("aten::mul", 40, 41, tid=9),  # on another thread
        op("c10d::recv_", 31, 32),
        op("gloo:recv", 32, 38, cat="user_annotation"),
        op("aten::relu", 34, 35),  # nothing waited before it
        op("aten::relu", 49, 60),  # partly in the step
    ]
    (trace,) = traces.read(written(tmp_path / "t.json", events))
    first, second = traces.splits(trace)
    assert ms(first) == {"data": 3, "compute": 4 + 2, "communication": 4, "host": 7}
    assert ms(second) == {"compute": 1 + 1, "bubble": 1 + 3, "host": 14}
    assert (first.total, first.busy, second.total) == pytest.approx((20, 16, 20))
    assert ms(traces.split(trace))["host"] == 10.5
    assert trace.kernels["aten::linear"] == (1, pytest.approx(2))
    assert traces.spans(trace, 1, zero=10)[-1].end == pytest.approx(50)
    assert [(s.kind, s.start, s.end) for s in traces.spans(trace)][:2] == [
        ("compute", pytest.approx(1), pytest.approx(2)),
        ("compute", pytest.approx(4), pytest.approx(8)),
    ]


def test_a_send_that_is_waited_for_later_costs_nothing(tmp_path):
    events = [
        *step_marks(0, 30),
        op("c10d::send", 0, 1),
        op("gloo:send", 1, 29, cat="user_annotation"),  # isend, with wait() before the step ends
        op("Sleep", 2, 10),
        op("gloo:recv", 12, 20, cat="user_annotation"),
        op("aten::mm", 22, 26),
    ]
    (one,) = report(written(tmp_path / "t.json", events)).ranks
    assert ms(one) == {"compute": 8 + 4, "bubble": 1 + 8 + 3, "host": 6}


def nccl(name, start, end, **args):
    kernel = f"ncclDevKernel_{name}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return op(kernel, start, end, tid=20, cat="kernel", stream=20, **args)


def test_on_a_gpu_kernels_count(tmp_path):
    sizes = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "BFloat16"}
    sizes |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    events = [
        *step_marks(0, 40),
        op("ProfilerStep#0", 3, 39, tid=7, cat="gpu_user_annotation"),
        op("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 4),
        op("aten::linear", 4, 5),
        op("ampere_sgemm_128x64_nn", 3, 12, tid=7, cat="kernel"),
        op("Memcpy HtoD (Pinned -> Device)", 12, 13, tid=7, cat="gpu_memcpy"),
        nccl("AllReduce_Sum_f32", 10, 20, **sizes),
        nccl("SendRecv", 22, 25, **{"Collective name": "recv"}),
        op("aten::item", 20, 32),
        op("aten::_local_scalar_dense", 20, 32),
    ]
    file = written(
        tmp_path / "t.json", events, distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2}
    )
    made = report(file)
    assert ms(made.ranks[0]) == {
        "data": 3, "compute": 10, "communication": 7, "bubble": 3, "host": 17
    }
    assert made.collectives()["all_reduce"] == {"calls": 1, "bytes": 2000, "ms": 10}
    assert made.collectives()["recv"]["bytes"] is None
    found = {one.kind: one.text for one in made.findings}
    assert found["wait"].startswith("`.item()` waits 12 ms per step on rank 0, in 1 calls")
    assert "the GPU of rank 0 is idle for 17 ms" in found["host"]
    assert found["missing"].startswith("1 of 2 ranks has a trace here")


def test_how_busy_a_gpu_is_moment_by_moment(tmp_path):
    events = [
        *step_marks(0, 40, 80),
        op("long", 30, 50, tid=7, cat="kernel"),  # from the step before
        op("inside", 42, 44, tid=8, cat="kernel"),  # counts once
        op("late", 65, 70, tid=8, cat="kernel"),
        op("next", 75, 90, tid=7, cat="kernel"),
        nccl("AllReduce_Sum_f32", 55, 60, **{"Collective name": "allreduce"}),
    ]
    (trace,) = traces.read(written(tmp_path / "t.json", events))
    shares = traces.busy(trace, 1, bins=4)
    assert shares["compute"].tolist() == pytest.approx([1, 0, 0.5, 0.5])
    assert shares["communication"].tolist() == pytest.approx([0, 0.5, 0, 0])
    assert traces.busy(trace, 0, bins=2)["communication"].tolist() == [0, 0]


def test_what_is_kept_of_published_traces_fits_together():
    kept = json.loads((ROOT / "docs/reference/published_traces.json").read_text())["traces"]
    for one in kept.values():
        step = sum(one["split"].values())
        shares = {kind: list(map(int, row.split())) for kind, row in one["busy"].items()}
        compute = sum(shares["compute"]) / 100 / 200 * step
        assert compute == pytest.approx(one["split"]["compute"], rel=0.01)
        assert sum(shares["communication"]) / 2e4 * step >= one["split"]["communication"] * 0.99


def test_an_older_trace_calls_an_all_to_all_sendrecv(tmp_path):
    events = [
        *step_marks(0, 10),
        op("nccl:all_to_all", 0, 1, cat="user_annotation"),
        op("sgemm", 1, 2, cat="kernel"),
        nccl("SendRecv", 2, 5),
    ]
    (one,) = report(written(tmp_path / "t.json", events)).ranks
    assert ms(one) == {"compute": 1, "communication": 3, "host": 6}


def rank_file(folder, rank, start, *, host="a", shift=0.0, base=0, world_size=3):
    """A step with two overlapping all-reduces, which the rank enters at `start` and 1 ms later;
    they end at 30 and 31, when all ranks have arrived."""
    events = [
        *step_marks(shift, 40 + shift),
        op("aten::mm", shift, start + shift),
        op("gloo:all_reduce", start + shift, 30 + shift, tid=2, cat="user_annotation"),
        op("gloo:all_reduce", start + 1 + shift, 31 + shift, tid=3, cat="user_annotation"),
    ]
    written(
        folder / f"{rank}.json",
        events,
        host_name=host,
        baseTimeNanoseconds=base,
        distributedInfo={"rank": rank, "world_size": world_size},
    )


@pytest.mark.parametrize("clocks", ["one", "base", "hosts"])
def test_waits_of_overlapping_collectives_count_once(tmp_path, clocks):
    for rank, start in enumerate((10, 29, 14)):
        other = clocks == "base" and rank == 1  # the same time, relative to another base
        rank_file(
            tmp_path,
            rank,
            start,
            host=f"node{rank}" if clocks == "hosts" else "a",
            shift=500.0 * rank if clocks == "hosts" else -100.0 * other,
            base=100_000_000 * other,
        )
    made = report(tmp_path)
    # rank 0 waits from 10 and rank 2 from 14, on average from 12 to 30 for both collectives
    assert made.late == pytest.approx({0: 0, 1: 18, 2: 0})
    found = finding(made, "straggler")
    assert found.rank == 1 and "its compute takes 17 ms more than theirs" in found.text


def test_64_ranks(tmp_path):
    for rank in range(64):
        rank_file(tmp_path, rank, 29 if rank == 41 else 10, world_size=64)
    made = report(tmp_path)
    assert len(made.ranks) == 64 and finding(made, "straggler").rank == 41
    lines = str(made).splitlines()
    assert lines[0].startswith("64 ranks, 1 step")
    assert any(line.startswith("rank 41 ") for line in lines)
    assert "… and 50 ranks between these" in lines


@pytest.mark.parametrize(("works", "kind"), [((20, 20), "bubble"), ((20, 12), "stages")])
def test_equal_stages_need_more_micro_batches(tmp_path, works, kind):
    for rank, work in enumerate(works):
        recv = op("gloo:recv", work, 30, cat="user_annotation")
        events = [*step_marks(0, 30), op("aten::mm", 0, work), recv]
        written(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank})
    made = report(tmp_path)
    assert [one.bubble for one in made.ranks] == pytest.approx([30 - work for work in works])
    assert kinds(made) == [kind]


def test_without_marks_a_step_ends_with_the_optimizers(tmp_path):
    events = [op("aten::mm", 5, 20), op("aten::mm", 25, 30)]
    (trace,) = traces.read(written(tmp_path / "a.json", events))
    assert [(s.start, s.end) for s in trace.steps] == [(5, 30)] and not trace.marked
    ends = [op("Optimizer.step#AdamW.step", e - 1, e, cat="user_annotation") for e in (15, 32)]
    (trace,) = traces.read(written(tmp_path / "a.json", events + ends))
    assert [(s.start, s.end) for s in trace.steps] == [(5, 15), (15, 32)]


# ── files ─────────────────────────────────────────────────────────────────────────────────────


def test_ranks_come_from_the_trace_or_the_name_or_the_order(tmp_path):
    events = [op("aten::mm", 0, 1)]
    written(tmp_path / "x-rank7.json", events)
    written(tmp_path / "y.json", events)
    written(tmp_path / "z.json", events, distributedInfo={"rank": 3})
    with gzip.open(tmp_path / "rank-1.json.gz", "wt") as file:
        json.dump(events, file)  # Chrome's other format
    (tmp_path / "config.json").write_text('{"steps": 3}')  # not a trace: ignored in a folder
    assert [trace.rank for trace in traces.read(tmp_path)] == [0, 1, 3, 7]


def test_a_large_file(tmp_path):
    events = [op("aten::mm", n, n + 0.5, note="x" * 300) for n in range(9000)]
    (trace,) = traces.read(written(tmp_path / "t.json", events))
    assert trace.kernels == {"aten::mm": (9000, pytest.approx(4500))}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": [{"ph": "X", "name": ', "Expecting value"),
        ('{"traceEvents": []}', "holds no operators and no kernels"),
        ('{"steps": 3}', "has no traceEvents"),
        ("import torch", "not JSON from a profiler"),
        ('{"traceEvents" 3}', "Expecting .:. delimiter"),
        ("", "not JSON"),
    ],
)
def test_what_is_no_trace_is_one_sentence(tmp_path, text, words):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=words) as error:
        traces.read(tmp_path / "t.json")
    assert "t.json" in str(error.value) and "\n" not in str(error.value)


def test_other_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        traces.read(tmp_path / "none.json")
    with pytest.raises(TraceError, match="holds no trace"):
        traces.read(tmp_path)
    (tmp_path / "t.json.gz").write_bytes(b"\x1f\x8b\x08 broken")
    with pytest.raises(TraceError, match="cannot be read"):
        traces.read(tmp_path / "t.json.gz")
    for name in "ab":
        written(tmp_path / f"{name}.json", step_marks(0, 1) + [op("aten::mm", 0, 1)],
                distributedInfo={"rank": 2})
    with pytest.raises(TraceError, match=r"a.json and b.json are both of rank 2"):
        traces.read([tmp_path / "a.json", tmp_path / "b.json"])
    with (
        pytest.raises(ValueError, match=r"call profiler.step\(\) 3 times"),
        profile.tracing(tmp_path, steps=2, skip=1),
    ):
        pass
    with pytest.raises(ValueError, match="steps 0"), profile.tracing(tmp_path, steps=0):
        pass


def test_the_command(tmp_path):
    for rank, start in enumerate((10, 29)):
        rank_file(tmp_path, rank, start)
    out = tmp_path / "report" / "all.json"
    out.parent.mkdir()
    words = [tmp_path / "0.json", tmp_path / "1.json", "--json", out]
    done = subprocess.run(
        [sys.executable, "-m", "utils.measure.report", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 is late for the collectives: the others wait 20 ms" in done.stdout
    made = json.loads(out.read_text())
    assert [path.name for path in out.parent.iterdir()] == ["all.json"]
    assert made["ranks"][1]["late"] == pytest.approx(20)
    assert sum(made["steps"][0][kind] for kind in KINDS) == pytest.approx(40)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["none.json"], "none.json: No such file or directory"),
        (["0.json", "--json", "nowhere/out.json"], "nowhere/out.json cannot be written"),
    ],
)
def test_the_command_with_bad_words(tmp_path, monkeypatch, capsys, words, sentence):
    rank_file(tmp_path, 0, 10)
    monkeypatch.chdir(tmp_path)
    assert command.main(words) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith("utils.measure.report: ") and error.count("\n") == 1
    assert sentence in error


@pytest.mark.parametrize(
    "name, words", [("a" * 5000, "File name too long"), ("deep.json", "deep.json is not JSON")]
)
def test_the_command_names_what_it_cannot_read(tmp_path, capsys, name, words):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(SystemExit) as stopped:
        sys.exit(command.main([str(tmp_path / name)]))
    assert stopped.value.code == 2 and words in capsys.readouterr().err
