"""Save and resume a training run, on any number of ranks, however they split it.

    folder/config.json, model.safetensors    the model: opens in transformers too
    folder/optimizer.safetensors             the optimizer's state, by parameter name
    folder/training.json                     step, options, random numbers
    folder/tokenizer.json                    where tokens are not bytes

The files hold whole tensors, so what N ranks wrote, sharded or not, opens on any other number. No
pickle, so nothing is run when a checkpoint is read. The folder appears whole or not at all.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.training.optimizer import Optimizers, state_shapes

OPTIMIZER = "optimizer.safetensors"
TRAINING = "training.json"
FORMAT = 1  # of training.json; raised when an older reader would misread a newer file


def save(folder: Path | str, model: GPT, optimizer: Optimizers, run: dict) -> None:
    """Writes model, optimizer (`Optimizers`) and `run`, a JSON dictionary with at least "step".

    Call it on one rank only, where that rank holds the whole state; `save_parts` is for the rest.
    """
    run = {**run, "optimizer": optimizer.kind}
    _write(folder, model, dict(model.named_parameters()), optimizer.named_state(), run)


def save_parts(
    folder: Path | str,
    model: GPT,
    weights: Iterable[tuple[str, torch.Tensor]],
    state: Iterable[tuple[str, torch.Tensor]],
    run: dict,
    writes: bool,
) -> None:
    """The same where ranks hold parts: all of them call it, and one of them `writes`.

    weights, state   iterators over (name, whole tensor); going through them is what gathers the
                     tensors, one at a time, so only the writing rank holds all (in host memory)
    """
    held = [
        {name: tensor.detach().cpu() for name, tensor in pairs if writes}  # all go through them
        for pairs in (weights, state)
    ]
    if writes:
        _write(folder, model, *held, run)


def _write(folder, model, weights, state, run):
    state = {name: tensor.detach().contiguous().cpu() for name, tensor in state.items()}
    rng = bytes(torch.get_rng_state().tolist()).hex()
    record = {**run, "format": FORMAT, "rng": rng}
    try:
        with hf_format.replacing(folder) as beside:
            model.write_pretrained(beside, tensors=weights)
            save_file(state, str(beside / OPTIMIZER))
            hf_format.write_json(beside / TRAINING, record)
            if tokenizer := run.get("config", {}).get("tokenizer"):
                hf_format.copy_tokenizer(tokenizer, beside)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} could not be written: {error}") from None


def read_run(folder: Path | str) -> dict:
    """training.json of a folder that `save` wrote, as a dict: step, options and so on."""
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
    return run


def load(folder: Path | str, model: GPT, optimizer: Optimizers) -> dict:
    """Reads a saved run into a model and a fresh optimizer of the same kind; returns `run`.

    Everything is checked before anything is changed. Also sets torch's random numbers on the CPU.
    Raises CheckpointError naming what differs.
    """
    run = load_weights(folder, model, optimizer.kind)
    optimizer.load_named_state(read_state(folder))
    return run


def load_weights(folder: Path | str, model: GPT, kind: str) -> dict:
    """The first half of `load`: the weights of a model that is still whole, before it is split.

    kind   of the optimizer that `read_state` is for; it is checked too.
    A model on the meta device, which has no memory, is only compared: `hand_out` is for its shards.
    """
    run = read_run(folder)
    folder = hf_format.recover(folder)
    _check_same_model(folder, model.config)
    if run["optimizer"] != kind:
        raise CheckpointError(
            f"{folder} was trained with optimizer {run['optimizer']!r}, this run asks for {kind!r}"
        )
    parameters = dict(model.named_parameters())
    weights = hf_format.read_headers(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    hf_format.check_shapes(weights, shapes, where=folder)
    if not (folder / OPTIMIZER).exists():
        raise CheckpointError(f"{folder / OPTIMIZER} is missing: the folder was copied in part")
    state = _state_headers(folder)
    if state or run["step"] > run.get("skipped", 0):  # skipped steps (fp16) leave no state
        expected = state_shapes(parameters.items(), kind)
        hf_format.check_shapes(state, expected, where=folder / OPTIMIZER)
    if not model.lm_head.weight.is_meta:
        with torch.no_grad():
            hand_out(folder, lambda name, tensor: parameters[name].copy_(tensor))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(run["rng"])), dtype=torch.uint8))
    return run


def hand_out(folder: Path | str, put: Callable[[str, torch.Tensor], None]) -> None:
    """put(name, whole tensor) for every weight of a checkpoint, one at a time."""
    for name, tensor in hf_format.read_tensors(hf_format.read_headers(folder)):
        put(name, tensor)


def read_state(folder: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    """The second half: yields ("<parameter name>/<key>", whole tensor) of the optimizer's state."""
    return hf_format.read_tensors(_state_headers(hf_format.recover(folder)))


def _state_headers(folder):
    file = folder / OPTIMIZER
    return {name: (file, shape) for name, shape in hf_format.file_shapes(file).items()}


def _check_same_model(folder, config):
    """Names the first size in which the saved model differs, in the words of config.json."""
    saved = GPTConfig.from_hf(hf_format.read_config(folder)).to_hf()
    for name, value in config.to_hf().items():
        if saved[name] != value:
            raise CheckpointError(
                f"{folder} holds a model with {name} {saved[name]}, this run asks for {value}"
            )
