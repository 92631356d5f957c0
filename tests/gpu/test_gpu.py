"""`make gpu` without a GPU: its parts rehearsed, and parts that fail."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch

from labs.support.kernels.shape import modelled
from tests.gpu.__main__ import PARTS, REFERENCE, Part, main, run
from tests.gpu.child import tried
from tests.gpu.course import skipping
from tests.gpu.shape import GIVEN, SHAPES, TP
from tests.patience import patience
from utils.paths import ROOT

HERE = "tests.gpu.test_gpu"
BARE = ["IPython", "psutil", "nbclient", "nbformat", "tritonclient", "deepspeed", "torchao"]


# ---- failing parts; each runs in the process of `tests.gpu.child`


def breaks(rehearse):
    yield "first", {"value": 1.5}
    raise ValueError("the sizes do not match\nand more")


def divide(by):
    return {"value": 1 / by}


def imports():
    import no_such_package  # noqa: F401


def lacks_a_package(rehearse):
    yield "first", {"path": os.environ["PYTHONPATH"]}
    imports()


def breaks_in_a_row(rehearse):
    yield "zero", tried(divide, 0)
    yield "package", tried(imports)
    yield "two", tried(divide, 2)


def hangs(rehearse):
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    yield "pids", {"own": os.getpid(), "child": child.pid}
    time.sleep(3600)


def dies(rehearse):
    print("this is not a row")
    yield "first", {}
    os.kill(os.getpid(), signal.SIGKILL)


def interrupts(rehearse):
    """Send Ctrl-C to the program that runs the parts (its supervisor's parent) before it reads the
    row."""
    program = psutil.Process().parent().parent()
    program.suspend()
    yield "pids", {"own": os.getpid()}
    program.send_signal(signal.SIGINT)
    program.resume()
    time.sleep(3600)


def part(function, seconds=120):
    return Part(f"{HERE}:{function.__name__}", "of a test", seconds=patience(seconds))


@pytest.mark.thorough
def test_what_goes_wrong_is_a_sentence_and_the_rest_goes_on(tmp_path):
    out = tmp_path / "record.json"
    parts = {one.__name__: part(one) for one in (breaks, breaks_in_a_row, dies)}
    parts["hangs"] = part(hangs, 8)
    done = run(parts, True, out)
    assert json.loads(out.read_text())["parts"] == done and list(tmp_path.iterdir()) == [out]
    assert all(one["state"] == "failed" for one in done.values())
    assert done["breaks"]["why"] == "ValueError: the sizes do not match"
    assert done["breaks"]["rows"] == {"first": {"value": 1.5}}
    rows = done["breaks_in_a_row"]["rows"]
    assert rows["zero"] == {"failed": "ZeroDivisionError: division by zero"}
    assert rows["package"] == {"absent": "no_such_package is not installed"}
    assert rows["two"] == {"value": 0.5}
    assert done["breaks_in_a_row"]["why"].startswith("1 of 3 rows: zero: ZeroDivisionError")
    assert "status 137: this is not a row" in done["dies"]["why"]
    assert done["dies"]["rows"] == {"first": {}}
    assert done["hangs"]["why"].startswith("it was not done after")
    assert not any(map(psutil.pid_exists, done["hangs"]["rows"]["pids"].values()))


def test_a_part_that_lacks_a_package_is_skipped_and_earlier_figures_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/where/packages/are")
    out = tmp_path / "record.json"
    earlier = {"state": "done", "why": "", "rows": {"first": {"value": 2}}, "commit": "earlier"}
    out.write_text(json.dumps({"gpu": "CPU", "parts": {"breaks": earlier, "lacks": earlier}}))
    lacks = part(lacks_a_package)
    found = run({"lacks": lacks, "none": Part("no_such_package:x", "of a test")}, True, out)
    assert [one["why"] for one in found.values()] == 2 * ["no_such_package is not installed"]
    assert {one["state"] for one in found.values()} == {"skipped"}
    assert found["lacks"]["rows"] == {"first": {"path": f"{ROOT}{os.pathsep}/where/packages/are"}}
    assert {"date", "commit", "threads"} < set(found["lacks"])
    parts = json.loads(out.read_text())["parts"]
    assert parts == {"breaks": earlier} | found
    assert run({"breaks": Part("no_such_package:x", "of a test")}, True, out)["breaks"]["why"]
    assert json.loads(out.read_text())["parts"] == parts  # it found no row


def test_scripts_kernels_and_the_engine_need_nothing_that_a_bare_gpu_machine_lacks():
    """Try all imports and an export without the packages of notebooks and of Triton's client."""
    code = f"""
import importlib, sys, tempfile
class Away:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BARE}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Away())
for part in {[part.function.partition(":")[0] for part in PARTS.values()]}:
    importlib.import_module(part)
from utils.serving.export import export
with tempfile.TemporaryDirectory() as folder:
    export("models/tiny", folder, 1)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.thorough
def test_ctrl_c_keeps_what_was_found(tmp_path):
    out = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        run({"first": part(breaks), "second": part(interrupts), "third": part(breaks)}, True, out)
    done = json.loads(out.read_text())["parts"]
    assert list(done) == ["first", "second"]
    assert done["first"]["rows"] == {"first": {"value": 1.5}}
    assert done["second"]["why"] == "it was interrupted"
    assert not psutil.pid_exists(done["second"]["rows"]["pids"]["own"])


# ---- the command


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_every_part_says_so_and_nothing_is_written(capsys, tmp_path):
    before = {path: path.read_bytes() for path in REFERENCE.iterdir()}
    assert main(["--out", str(tmp_path / "record.json")]) == 0
    assert main(["--only", "mfu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2)[0] for line in lines] == [*PARTS, "mfu"]
    assert all(line.endswith("skipped  there is no CUDA device") for line in lines)
    assert {path: path.read_bytes() for path in REFERENCE.iterdir()} == before
    done = json.loads((tmp_path / "record.json").read_text())["parts"]
    assert list(done) == list(PARTS)
    assert {one["state"] for one in done.values()} == {"skipped"}


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--rehearse"], "name a file with --out"),
        (["--only", "speed"], "invalid choice: 'speed'"),
        (["--out", "nowhere/record.json"], "there is no folder nowhere"),
    ],
)
def test_a_wrong_word_is_named(words, sentence, capsys):
    with pytest.raises(SystemExit):
        main(words)
    assert sentence in capsys.readouterr().err


def test_the_parts_are_listed(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PARTS)


def test_a_card_times_the_shapes_of_lesson_12():
    """It uses the lesson's names and stored modelled times."""
    lesson = (ROOT / "notebooks" / "12_kernels.ipynb").read_text(encoding="utf-8")
    for name, changes in SHAPES.items():
        slower = modelled(replace(GIVEN, **changes), TP) / modelled(GIVEN, TP) - 1
        assert re.search(rf'"{name} .*% +{re.escape(f"{slower:+.1%}")}', lesson), name


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_rehearsal_has_the_form_of_a_run(tmp_path):
    """The inexpensive parts, on the CPU."""
    out, before = tmp_path / "record.json", set(REFERENCE.iterdir())
    chosen = ["machine", "memory", "tests", "one-card", "shape", "decode-1b", "snapshot"]
    status = main(["--rehearse", "--only", *chosen, "--out", str(out)])
    record = json.loads(out.read_text())
    parts = record["parts"]
    assert status == 0, {name: one["why"] for name, one in parts.items()}
    assert record["rehearsal"] is True and set(REFERENCE.iterdir()) == before
    keys = {"state", "why", "seconds", "rows", "date", "commit", "threads"}
    assert set(parts) == {*chosen} and all(keys == set(one) for one in parts.values())
    machine, memory, skipped, one_card, shapes, decode, _ = (parts[name]["rows"] for name in chosen)
    assert machine["device"]["torch"] == torch.__version__ and machine["copy"]["bytes_per_s"] > 0
    for row in memory.values():  # the planner rounds a small model's buffers up
        assert row["planned"] == pytest.approx(row["tensors"], rel=0.15)
    assert {"pp", "cp, ring", "ep", "shard 2"} < set(one_card)
    assert set(shapes) == set(SHAPES) and all(row["seconds"] > 0 for row in shapes.values())
    assert decode["ours, bfloat16, 16"].keys() == {"tokens_per_s", "of_copy", "predicted"}
    assert {"tests/kernels", "tests/memory/test_offload.py"} < set(skipping())
    row = skipped["tests.memory.test_offload"]
    assert row["passed"] == 0 < row["skipped"] and row["absent"] == "there is no CUDA device"
