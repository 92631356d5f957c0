"""Exports a checkpoint into a Triton model repository, with weight files for each rank.

    folder = export("models/base", "triton_model_repo", tp=2, prompts="prompts")   # …/gpt_engine/1
    rebuild(folder, "again")                              # the checkpoint, bit for bit

From the shell:

    python -m utils.serving.export --model models/base --tp 2 [--prompts DIR] [--version N]
        [--out triton_model_repo] [--backend python|vllm] [--dtype D] [--max-num-seqs N]
        [--max-model-len N] [--prefill-chunk N] [--kv-cache-dtype D] [--machine NAME]

The model is a Hugging Face folder of a Llama, Mistral or Qwen2 without a sliding window (float32,
bfloat16 or float16), with a tokenizer.json or trained on bytes; for vLLM, any model (vllm.py). Each
version has its own compute dtype, recorded in its manifest, so one repository serves a model in
fp32 and in int8 side by side. With "int8" and "int4" the matrices of its blocks are quantized to
integers before they are sharded (engine/stored.py).

The version's folder has everything that Triton's stock image with torch needs to serve it: code,
the weights of each rank, config.json, tokenizer.json, prompts, and manifest.json with the size and
SHA-256 of each. It appears whole or not at all (repository.py), and memory never holds more than
the weights of one file (shard.py). A model that cannot be served is refused with a ValueError of
one sentence.
"""

import hashlib
import math
import shutil
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from utils.cli import check_options, exit_status, flag, option, parse_flags
from utils.compression.scheme import SCHEMES
from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.fingerprint import fingerprint
from utils.models.tp_plan import check_ranks
from utils.serving import repository, shard
from utils.serving import vllm as vllm_variant
from utils.serving.checkpoint import EXTRAS, Source, check_prompts, facts_of_prompt, find_prompts
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.stored import COMPUTE, FLOATS, WIDTHS, rank_tensors
from utils.serving.engine.version import Version
from utils.serving.model_config import engine_config, set_parameters
from utils.serving.repository import MANIFEST, ExportError

__all__ = ["ExportError", "export", "rebuild"]

PROGRAM = "utils.serving.export"
CONFIG = Path(repository.ENGINE, "config.pbtxt")  # in a repository: the engine's options
SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FULL = 0.9  # of a device's memory: a step's activations and the libraries need the rest


def export(
    model: str | Path,
    out: str | Path,
    tp: int,
    prompts: str | Path | None = None,
    version: int | None = None,
    options: dict[str, Any] | None = None,
    machine: str | None = None,
    dtype: str = "auto",
) -> Path:
    """Write a checkpoint as a version of the model repository `out`; return the version's folder.

    model     Hugging Face folder
    out       model repository: a new folder, or one that holds Triton models
    tp        ranks, each with its own files; must divide heads and key-value heads
    prompts   folder of NAME.safetensors files of utils/prompts/file.py, tuned on this model
    version   None: one above the highest number in the repository, withdrawn versions included;
              but if the newest version is this model, sharded in the same way, with the same
              prompts and code, nothing is written
    options   of EngineConfig, for the engine's config.pbtxt
    machine   one of the planner's machines, by name; a model too large for its devices is refused
    dtype     compute dtype of this version: "auto" (as stored, on the CPU float32), float32,
              bfloat16, float16 or fp32, bf16, fp16; "int8", "int4": the matrices of its blocks are
              stored as integers; int8 also multiplies integers, int4 computes in floating point
    """
    return _export(model, out, tp, prompts, version, options, machine, dtype)[0]


