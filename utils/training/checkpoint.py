"""Saves and resumes training runs, on any number of ranks, however they split the model.

    folder/config.json, model.safetensors    the model; transformers can open it too
    folder/optimizer.safetensors             the optimizer's state, by parameter name
    folder/training.json                     step, options, random numbers
    folder/tokenizer.json                    if tokens are not bytes

These files hold whole tensors, so a checkpoint written by N ranks, sharded or not, opens on any
other number. Instead of the two safetensors files there may be one of each per rank, with its
shards of the tensors (rank_files.py); they also open on any other number. There is no pickle, so
reading a checkpoint executes no code. run_folder.py makes a folder appear whole or not at all.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import NoneType

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from utils import untrusted
from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.training import rank_files
from utils.training.optimizer import state_shapes
from utils.training.rank_files import Pieces, RankFiles
from utils.training.run_folder import RunFolder

WEIGHTS, STATE = "model", "optimizer"  # the stems of these files' names
TRAINING = hf_format.TRAINING
FORMAT = 1  # of training.json; raised when an older reader would misread a newer file

PATH = (str, NoneType)
RECORD = {
    "step": int, "skipped": int, "seconds": (int, float), "optimizer": str, "rng": str,
    "text": (dict, NoneType), "row": dict,
    "scaler": {"growth_interval": int, "_growth_tracker": int, str: float},
    "config": {"text": PATH, "metrics": PATH, "tokenizer": PATH},
}  # the types in training.json

Pairs = Iterable[tuple[str, torch.Tensor]]


# ---- writing


def save_whole(folder: RunFolder, model: GPT, weights: Pairs, state: Pairs, run: dict) -> None:
    """Begin a checkpoint of whole tensors, written by rank 0; all ranks call it.

    model     for its config; it may be on the meta device
    weights   (name, whole tensor), as from `named_parameters`; iterating over them gathers the
              tensors one at a time, and only rank 0 holds all of them (in host memory)
    state     ("<parameter name>/<key>", whole tensor) of the optimizer, likewise
    run       a JSON dictionary with "step" and "optimizer"
    """
    writes = folder.rank == 0
    held = [
        {name: _on_host(tensor, folder.background) for name, tensor in pairs if writes}
        for pairs in (weights, state)
    ]
    record = _record(run)

    def write(beside: Path) -> None:
        model.write_pretrained(beside, tensors=held[0])
        save_file(held[1], str(beside / f"{STATE}.safetensors"))
        _write_record(beside, record)

    folder.save(run["step"], write if writes else None)


def save_pieces(folder: RunFolder, model: GPT, weights: Pieces, state: Pieces, run: dict) -> None:
    """Begin a checkpoint of one file per rank, which holds the shards that the rank passes here;
    rank 0 adds the files that exist only once."""
    held = [
        {name: (_on_host(piece, folder.background), at) for name, (piece, at) in pieces.items()}
        for pieces in (weights, state)
    ]
    record = _record(run)

    def write(beside: Path) -> None:
        for stem, pieces in zip((WEIGHTS, STATE), held):
            rank_files.write(beside / RankFiles.name(stem, folder.rank), pieces)
        if folder.rank == 0:
            model.write_config(beside)
            _write_record(beside, record)

    folder.save(run["step"], write)


def _on_host(tensor, copy):
    """The tensor, or this rank's shard, in host memory; copy: training continues meanwhile."""
    tensor = tensor.detach()
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.to("cpu", copy=copy).contiguous()


def _record(run):
    """The contents of training.json."""
    rng = bytes(torch.get_rng_state().tolist()).hex()
    return {**run, "format": FORMAT, "rng": rng}


def _write_record(beside, record):
    hf_format.write_json(beside / TRAINING, record)
    if tokenizer := record.get("config", {}).get("tokenizer"):
        hf_format.copy_tokenizer(tokenizer, beside)


# ---- reading


