"""How `make gpu` evaluates records that only a GPU produces, on synthetic ones."""

from tests.gpu.profiles import at_peak, counted, samples_beside
from utils.paths import ROOT


def event(action, addr, size, line=0):
    frames = [{"filename": "/torch/nn/linear.py", "line": 1}]
    frames += [{"filename": f"{ROOT}/utils/models/gpt.py", "line": line}]
    return {"action": action, "addr": addr, "size": size, "frames": frames if line else []}


def test_the_peak_of_a_step_is_told_by_the_lines_that_made_it():
    events = [
        event("alloc", 1, 512, line=7), event("alloc", 2, 1024, line=9), event("alloc", 3, 512),
        event("free_requested", 2, 1024), event("free_completed", 2, 1024),
        event("alloc", 2, 2048, line=7),  # the peak; an address is reused
        event("free_completed", 9, 4096), event("segment_alloc", 0, 2**20),
    ]
    assert dict(at_peak(4096, events)) == {
        "step": {"allocations": 4, "bytes_before": 4096, "bytes_at_peak": 4096 + 3072},
        "utils/models/gpt.py:7": {"bytes": 2560, "tensors": 2},
        "the backward pass": {"bytes": 512, "tensors": 1},
    }


def test_a_sample_is_beside_the_kernels_of_the_time_before_it():
    samples = [(9.9, 0.0, 70.0, 300), (10.5, 1.0, 600.0, 1900), (11.5, 1.0, 200.0, 1980)]
    kernels = [(10.0, 10.25), (10.4, 10.6), (11.0, 11.1)]
    rows = dict(samples_beside(samples, [(10.0, "matrix"), (11.0, "tiny")], kernels))
    assert list(rows) == ["matrix, 0.5 s", "tiny, 1.5 s"]
    assert rows["matrix, 0.5 s"] | {"kernels": 0.7} == {
        "util": 1.0, "kernels": 0.7, "launches": 2, "watts": 600.0, "mhz": 1900
    }
    assert [round(row["kernels"], 6) for row in rows.values()] == [0.7, 0.2]


def test_what_ncu_counts_is_a_row_per_kernel():
    head = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [
        "==PROF== Connected to process 7", head,
        '"0","7","adamw_many","gpu__time_duration.sum","ns","9,000"',
        '"1","7","adamw_many","gpu__time_duration.sum","ns","1,234"',
        '"1","7","adamw_many","launch__registers_per_thread","register/thread","40"',
        '"2","7","forward_kernel(float)","dram__bytes.sum","byte","268435456"',
    ]
    assert dict(counted("\n".join(lines))) == {
        "adamw_many": {"ns": 1234, "registers": 40}, "forward_kernel": {"bytes": 268435456}
    }
