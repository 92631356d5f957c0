"""An export is complete or absent, and holds at most one file and one tensor in memory."""

import os
import resource

import pytest
import torch

from tests.serving.export.killed_export import STEPS
from tests.serving.export_models import check_whole, command, hidden, new_model
from utils.models import hf_format
from utils.models.gpt import GPTConfig
from utils.serving import repository
from utils.serving.engine.version import LoadError, Version
from utils.serving.export import ExportError, export

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture
def model(tmp_path):
    return new_model(tmp_path / "model")


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(model, {"new" or "stored": {moment: repository}}, what was stored): see killed_export.py."""
    folder = tmp_path_factory.mktemp("killed")
    stored, model = folder / "as-in-git", new_model(folder / "model")
    repository.copy_models(stored)
    done = command("-m", "tests.serving.export.killed_export", model, folder, stored)
    assert done.returncode == 0, done.stderr
    outs = {
        kind: {
            number: folder / kind / f"{number:04d}" / "repo"
            for number in range(0, int(last) + 1, STEPS[kind])
        }
        for kind, last in zip(("new", "stored"), done.stdout.split())
    }
    return model, outs, stored


def test_a_crash_at_any_moment_leaves_no_half_version(killed):
    model, outs, _ = killed
    assert len(outs["new"]) > 30
    whole = []
    for number, out in outs["new"].items():
        version = out / "gpt_engine" / "1"
        if version.exists():
            check_whole(version)
            whole.append(number)
        if number % 10 == 0:  # the next export succeeds
            assert export(model, out, 2, version=2) == out / "gpt_engine" / "2"
            assert hidden(out.parent) == []
            check_whole(out / "gpt_engine" / "2")
    assert whole and whole == list(outs["new"])[-len(whole) :] and len(whole) < len(outs["new"])


def test_a_crash_while_the_workshops_own_repository_is_filled(killed):
    """It already contains the models."""
    model, outs, stored = killed
    models = [file.relative_to(stored) for file in stored.rglob("*.*") if file.is_file()]
    assert len(models) >= 8
    filled = {}
    for number, out in outs["stored"].items():
        version = out / "gpt_engine" / "1"
        filled[number] = (version / "manifest.json").exists()
        if filled[number]:
            check_whole(version)
        else:
            assert not [file for file in version.rglob("*") if file.is_file()]
        for file in models:
            assert (out / file).read_bytes() == (stored / file).read_bytes()
    assert set(filled.values()) == {False, True}
    last = outs["stored"][max(number for number in filled if not filled[number])]
    with pytest.raises(LoadError, match=r"manifest.json is missing"):
        Version.read(last / "gpt_engine" / "1")
    assert export(model, last, 2) == last / "gpt_engine" / "1"
    check_whole(last / "gpt_engine" / "1")


def test_two_exports_to_one_repository(tmp_path, model):
    with (
        repository.building(tmp_path / "repo"),
        pytest.raises(ExportError, match=r"another export writes to .*repo: wait"),
    ):
        export(model, tmp_path / "repo", 1)
    assert export(model, tmp_path / "repo", 1).name == "1"
    assert hidden(tmp_path) == []


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, model):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # bytes of a file
    try:
        with pytest.raises(ExportError, match=r"repo cannot be written: .*File too large"):
            export(model, tmp_path / "repo", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "repo").exists() and hidden(tmp_path) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path):
    with (
        pytest.raises(ExportError, match=r"GB of free space, .* 1,000,000,000.0 GB: make room"),
        repository.building(tmp_path / "repo") as building,
    ):
        building.open_version(1, size=10**18)
    assert not (tmp_path / "repo").exists() and hidden(tmp_path) == []


MEASURE = """
import resource, sys
from pathlib import Path
from utils.serving import shard
from utils.serving.export import export, rebuild
def peak():
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss begins at the peak of the process that started this one
        [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, large, out, shard.FILE_BYTES = *sys.argv[1:4], int(sys.argv[4])
export(small, out + "/small-8", 2, dtype="int8")  # what a first time takes
rebuild(export(small, out + "/small-repo", 2), out + "/small-again")
before = peak()
for dtype in ("int8", "int4", "auto"):
    folder = export(large, f"{out}/large-repo-{dtype}", 2, dtype=dtype)
exported = peak() - before
rebuild(folder, out + "/large-again")
print(exported, peak() - before)
"""


def test_memory_never_holds_more_than_one_file_and_a_tensor(tmp_path):
    """Measured in its own process. The model is over 6 times a file's size limit; the allocator
    returns every large block, so freed memory does not count."""
    config = GPTConfig(
        vocab_size=256, hidden_size=1024, layers=4, heads=16, kv_heads=4, intermediate_size=8192
    )
    source = tmp_path / "large"
    source.mkdir()
    shapes = config.parameter_shapes().items()
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes}
    hf_format.write_weights(source, tensors)
    hf_format.write_json(source / "config.json", config.to_hf())
    largest = max(tensor.nbytes for tensor in tensors.values())
    limit = 2 * largest
    assert (source / "model.safetensors").stat().st_size > 6 * limit
    done = command(
        *("-c", MEASURE, new_model(tmp_path / "small"), source, tmp_path, limit),
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )
    assert done.returncode == 0, done.stderr
    exported, both = map(int, done.stdout.split())
    assert 0 < exported <= both < limit + 2 * largest  # joining: the slices and the whole
    files = [*(tmp_path / "large-repo-auto").rglob("rank-*"), *tmp_path.glob("*-again/*-of-*")]
    assert len(files) > 12
