"""Save and resume a training run, on any number of ranks.

    folder/config.json, model.safetensors    the model: opens in transformers too
    folder/optimizer.safetensors             the optimizer's state, by parameter name
    folder/training.json                     step, options, random numbers

No pickle, so nothing is run when a checkpoint is read. The folder appears whole or not at all.
"""

import torch
from safetensors.torch import save_file

from utils import hf_format
from utils.gpt_config import GPTConfig
from utils.hf_format import CheckpointError

OPTIMIZER = "optimizer.safetensors"
TRAINING = "training.json"
FORMAT = 1  # of training.json; raised when an older reader would misread a newer file


def save(folder, model, optimizer, run):
    """Writes model, optimizer (`Optimizers`) and `run`, a JSON dictionary with at least "step".

    Call it on one rank only: every rank of data parallel training holds the same state.
    """
    state = {
        name: tensor.detach().contiguous().cpu() for name, tensor in optimizer.named_state().items()
    }
    rng = bytes(torch.get_rng_state().tolist()).hex()
    record = {**run, "format": FORMAT, "optimizer": optimizer.kind, "rng": rng}
    try:
        with hf_format.replacing(folder) as beside:
            model.write_pretrained(beside)
            save_file(state, str(beside / OPTIMIZER))
            hf_format.write_json(beside / TRAINING, record)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} could not be written: {error}") from None


def read_run(folder):
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


def load(folder, model, optimizer):
    """Reads a saved run into a model and a fresh optimizer of the same kind; returns `run`.

    Everything is checked before anything is changed. Also sets torch's random numbers on the CPU.
    Raises CheckpointError naming what differs.
    """
    run = read_run(folder)
    folder = hf_format.recover(folder)
    _check_same_model(folder, model.config)
    if run["optimizer"] != optimizer.kind:
        raise CheckpointError(
            f"{folder} was trained with optimizer {run['optimizer']!r}, "
            f"this run asks for {optimizer.kind!r}"
        )
    parameters = dict(model.named_parameters())
    weights = hf_format.read_headers(folder)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    hf_format.check_shapes(weights, shapes, where=folder)
    if not (folder / OPTIMIZER).exists():
        raise CheckpointError(f"{folder / OPTIMIZER} is missing: the folder was copied in part")
    state = {
        name: (folder / OPTIMIZER, shape)
        for name, shape in hf_format.file_shapes(folder / OPTIMIZER).items()
    }
    if state or run["step"] > 0:
        hf_format.check_shapes(state, optimizer.state_shapes(), where=folder / OPTIMIZER)
    with torch.no_grad():
        for name, tensor in hf_format.read_tensors(weights):
            parameters[name].copy_(tensor)
    optimizer.load_named_state(hf_format.read_tensors(state))
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(run["rng"])), dtype=torch.uint8))
    return run


def _check_same_model(folder, config):
    """Names the first size in which the saved model differs, in the words of config.json."""
    saved = GPTConfig.from_hf(hf_format.read_config(folder)).to_hf()
    for name, value in config.to_hf().items():
        if saved[name] != value:
            raise CheckpointError(
                f"{folder} holds a model with {name} {saved[name]}, this run asks for {value}"
            )
