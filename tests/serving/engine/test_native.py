"""The compiled decode step: equal to PyTorch's operators, compiled once, and optional."""

import fcntl
import shutil
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from tests.serving.engines import ODD, TIED, version_of
from tests.serving.export_models import new_model
from utils.compression.quantize import pack, quantize
from utils.compression.scheme import INT4, INT8
from utils.paths import ROOT
from utils.ranks import Ranks
from utils.serving.engine import native, ranks
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.engine import Engine
from utils.serving.engine.linear import Int4Linear, Int8Linear
from utils.serving.engine.model import ServedDecoder
from utils.serving.engine.request import SamplingParams
from utils.serving.engine.version import Version
from utils.serving.export import export

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not any(map(shutil.which, native.COMPILERS)), reason="this machine has no C++ compiler"
    ),
]
SECONDS = 120
CPUS = ["native"]  # targets of step.cpp, with wide, short and few registers
if native.platform.machine() == "x86_64":
    CPUS += ["x86-64-v3", "x86-64"]


@pytest.fixture(scope="module")
def library():
    return native.load(SECONDS)


@pytest.fixture(params=CPUS)
def any_library(request, monkeypatch):
    """Compiled for this CPU, and for older ones."""
    flags = [flag.replace("native", request.param) for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", flags)
    try:
        yield native.load(SECONDS)
    except native.NotCompiled as reason:
        pytest.skip(str(reason))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- 1. products

SIZES = [(7, 5), (48, 37), (33, 256), (64, 1040)]  # N, K
ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 40)


@pytest.mark.parametrize(("N", "K"), SIZES)
def test_products_are_those_of_pytorchs_way(any_library, N, K):
    bias = drawn(N, seed=1)
    half, full = drawn(N, K, seed=2).bfloat16().float(), drawn(N, K, seed=2)
    whole = quantize(full, INT8)
    floats = [any_library.floats(weight, bias) for weight in (half, full)]
    assert [product.kind for product in floats] == [native.FP16, native.FP32]
    ours = any_library.int8(whole.values, whole.scale, None, False)
    theirs = Int8Linear(whole.values, whole.scale, None, False)
    with_bias = any_library.int8(whole.values, whole.scale, bias, False)
    for rows in ROWS:
        x = drawn(rows, K, seed=rows)
        x[-1] = 0.0
        x[0] = 3.0 * x[0].sign()  # all at the maximum
        for weight, product in zip((half, full), floats):
            right = x.double() @ weight.double().T + bias
            away = (product(x[None])[0] - right).abs()
            sizes = x.abs() @ weight.abs().T + bias.abs()  # of all terms of the sums
            assert (away <= 4 * torch.finfo(torch.float32).eps * sizes).all()
        assert torch.equal(ours(x), theirs(x))  # the sums are exact
        assert torch.allclose(with_bias(x), theirs(x) + bias, rtol=1e-6, atol=1e-6)
    apart = drawn(4, 2 * K)[:, :K]  # rows that are not adjacent
    assert torch.equal(ours(apart), ours(apart.clone()))


@pytest.mark.parametrize(("start", "stop"), [(0, 100), (0, 64), (24, 100), (40, 50)])
def test_products_of_4_bits(any_library, start, stop):
    part = quantize(drawn(37, 100, seed=2), INT4).columns(start, stop)
    after = part.scale.shape[1] * 32 - part.offset - (stop - start)
    packed = pack(F.pad(part.values, (part.offset, after)))
    numbers = packed, part.scale, drawn(37, seed=1), False, part.offset
    ours, theirs = any_library.int4(*numbers, stop - start), Int4Linear(*numbers)
    for rows in ROWS:
        x = drawn(rows, stop - start, seed=rows)
        assert torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_independent_of_its_company_and_of_threads(any_library, threads):
    weight, x = drawn(100, 70).bfloat16().float(), drawn(40, 70, seed=1)
    q8, q4, bias = quantize(weight, INT8), quantize(weight, INT4), drawn(100, seed=2)
    packed = pack(F.pad(q4.values, (0, 26)))
    torch.set_num_threads(threads)
    products = [
        any_library.floats(weight, bias),
        any_library.floats(drawn(100, 70), bias),
        any_library.int8(q8.values, q8.scale, bias, False),
        any_library.int4(packed, q4.scale, bias, False, 0, 70),
    ]
    torch.set_num_threads(1)
    products += [
        any_library.floats(weight, bias),
        any_library.floats(drawn(100, 70), bias),
        any_library.int8(q8.values, q8.scale, bias, False),
        any_library.int4(packed, q4.scale, bias, False, 0, 70),
    ]
    together = [product(x) for product in products]
    for one, other in zip(together[:4], together[4:]):
        assert torch.equal(one, other)
    for product, all_rows in zip(products, together):
        for rows in ROWS:
            first = min(7, 40 - rows)
            assert torch.equal(product(x[first : first + rows]), all_rows[first : first + rows])


# ---- 2. a decode step


def decoder(version, library, kv="auto", slots=5):
    config = EngineConfig(max_num_seqs=slots, kv_cache_dtype=kv)
    names = config.dtypes(version.stored, True, version.compute)
    return ServedDecoder(
        version.model, version.weights(0), 0, 1, slots, config.length(version.model), None, "cpu",
        *(getattr(torch, name) for name in names), library,
    )


