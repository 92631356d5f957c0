"""Which options of a training run do not go together, each with its reason and a way out.

Everything else may be combined. A check raises ValueError with one sentence.
"""

from utils.data import corpus

OFFLOADS = ("activations", "optimizer", "parameters")


def check(config):
    """What can be said of a TrainConfig before it is known where it will run."""
    offloads = config.offloads()
    unknown = [name for name in offloads if name not in OFFLOADS]
    if unknown or ("none" in config.offload.split(",") and offloads):
        raise ValueError(
            f"--offload {config.offload} is not none or some of {', '.join(OFFLOADS)}, joined by "
            "commas"
        )
    if "parameters" in offloads and config.shard != "3":
        raise ValueError(
            "--offload parameters fetches the weights block by block, as --shard 3 does: add "
            "--shard 3 (one rank is enough)"
        )
    if config.compile and "activations" in offloads:
        raise ValueError(
            "--compile decides itself what is kept for the backward pass, so it does not go with "
            "--offload activations: leave one of them out"
        )
    splits_matrices = config.engine == "torch" and config.level() >= 2
    if config.optimizer == "muon" and splits_matrices and {"optimizer", "parameters"} & {*offloads}:
        raise ValueError(
            f"--optimizer muon needs whole matrices, which --shard {config.shard} with --offload "
            f"{config.offload} never puts together: take --optimizer adamw or --shard 1"
        )
    if config.engine == "deepspeed":
        _check_deepspeed(config, offloads)
    _check_parts(config)


def _check_deepspeed(config, offloads):
    if config.splits_model():
        raise ValueError(
            "--engine deepspeed shares out the rows only: take --engine torch with --pp, --tp or "
            "--ep"
        )
    if config.optimizer == "muon":
        raise ValueError(
            "--engine deepspeed flattens the parameters, and Muon needs matrices: add --optimizer "
            "adamw"
        )
    if config.precision == "fp64":
        raise ValueError(
            "--engine deepspeed keeps its weights in fp32: take --precision fp32 or bf16"
        )
    if config.precision == "fp16":
        # seen with 0.19.8 and torch_autocast: a norm of 78861 at scale 65536 where it is 1.203
        raise ValueError(
            "--engine deepspeed clips gradients while they are still multiplied by fp16's loss "
            "scale: take --precision bf16 or --engine torch"
        )
    if config.compile:
        raise ValueError("--compile is for --engine torch: leave one of them out")
    if "optimizer" in offloads and config.shard == "none":
        raise ValueError(
            "--engine deepspeed offloads the optimizer of ZeRO only: add --shard 1, 2 or 3"
        )


def _check_parts(config):
    """How the model is broken up."""
    if config.micro_batches not in (None, config.accumulate) and config.accumulate > 1:
        raise ValueError(
            f"--accumulate {config.accumulate} and --micro-batches {config.micro_batches} are two "
            "words for one thing: give one of them"
        )
    if config.compile and config.splits_model():
        raise ValueError("--compile is for whole models: leave it out with --pp, --tp or --ep")
    if config.sequence_parallel and config.tp == 1:
        raise ValueError("--sequence-parallel shares the positions over --tp's ranks: add --tp 2")
    if config.ep > (config.experts or 1):
        raise ValueError(
            f"--ep {config.ep} shares out {config.experts or 'no'} experts: give --experts "
            f"{config.ep} or more"
        )
    if config.chunks and config.chunks > 1:
        if config.pp == 1:
            raise ValueError(f"--chunks {config.chunks} are pieces of a pipeline: add --pp 2")
        if config.schedule not in ("interleaved", "gpipe"):
            raise ValueError(
                f"--schedule {config.schedule} has one piece on each rank: take interleaved with "
                f"--chunks {config.chunks}"
            )
    if config.layers < config.pp * config.pieces():
        raise ValueError(
            f"--layers {config.layers} cannot be cut into {config.pp * config.pieces()} pieces, "
            f"{config.pieces()} on each of {config.pp} ranks: give more layers, or smaller --pp "
            "or --chunks"
        )
    if config.ep > 1 and config.recompute == "selective" and config.level() >= 2:
        raise ValueError(
            f"--recompute selective loses count where --shard {config.shard} gathers the experts "
            "of --ep inside a block: take --recompute full or --shard 1"
        )
    if config.pp > 1 and config.schedule == "zero-bubble" and config.level() >= 2:
        raise ValueError(
            f"--schedule zero-bubble computes the gradients of weights when --shard {config.shard} "
            "has sent them on already: take --shard 1 or --schedule 1f1b"
        )


def check_ranks(config, world_size):
    """What depends on the number of ranks."""
    ranks = config.mesh_sizes(world_size)["dp"]
    corpus.share_of_batch(config.batch, 0, ranks)
    least = config.batch // ranks  # rows of the rank that has fewest
    if least < config.parts():
        asked = "--micro-batches" if config.micro_batches else "--accumulate"
        raise ValueError(
            f"{asked} {config.parts()} leaves micro-batches without a row, because some "
            f"ranks have {least} of the {config.batch} rows: raise --batch to "
            f"{config.parts() * ranks} or more"
        )