def read_run(folder: Path | str) -> dict:
    """training.json of a checkpoint folder, as a dict: step, options and so on."""
    folder = hf_format.recover(folder)
    if not folder.exists():
        raise CheckpointError(f"checkpoint folder {folder} does not exist")
    if not (folder / TRAINING).exists():
        raise CheckpointError(f"{folder} has no {TRAINING}: it holds no training run to resume")
    run = hf_format.read_json(folder / TRAINING)
    if run.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / TRAINING} has format {run.get('format')!r}, "
            f"but this version reads format {FORMAT}"
        )
    missing = [key for key in ("step", "optimizer", "rng") if key not in run]
    if missing:
        raise CheckpointError(f"{folder / TRAINING} has no {missing[0]}")
    _check_record(run, folder / TRAINING)
    return run


def _check_record(run, where):
    """Raise CheckpointError for the first entry that `save_whole` would not have written."""
    try:
        untrusted.check(run, RECORD)
        for key in ("step", "skipped", "seconds"):
            if not 0 <= run.get(key, 0) < math.inf:
                raise ValueError(f"{key} {run[key]!r:.40} is not a valid value")
        if run.get("row", run)["step"] != run["step"]:
            raise ValueError("row belongs to another step")
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{where}: {error}") from None
    try:
        length = len(bytes.fromhex(run["rng"]))
    except ValueError:
        length = 0
    if length != torch.get_rng_state().numel():
        raise CheckpointError(f"{where}: rng is not a state of torch's random number generator")


def load_weights(folder: Path | str, model: GPT, kind: str) -> dict:
    """Read the weights into a model that has not been split yet; return `run`.

    kind   of the optimizer that `read_state` will load; it is checked too.
    A model on the meta device is only checked: `hand_out` fills its shards.
    """
    run = read_run(folder)
    folder = hf_format.recover(folder)
    _check_same_model(folder, model.config)
    if run["optimizer"] != kind:
        raise CheckpointError(
            f"{folder} was trained with optimizer {run['optimizer']!r}; this run asks for {kind!r}"
        )
    parameters = dict(model.named_parameters())
    weights, state = (_stored(folder, stem).headers() for stem in (WEIGHTS, STATE))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    hf_format.check_shapes(weights, shapes, where=folder)
    if state or run["step"] > run.get("skipped", 0):  # skipped steps (fp16) leave no state
        expected = state_shapes(parameters.items(), kind)
        hf_format.check_shapes(state, expected, where=f"{folder / STATE}.safetensors")
    if not model.lm_head.weight.is_meta:
        with torch.no_grad():
            hand_out(folder, lambda name, tensor: parameters[name].copy_(tensor))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(run["rng"])), dtype=torch.uint8))
    return run


def hand_out(folder: Path | str, put: Callable[[str, torch.Tensor], None]) -> None:
    """Call put(name, whole tensor) for every weight of a checkpoint, one at a time."""
    for name, tensor in _stored(hf_format.recover(folder), WEIGHTS).tensors():
        put(name, tensor)


def read_state(folder: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ("<parameter name>/<key>", whole tensor) of the optimizer's state, one at a time."""
    return _stored(hf_format.recover(folder), STATE).tensors()


class _WholeTensors:
    """A file of whole tensors, with the methods of RankFiles."""

    def __init__(self, folder: Path, stem: str):
        if stem == WEIGHTS:
            self._headers = hf_format.read_headers(folder)
            return
        file = folder / f"{stem}.safetensors"
        if not file.exists():
            raise CheckpointError(f"{file} is missing: the folder was only partly copied")
        self._headers = {n: (file, shape) for n, shape in hf_format.file_shapes(file).items()}

    def headers(self):
        return self._headers

    def tensors(self):
        return hf_format.read_tensors(self._headers)


def _stored(folder, stem):
    return (RankFiles if RankFiles.files(folder, stem) else _WholeTensors)(folder, stem)


def _check_same_model(folder, config):
    """Names the first size in which the saved model differs, in the words of config.json."""
    saved = GPTConfig.from_hf(hf_format.read_config(folder)).to_hf()
    for name, value in config.to_hf().items():
        if saved[name] != value:
            raise CheckpointError(
                f"{folder} holds a model with {name} {saved[name]}, this run asks for {value}"
            )