def _export(model, out, tp, prompts, version, options=None, machine=None, dtype="auto"):
    """(the version's folder, edited files that were kept); None for the files if nothing was
    written."""
    memory = None if machine is None else _memory_of(machine)
    compute = SHORT.get(dtype, dtype)
    if compute not in COMPUTE:
        raise ExportError(f"dtype {dtype!r} is not known: give one of {', '.join(DTYPES)}")
    source = Source.read(model)
    check_ranks(source.config, tp)
    config = _config_of(out, options or {})
    if compute in FLOATS and config.dtype not in ("auto", compute):
        raise ExportError(
            f"{Path(out) / CONFIG} has dtype {config.dtype}, which would override this version's "
            f'{compute}: set it to "auto" there, and each version uses its own'
        )
    if memory is not None:  # before anything is written: the shapes suffice
        _check_room(machine, memory, source, tp, config, compute)
    found = find_prompts(prompts, source)
    with repository.building(out) as building:
        number = building.free_version(version)
        folder = building.open_version(number, _bytes(source, tp, compute))
        source.copy_small_files(folder)
        for name, file in found.items():
            (folder / "prompts").mkdir(exist_ok=True)
            shutil.copyfile(file, folder / "prompts" / f"{name}.safetensors")
        small = {str(file.relative_to(folder)): _facts(file) for file in _files(folder)}
        repository.copy_code(folder)
        repository.copy_models(building.beside)
        if not (building.out / CONFIG).exists():
            set_parameters(building.beside / CONFIG, options or {})
        weights = fingerprint(source.folder)
        if version is None and (
            same := _same(building, folder, source, tp, compute, small, weights)
        ):
            return same, None
        check_prompts(found, weights, source)
        _check_tokenizer(building, folder)
        for name in repository.TOKENIZING:
            (building.beside / name / "1").mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / hf_format.TOKENIZER, building.beside / name / "1")
        limits = _limits(folder, config.max_model_len or source.config.max_positions)
        for name in repository.FRONT:
            hf_format.write_json(building.beside / name / "1" / repository.LIMITS, limits)
        shard.split(source.headers, source.config, tp, source.dtype_name, folder, compute)
        manifest = {
            "format": 1,
            "tp": tp,
            "dtype": source.dtype_name,
            "parameters": source.parameters,
            "fingerprint": weights,
            "name": source.folder.name,
            "files": small | {file.name: _facts(file) for file in sorted(folder.glob("rank-*"))},
            "prompts": {name: facts_of_prompt(file) for name, file in found.items()},
        }
        if compute != "auto":  # an engine that knows only format 1 would ignore it
            manifest |= {"format": 2, "compute": compute}
        hf_format.write_json(folder / MANIFEST, manifest)
        Version.read(folder)  # never publish a version that the engine would refuse
        return building.publish(), building.kept


def _limits(folder, positions):
    """The lengths beyond which no input can fit, so that it is refused without being tokenized: a
    text cannot have more bytes than `positions` times those of the longest token in `folder`."""
    tokens = Tokenizer.from_file(str(folder / hf_format.TOKENIZER)).get_vocab()
    longest = max(len(token.encode()) for token in tokens)
    return {"ids": positions, "text_bytes": positions * longest}


def _bytes(source, tp, compute):
    """Bytes of all ranks' weights."""
    return sum(
        math.prod(shape) * WIDTHS[kind]
        for rank in range(tp)
        for kind, shape in rank_tensors(
            source.config, rank, tp, source.dtype_name, compute
        ).values()
    )


def _config_of(out, options):
    """The engine's options as the repository will have them: an existing config.pbtxt stays as it
    is, and options that differ from it are refused."""
    there = Path(out).expanduser() / CONFIG
    if not there.exists():
        return EngineConfig(**options)  # its defaults are those of the file that is copied there
    config = engine_config(there)
    for name, wanted in options.items():
        if wanted != (given := getattr(config, name)):
            raise ExportError(
                f"{there} already exists, and its {name} is {given}, not {wanted}: change it "
                "there, or give another --out"
            )
    return config


def _memory_of(machine):
    """Bytes of a device of one of the planner's machines."""
    from utils.planner.machine import MACHINES  # slow to import, and rarely needed

    if machine not in MACHINES:
        raise ExportError(f"machine {machine!r} is not known: give one of {', '.join(MACHINES)}")
    return MACHINES[machine].memory


