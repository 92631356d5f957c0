"""The options of an engine: their checks, config.pbtxt, and what a rank holds with them."""

from dataclasses import asdict, replace

import pytest
import torch

from tests.serving.engines import ENDLESS, ODD, TIED, version_of
from tests.serving.export_models import new_model
from utils.serving import export as export_module
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.engine import Engine
from utils.serving.engine.model import ServedDecoder
from utils.serving.engine.request import BadRequest, SamplingParams
from utils.serving.engine.version import LoadError, Version
from utils.serving.export import ExportError, export
from utils.serving.model_config import ConfigError, engine_config, set_parameters
from utils.serving.repository import SOURCE

TEXTS = {"max_num_seqs": "3", "max_model_len": "0", "device": "cpu", "step_seconds": "7.5"}
TEXTS |= {"enable_prefix_caching": "false", "enforce_eager": "true"}


def test_options_come_from_texts():
    config = EngineConfig.of_parameters(TEXTS, "here")
    assert config == EngineConfig(
        max_num_seqs=3, device="cpu", step_seconds=7.5, enable_prefix_caching=False,
        enforce_eager=True,
    )
    assert EngineConfig(**asdict(config)) == config


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("max_num_seq", "3", "'max_num_seq' is not known: did you mean max_num_seqs?"),
        ("xyz", "3", "'xyz' is not known: expected one of max_num_seqs, max_model_len"),
        ("max_num_seqs", "many", "max_num_seqs 'many' is not an integer of at least 1"),
        ("max_num_seqs", "1000000000000", "max_num_seqs 1000000000000 is too large: give 65536"),
        ("max_num_seqs", "0", "max_num_seqs 0 is not an integer of at least 1"),
        ("max_model_len", "-5", "max_model_len -5 is not an integer of at least 1"),
        ("dtype", "int16", "dtype 'int16' is not known: give one of auto, float32"),
        (
            "dtype",
            "int8",
            "'int8' is not known: give \"auto\", and export a version with --dtype int8",
        ),
        (
            "kv_cache_dtype",
            "int4",
            "'int4' is not known: give one of auto, float32, bfloat16, float16, ",
        ),
        ("step_seconds", "nan", "step_seconds nan is not a time limit"),
        ("start_seconds", "inf", "start_seconds inf is not a time limit"),
        ("queue", "-1", "queue -1 is not an integer of at least 0"),
        ("device", "tpu", "device 'tpu' is not known: give one of auto, cpu, cuda"),
        ("enable_prefix_caching", "yes", "enable_prefix_caching 'yes' is not true or false"),
        ("enforce_eager", "1", "enforce_eager '1' is not true or false"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_place(name, text, words):
    with pytest.raises(ValueError) as refused:
        EngineConfig.of_parameters({name: text}, "gpt_engine/config.pbtxt")
    said = str(refused.value)
    assert said.startswith("gpt_engine/config.pbtxt: ") and words in said and "\n" not in said


def test_a_field_that_triton_does_not_know_is_named_with_its_line(tmp_path):
    file = tmp_path / "config.pbtxt"
    file.write_text('backend: "python"\nmax_batch_sise: 0\n')
    with pytest.raises(ConfigError, match=r'config\.pbtxt:2:.*"max_batch_sise"'):
        engine_config(file)


# ---- what a rank holds


def decoder_of(version, config, rank=0):
    dtypes = [getattr(torch, name) for name in config.dtypes(version.manifest["dtype"], True)]
    return ServedDecoder(
        version.model, version.weights(rank), rank, version.tp, config.max_num_seqs,
        config.length(version.model), None, "cpu", *dtypes,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "float16", "max_model_len": 17}],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_holds_what_the_options_say(tmp_path, tp, options):
    version = Version.read(version_of(ODD, tmp_path, tp))
    config = EngineConfig(max_num_seqs=3, **options)
    weights, cache = config.rank_bytes(version.model, tp, version.manifest["dtype"], on_cpu=True)
    decoder = decoder_of(version, config)
    assert cache == sum(layer.numbers.nbytes for layer in decoder.cache.layers)
    width = torch.float32.itemsize if config.dtype == "auto" else 2
    assert weights == width * sum(tensor.numel() for tensor in version.weights(0).values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_give_about_the_same_logits(tmp_path, dtype):
    version = Version.read(version_of(ODD, tmp_path, 1))
    tokens, found = [5, 9, 2, 30, 7], {}
    for name, options in {
        "right": {}, "weights": {"dtype": dtype}, "cache": {"kv_cache_dtype": dtype}
    }.items():
        decoder = decoder_of(version, EngineConfig(max_num_seqs=2, **options))
        decoder.prefill(1, 0, tokens)
        found[name] = decoder.decode([1], [4]).float()
    scale = found["right"].abs().max()
    for name in ("weights", "cache"):
        away = (found[name] - found["right"]).abs().max() / scale
        assert 0 < away < 8 * torch.finfo(getattr(torch, dtype)).eps, (name, away)


def test_a_shorter_length_is_kept_to(tmp_path):
    folder = version_of(ENDLESS, tmp_path, 1)
    seven = SamplingParams(max_tokens=7)
    with Engine(folder, max_num_seqs=2, max_model_len=10) as engine:
        assert len(engine.complete([1, 2, 3], seven).tokens) == 7
        assert len(engine.complete([1, 2], SamplingParams(max_tokens=-1)).tokens) == 8
        assert engine.stats()["kv_size"] == 2  # blocks
        with pytest.raises(BadRequest, match=r"exceed the 10 positions"):
            engine.complete([1, 2, 3, 4], seven)


def test_blocks_that_do_not_hold_one_request_are_refused():
    assert EngineConfig(max_num_seqs=3).blocks(ENDLESS) == 3 * -(-ENDLESS.max_positions // 16)
    with pytest.raises(ValueError, match=r"num_blocks 2 are fewer than the 3 that one request"):
        EngineConfig(max_model_len=33, num_blocks=2).blocks(ENDLESS)


def test_what_does_not_fit_the_memory_is_refused_by_the_ranks(tmp_path):
    folder = version_of(replace(ENDLESS, max_positions=10**6), tmp_path, 1)
    with pytest.raises(LoadError) as refused:
        Engine(folder, max_num_seqs=10_000)  # 1.3 terabytes, nearly all of it zeros
    assert "1,192.1 GiB of keys and values exceed the " in str(refused.value)
    assert str(refused.value).endswith("which are 1,000,000 and 10,000")


# ---- the export


def test_the_export_writes_options_and_never_overwrites_others(tmp_path, capsys):
    model, repo = new_model(tmp_path / "model"), tmp_path / "repo"
    words = f"--model {model} --out {repo} --max-num-seqs 5 --max-model-len 40 --prefill-chunk 8"
    words += " --dtype bfloat16 --kv-cache-dtype float32"
    assert export_module.main(words.split()) == 0
    config = engine_config(repo / "gpt_engine" / "config.pbtxt")
    assert config == EngineConfig(5, 40, 8, kv_cache_dtype="float32")
    assert Version.read(repo / "gpt_engine" / "1").compute == "bfloat16"  # belongs to the version
    said = capsys.readouterr().out
    assert "requests that run together: 5, of at most 40 positions" in said
    before = (repo / "gpt_engine" / "config.pbtxt").read_text()
    with pytest.raises(ExportError, match=r"already exists, and its max_model_len is 40, not 41"):
        export(model, repo, 1, options={"max_num_seqs": 5, "max_model_len": 41}, version=2)
    export(model, repo, 1, options={"max_num_seqs": 5}, version=2)
    assert (repo / "gpt_engine" / "config.pbtxt").read_text() == before


@pytest.mark.parametrize(
    ("model", "ranks", "dtype"),
    [
        (ODD, (1, 2, 4), "auto"),
        (replace(ODD, heads=6, kv_heads=3, vocab_size=1009), (1, 3), "auto"),
        (TIED, (1, 2), "auto"),
        (ODD, (1, 2, 4), "int8"),
        (TIED, (1, 2), "int4"),
    ],
    ids=["odd", "thirds", "tied", "int8", "int4"],
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bytes_of_shapes_are_those_of_the_files(tmp_path, model, ranks, dtype, stored):
    """The bytes predicted from shapes are those of the ranks' files, on a GPU as stored."""
    checkpoint = new_model(tmp_path / "model", model, stored)
    name = str(stored).removeprefix("torch.")
    for tp in ranks:
        version = Version.read(export(checkpoint, tmp_path / f"repo-{tp}", tp, dtype=dtype))
        held = [sum(t.nbytes for t in version.weights(rank).values()) for rank in range(tp)]
        assert EngineConfig().rank_bytes(model, tp, name, False, dtype)[0] == max(held)
        assert EngineConfig().rank_bytes(model, tp, name, True, dtype)[0] >= max(held)
        assert tp == 1 or max(held) < sum(held)


def test_what_a_machine_has_no_room_for_is_not_exported(tmp_path):
    """Refused before anything is written: nothing changes next to the repository."""
    config = replace(ENDLESS, max_positions=10**6)
    model, repo = new_model(tmp_path / "model", config), tmp_path / "repo"
    before = tmp_path.stat().st_mtime_ns
    with pytest.raises(ExportError, match=r"GiB of keys and values \(10000 requests of 1,000,000"):
        export(model, repo, 1, options={"max_num_seqs": 10_000}, machine="dgx-a100")
    with pytest.raises(ExportError, match=r"machine 'dgx' is not known: give one of .*dgx-a100"):
        export(model, repo, 1, machine="dgx")
    assert tmp_path.stat().st_mtime_ns == before and not repo.exists()
    version = export(model, repo, 1, options={"max_num_seqs": 10}, machine="dgx-a100")
    set_parameters(repo / "gpt_engine" / "config.pbtxt", {"max_num_seqs": 10_000})
    before = version.parent.stat().st_mtime_ns, tmp_path.stat().st_mtime_ns
    with pytest.raises(ExportError, match=r"10000 requests of 1,000,000"):  # as configured there
        export(model, repo, 1, version=2, machine="dgx-a100")
    assert before == (version.parent.stat().st_mtime_ns, tmp_path.stat().st_mtime_ns)


def test_the_shipped_configuration_says_the_defaults():
    shipped = engine_config(SOURCE / "gpt_engine" / "config.pbtxt")
    assert shipped == EngineConfig()