def steps(decoder):
    """Logits of prompts of different lengths and of decode steps in changing batches, with the
    blocks of two slots in another order."""
    first, last = decoder.cache.blocks[1].tolist(), decoder.cache.blocks[4].tolist()
    decoder.cache.assign(1, last[::-1])
    decoder.cache.assign(4, first[::-1])
    for slot, length in ((0, 3), (1, 40), (3, 1), (4, 17)):
        yield decoder.prefill(slot, 0, list(range(2, 2 + length)))
    for number, slots in enumerate(([0], [0, 1, 3, 4], [4, 0], [3], [1, 4], [0, 1, 3, 4])):
        yield decoder.decode(slots, [slot + number for slot in slots])


@pytest.mark.parametrize("config", [ODD, TIED], ids=["odd", "tied"])
@pytest.mark.parametrize("kv", ["auto", "int8"])
@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_a_step_is_that_of_pytorchs_way(tmp_path, any_library, config, dtype, kv):
    """With grouped queries, biases and odd sizes."""
    checkpoint = new_model(tmp_path / "model", config)
    version = Version.read(export(checkpoint, tmp_path / "repo", 1, dtype=dtype))
    ours, theirs = decoder(version, any_library, kv), decoder(version, None, kv)
    assert (ours.step is None) == (kv == "int8") and theirs.step is None
    for one, other in zip(steps(ours), steps(theirs)):
        away = (one - other).abs().mean() / other.abs().mean()
        # a value that is rounded the other way to 8 bits changes others
        assert away < (2e-3 if "int8" in (dtype, kv) else 1e-5)
    assert ours.lengths == theirs.lengths


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_a_token_is_independent_of_its_company(tmp_path, library, dtype):
    folder = export(new_model(tmp_path / "model", ODD), tmp_path / "repo", 1, dtype=dtype)
    together = decoder(Version.read(folder), library)
    alone = decoder(Version.read(folder), library)
    for slot, length in ((0, 3), (1, 40), (3, 1), (4, 17)):
        for one in (together, alone):
            one.prefill(slot, 0, list(range(2, 2 + length)))
    for number in range(8):
        slots = [4, 1, 0, 3]
        logits = together.decode(slots, [slot + number for slot in slots])
        for row, slot in enumerate(slots):
            assert torch.equal(logits[row : row + 1], alone.decode([slot], [slot + number]))


# ---- 3. an engine


@pytest.mark.thorough
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_without_a_compiler_serves_and_says_so_once(tmp_path, tp, capfd, monkeypatch):
    folder = version_of(ODD, tmp_path, tp)
    with Engine(folder, device="cpu") as engine:
        right = engine.complete([5, 6], SamplingParams(max_tokens=8)).tokens
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    ranks._say.cache_clear()
    for _ in range(2):
        with Engine(folder, device="cpu") as engine:
            assert engine.complete([5, 6], SamplingParams(max_tokens=8)).tokens == right
    said = capfd.readouterr().err
    assert said == (
        "decode steps run in PyTorch, which is slower: there is no C++ compiler "
        "(/nowhere/c++)\n"
    )


def library_of(rank):
    """What this rank gets with a compiler on all ranks, then without one on `rank`."""
    import torch.distributed as dist

    from utils.serving.engine import native, worker

    def refuse(seconds):
        raise native.NotCompiled("it has none")

    kept, found = native.load, []
    for broken in (None, rank):
        native.load = refuse if broken == dist.get_rank() else kept
        library, why_not = worker.library(60.0, 2)
        found.append((library is not None, why_not))
    native.load = kept
    return found


def test_either_all_ranks_have_it_or_none():
    with Ranks(2, device="cpu", timeout=SECONDS) as two:
        first, second = two.run(library_of, 1)
    assert first == [(True, None), (False, "another rank has none")]
    assert second == [(True, None), (False, "it has none")]


# ---- 4. compiled once


def script(file, *lines):
    file.write_text("\n".join(("#!/bin/sh", *lines, "")))
    file.chmod(0o755)
    return file


def real_compiler():
    return next(filter(None, map(shutil.which, native.COMPILERS)))


LOAD = (
    "import sys; from utils.serving.engine import native; "
    "print(native.load(float(sys.argv[1])).lanes)"
)


@pytest.mark.thorough
def test_of_processes_that_want_it_at_once_one_compiles(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    compiler = script(
        tmp_path / "c++", f"echo once >> {tmp_path}/calls", f'exec {real_compiler()} "$@"'
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CXX", str(compiler))
    command = [sys.executable, "-c", LOAD, str(SECONDS)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    said = {process.communicate()[0] for process in started}
    assert len(said) == 1 and int(said.pop()) > 0
    assert [process.returncode for process in started] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "once\n"
    assert {file.suffix for file in (cache / "kintsugi").iterdir()} == {".so", ".lock"}
    monkeypatch.setenv("CXX", "/nowhere/c++")  # no longer needed
    assert native.load(SECONDS).lanes > 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("exit 3", "rejects step.cpp: it gives no reason"),
        ("echo 'step.cpp:7: error: no'; exit 1", "rejects step.cpp: step.cpp:7: error: no"),
        ("sleep 60", "takes too long"),
    ],
)
def test_a_compiler_that_does_not_compile(tmp_path, monkeypatch, line, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", line)))
    with pytest.raises(native.NotCompiled, match=words) as refused:
        native.load(1.0)
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "cache").glob("*/*.so"))


def test_who_waits_for_another_process_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = tmp_path / "kintsugi" / f"step-{native._key()}.lock"
    lock.parent.mkdir()
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(native.NotCompiled, match="another process takes too long"):
            native.load(0.2)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(native.NotCompiled, match="Not a directory"):
        native.load(SECONDS)


def test_another_source_is_another_file(tmp_path, monkeypatch):
    before = native._key()
    changed = tmp_path / "step.cpp"
    changed.write_bytes(native.SOURCE.read_bytes() + b"// of today\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    assert native._key() != before