def _check_room(machine, memory, source, tp, config, compute):
    """Refuse a model if one of its ranks would not fit on a device of the machine."""
    weights, cache = config.rank_bytes(source.config, tp, source.dtype_name, False, compute)
    most = FULL * memory
    if weights + cache > most:
        raise ExportError(
            f"a rank would hold {_gib(weights)} of weights and {_gib(cache)} of keys and values "
            f"({config.max_num_seqs} requests of {config.length(source.config):,} positions), but "
            f"only {_gib(most)} of a device of {machine} can be used: give more ranks, a lower "
            "--max-model-len or --max-num-seqs, or fewer bits (--dtype, --kv-cache-dtype)"
        )


def _gib(size):
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{size / 2**20:,.1f} MiB"


def _files(folder):
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _facts(file):
    """The manifest's entry for a file."""
    with open(file, "rb") as data:
        sha256 = hashlib.file_digest(data, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": sha256}


def _same(building, new, source, tp, compute, small, weights):
    """The folder of the newest version if it equals the one to be written, else None.

    new       the new version's folder, which already has the code
    small     {name: facts} of all files except weights and code
    weights   the fingerprint of the source's weights
    """
    if not building.filled():
        return None
    folder = building.folder_of(building.filled()[-1])
    there = hf_format.read_json(folder / MANIFEST)
    files = {name: facts for name, facts in there["files"].items() if name[:5] != "rank-"}
    same = (
        files == small
        and (there["tp"], there["dtype"]) == (tp, source.dtype_name)
        and there.get("compute", "auto") == compute
        and repository.same_code(new, folder)
        and there["fingerprint"] == weights
    )
    return folder if same else None


def _check_tokenizer(building, folder):
    """Refuse a second tokenizer: the front models of a repository tokenize for all versions."""
    ours = hf_format.read_json(folder / hf_format.TOKENIZER)
    for number in building.filled():
        if ours != hf_format.read_json(building.folder_of(number) / hf_format.TOKENIZER):
            raise ExportError(
                f"version {number} of {building.out} has a different tokenizer, and the front "
                "models tokenize for all versions: give another --out"
            )


def rebuild(version_folder: str | Path, folder: str | Path) -> Path:
    """Join the ranks' files of a version into a Hugging Face folder equal to the exported one.

    Raises LoadError (a ValueError) if a file differs from its manifest entry, ExportError if the
    version is quantized, because the checkpoint cannot be recovered from its integers.
    """
    version = Version.read(version_folder)
    if version.compute in SCHEMES:
        raise ExportError(
            f"{version.folder} holds {version.compute} values, from which {version.name} cannot be "
            "rebuilt bit for bit: use the checkpoint itself, or a version of --dtype auto"
        )
    there = version.folder
    shards = [[there / name for name in version.shards(rank)] for rank in range(version.tp)]
    for file in chain(*shards):
        version.verify(file.name)
    config = GPTConfig.from_hf(hf_format.read_config(there))
    with hf_format.replacing(folder) as beside:
        for name in (hf_format.CONFIG, hf_format.TOKENIZER, *EXTRAS):
            if (there / name).is_file():
                shutil.copyfile(there / name, beside / name)
        shard.join(shards, config, version.stored, beside)
    return Path(folder)


# ---- the command

ENGINE_OPTIONS = ("max_num_seqs", "max_model_len", "prefill_chunk", "kv_cache_dtype")
DTYPES = (*COMPUTE, *SHORT)


@dataclass(frozen=True)
class Command:
    """The options of the command."""

    model: str | None = option(None, "checkpoint folder in Hugging Face's format", None, "FOLDER")
    tp: int = option(1, "tensor-parallel ranks; divides the model's heads and key-value heads")
    prompts: str | None = option(None, "folder of prompts, NAME.safetensors", None, "DIR")
    out: str = option("triton_model_repo", "model repository", None, "REPO")
    version: int | None = option(
        None, "version number; default: one above the highest, withdrawn-N folders included"
    )
    backend: str = option(
        "python", "vllm: Triton's vLLM backend instead of our engine", ("python", "vllm")
    )
    dtype: str | None = option(
        None,
        "compute dtype of this version; int8: matrices are stored and multiplied as integers; "
        "int4: stored as integers, computed in floating point",
        DTYPES,
    )
    max_num_seqs: int | None = option(None, "requests that run together; default: 16", least=1)
    max_model_len: int | None = option(
        None, "most positions per request; default: as many as the model has", least=1
    )
    prefill_chunk: int | None = option(
        None, "prompt positions that one step reads; default: 256", least=1
    )
    kv_cache_dtype: str | None = option(
        None, "dtype of keys and values", ("auto", *FLOATS, "int8", *SHORT)
    )
    machine: str | None = option(
        None, "one of the planner's; a model too large for its devices is refused", None, "NAME"
    )
    mount: str = option(
        vllm_variant.MOUNT, "with vllm: where the server will find the repository", None, "FOLDER"
    )

    def __post_init__(self):
        check_options(self)
        if self.model is None:
            raise ValueError("--model is missing: give the checkpoint's folder")
        if self.backend == "vllm" and self.prompts is not None:
            raise ValueError(
                "--backend vllm takes text only, so it cannot use --prompts: leave it out"
            )
        for name in ("dtype", *ENGINE_OPTIONS, "machine"):
            if self.backend == "vllm" and getattr(self, name) is not None:
                raise ValueError(f"{flag(name)} is for our engine, not for --backend vllm")


def main(arguments: list[str] | None = None) -> int:
    """Export and report what was written; return the exit status."""
    texts = {"prog": f"python -m {PROGRAM}", "description": "Fill a Triton model repository."}
    return exit_status(
        PROGRAM,
        lambda: run(Command(**parse_flags(Command, arguments, **texts))),
        (ValueError, OSError),
        "stopped, nothing was written",
    )


def run(command: Command) -> None:
    if command.backend == "vllm":
        folder = vllm_variant.export_vllm(
            command.model, command.out, command.tp, command.version, command.mount
        )
        print(f"written: {folder}")
        for file in _files(folder):
            print(f"{file.stat().st_size:>15,} bytes  {file.relative_to(folder)}")
        print(f"next, on a machine with GPUs:\n{vllm_variant.command(command.out)}")
    else:
        given = {name: getattr(command, name) for name in ENGINE_OPTIONS}
        options = {name: SHORT.get(x, x) for name, x in given.items() if x is not None}
        folder, kept = _export(
            command.model, command.out, command.tp, command.prompts, command.version, options,
            command.machine, command.dtype or "auto",
        )
        if kept is None:
            print(f"{folder} holds this already: nothing was written")
            return
        report(folder)
        _report_memory(folder, engine_config(folder.parent / "config.pbtxt"))
        for name in kept:
            print(f"kept, although the workshop's differs: {Path(command.out) / name}")
        print(f"next: python -m utils.serving.server --repo {command.out}")


def report(folder: Path) -> None:
    """Print what a version holds."""
    manifest = hf_format.read_json(folder / MANIFEST)
    print(f"written: {folder}")
    for name, facts in manifest["files"].items():
        print(f"{facts['bytes']:>15,} bytes  {name}")
    print(
        f"{manifest['name']}: {manifest['parameters']:,} parameters as {_stored(manifest)} on "
        f"{manifest['tp']} rank{'s' if manifest['tp'] > 1 else ''}, {len(manifest['prompts'])} "
        "prompts"
    )


def _stored(manifest):
    whole = manifest.get("compute")
    return f"{whole} and {manifest['dtype']}" if whole in SCHEMES else manifest["dtype"]


def _report_memory(folder, config):
    """Print what a rank of this version will hold."""
    version, places = Version.read(folder), {}
    stored, compute = version.stored, version.compute
    whole = [compute] if compute in SCHEMES else []
    for on_cpu, place in ((True, " on the CPU"), (False, " on a GPU")):
        weights, cache = config.rank_bytes(version.model, version.tp, stored, on_cpu, compute)
        dtypes = " and ".join(dict.fromkeys(whole + [*config.dtypes(stored, on_cpu, compute)]))
        held = f"{_gib(weights)} of weights, {_gib(cache)} of keys and values, {dtypes}"
        places[held] = place if held not in places else ""
    for held, place in places.items():
        print(f"a rank{place} holds {held}")
    length = config.length(version.model)
    print(f"requests that run together: {config.max_num_seqs}, of at most {length:,} positions")


if __name__ == "__main__":
    sys.exit(main())
