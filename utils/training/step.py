"""One step of a training run, composed according to its options.

`utils/training/train.py` holds the loop; an engine does the work of a step and holds the state:

    loss_sum = engine.backward(micro_batches, tokens)     all forward and backward passes
    grad_norm = engine.step(clip)                         the optimizer; None: skipped
    engine.loss_sum(x, y)                                 a forward pass, for evaluation

`TrainStep` is PyTorch alone; `utils/training/deepspeed.py` has the same methods on DeepSpeed. All
methods that communicate (those above, `weights`, `optimizer_state`, `finished`) must be called by
every rank, equally often. Ranks that work on the same tokens have the same loss; `counts` is true
on the one rank whose sums are to be added up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from utils.memory.checkpointing import recompute
from utils.memory.offload import OffloadedOptimizer, offloaded_activations
from utils.memory.precision import DTYPES, LossScaler, autocast, weight_format, weights_in
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, keep_from_compiling
from utils.models.moe import set_balance
from utils.parallel import full_tensor
from utils.parallel.context import own_positions
from utils.parallel.context.context_parallel import whole_sequences
from utils.parallel.ddp import DataParallel
from utils.parallel.mesh import Mesh
from utils.parallel.parallelize import (
    HEAD,
    Put,
    blocks,
    boundary,
    complete_gradients,
    parallelize,
    with_tied_copy,
)
from utils.parallel.pipeline import Pipeline
from utils.parallel.zero import ShardedMuon
from utils.training import checkpoint
from utils.training.config import TrainConfig
from utils.training.deepspeed import DeepSpeedEngine
from utils.training.optimizer import make_optimizer, state_shapes
from utils.training.run_folder import RunFolder

MicroBatches = Sequence[tuple[torch.Tensor, torch.Tensor]]

FULL_PRECISION = nullcontext()  # instead of autocast


def backward(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    global_tokens: int,
    world_size: int = 1,
    autocast: AbstractContextManager = FULL_PRECISION,
    scaler: LossScaler | None = None,
) -> torch.Tensor:
    """Run a forward and a backward pass of a rank's rows; return the sum of their losses, in nats.

    DDP averages gradients over ranks. A rank with fewer rows must count less, so each rank
    differentiates (its sum / all tokens of the step) times the world size: the average is then the
    gradient of the mean over all tokens, as on one rank. Likewise, gradients of micro-batches add
    up, and each is divided by the tokens of the whole step, so their sizes may differ.
    """
    with autocast:
        nats = model(x, y)
    share = nats * (world_size / global_tokens)
    (scaler.scale(share) if scaler else share).backward()
    return nats.detach()


def make_engine(
    model: GPT,
    config: TrainConfig,
    device: torch.device,
    mesh: Mesh,
    weights: Callable[[Put], None] | None = None,
) -> "DeepSpeedEngine | TrainStep":
    """The engine that `config` selects, for a whole model on the CPU, or on the meta device if
    `weights` supplies its values (see `utils.parallel.parallelize.fill_weights`)."""
    offloaded = config.offloads()
    balance = config.balance / config.layers * config.seq
    if config.engine == "deepspeed":
        return DeepSpeedEngine(
            model,
            mesh,
            device,
            zero_stage=config.zero_stage(),
            lr=config.lr,
            weight_decay=config.weight_decay,
            accumulation_steps=config.accumulation_steps(),
            clip=config.clip,
            precision=config.precision,
            recompute=config.recompute,
            balance=balance,
            offload=offloaded,
        )
    ranks = parallelize(
        model,
        mesh,
        device,
        context=config.context,
        sequence_parallel=config.sequence_parallel,
        chunks=config.stages_per_rank(),
        weights=weights,
        recompute=config.recompute,
        zero_stage=config.zero_stage(),
        precision=config.precision,
        offload="parameters" in offloaded,
    )
    return TrainStep(
        ranks,
        mesh,
        device,
        model.config,
        partial(
            make_optimizer,
            kind=config.optimizer,
            lr=config.lr,
            adamw_lr=config.adamw_lr,
            weight_decay=config.weight_decay,
        ),
        precision=config.precision,
        schedule=config.schedule,
        sequence_parallel=config.sequence_parallel,
        balance=balance,
        compile=config.compile,
        offload_activations="activations" in offloaded,
        offload_optimizer="optimizer" in offloaded,
    )


class TrainStep:
    """Takes this rank's steps in plain PyTorch.

    ranks              the result of `parallelize`: this rank's stages, and how the data-parallel
                       ranks exchange gradients
    model_config       sizes of the whole model
    optimizer          called with (name, parameter) pairs and muon=class, returns `Optimizers`
    precision          of the passes: bf16 computes with a copy of the weights, by FSDP2 or
                       `weights_in`; fp16 under autocast, which keeps sums in fp32
    schedule, sequence_parallel   of the pipeline, if there is one
    balance            weight of the balancing loss of experts, per token of a sequence
    """

    def __init__(
        self,
        ranks: DataParallel,
        mesh: Mesh,
        device: torch.device,
        model_config: GPTConfig,
        optimizer: Callable,
        *,
        precision: str = "fp32",
        schedule: str = "1f1b",
        sequence_parallel: bool = False,
        balance: float = 0.0,
        compile: bool = False,
        offload_activations: bool = False,
        offload_optimizer: bool = False,
    ):
        self.ranks, self.mesh, self.device, self.balance = ranks, mesh, device, balance
        self.model_config, self.weight_format = model_config, weight_format(precision)
        self.autocast, self.copies = FULL_PRECISION, nullcontext
        if precision == "fp16":
            self.autocast = autocast(precision, device)
        elif precision == "bf16" and not ranks.shards_parameters:
            self.copies = partial(weights_in, DTYPES[precision], ranks.stages)
        self.scaler = LossScaler(precision, device, averages_over=ranks.averages_over)
        self.saved_tensors = offloaded_activations if offload_activations else nullcontext
        # ranks that work on the same tokens have the same loss; one of them reports it
        self.counts = mesh.pp.is_last and mesh.tp.is_first
        self.whole_here = mesh.pp.size * mesh.tp.size * mesh.ep.size == 1
        self.pipeline = None
        if mesh.pp.size > 1:
            in_16_bits = ranks.shards_parameters or precision == "bf16"
            hidden_format = DTYPES[precision] if in_16_bits else self.weight_format
            self.pipeline = Pipeline(
                ranks.stages,
                mesh.pp,
                schedule,
                self._share_of_loss,
                takes_targets=True,
                forward_context=self._forward,
                boundary=boundary(model_config, mesh, hidden_format, sequence_parallel),
                before_backward=ranks.before_backward,
            )
        self.model = ranks.module  # called if there is no pipeline
        if compile:
            keep_from_compiling(self.model)
            self.model = torch.compile(self.model)
        self.offloaded, self.optimizer = self._make_optimizer(optimizer, offload_optimizer)

    def _make_optimizer(self, make, offload):
        """(the offloaded optimizer or None, the `Optimizers`)."""
        owned = self.ranks.owned
        splits_matrices = self.ranks.shards_parameters or self.mesh.tp.size > 1

        def make_for(parameters):
            full_tensor.keep_splits(owned.values(), parameters)
            muon = ShardedMuon if splits_matrices else torch.optim.Muon
            return make(zip(owned, parameters), muon=muon)

        if not offload:
            return None, make_for(owned.values())
        offloaded = OffloadedOptimizer(make_for, list(owned.values()))
        return offloaded, offloaded.inner

    # ---- one step

    def backward(self, micro_batches: MicroBatches, global_tokens: int) -> torch.Tensor | float:
        """Run forward and backward passes of the micro-batches (x, y); return their summed loss.

        Gradients add up on the rank; `ranks` decides when they travel.
        """
        self.tokens, self.losses = global_tokens, 0.0
        share = self.ranks.averages_over / global_tokens
        micro_batches = [(x, own_positions(y, self.mesh.cp)) for x, y in micro_batches]
        for stage in self.ranks.stages:
            set_balance(stage, self.balance * (share * self.scaler.rank_factor))
        with self.copies():
            if self.pipeline:
                with self.ranks.pipeline():
                    self.pipeline.run(micro_batches)
            for number, (x, y) in enumerate(() if self.pipeline else micro_batches, start=1):
                with self.ranks.micro_batch(last=number == len(micro_batches)):
                    self.losses += backward(
                        self.model, x, y, global_tokens, self.ranks.averages_over, self._forward(),
                        self.scaler,
                    )
        complete_gradients(self.ranks.stages, self.mesh)
        self.ranks.reduce()
        return self.losses if self.counts else 0.0

    def _share_of_loss(self, loss, y):
        """The value from which a micro-batch's backward pass starts, at the end of a pipeline."""
        self.losses += loss.detach()
        return self.scaler.scale(loss * (self.ranks.averages_over / self.tokens))

    @contextmanager
    def _forward(self):
        with self.saved_tensors(), self.autocast:
            yield

    def step(self, clip: float) -> float | None:
        """Clip the gradients to norm `clip`, update the parameters, clear the gradients.

        Returns the norm before clipping, or None if fp16 overflowed and nothing was updated.
        """
        gradients = full_tensor.local_shards(self.ranks.owned.values())
        self.scaler.unscale_(gradients)
        norm = full_tensor.clip_gradients(gradients, clip, self.device, self._counted(gradients))
        stepped = self.scaler.step(self.offloaded or self.optimizer)
        self.ranks.after_step()
        self.ranks.zero_grad()
        return norm.item() if stepped else None

    def _counted(self, gradients):
        """The shards whose gradients this rank counts in the norm; None: all there are."""
        if self.ranks.replicates and self.whole_here:
            return None
        pairs = zip(self.ranks.owned.items(), gradients)
        return [part for (name, whole), part in pairs if self._is_counted(name, whole)]

    def _is_counted(self, name, parameter):
        """Whether this rank counts a parameter: of several copies, the first rank's counts."""
        if self.mesh.tp.index and not full_tensor.split_of(parameter):
            return False
        if name == HEAD and self.model_config.tie_embeddings and self.mesh.pp.size > 1:
            return False  # the first stage also has it
        return self.ranks.counts(name)

    def set_lr(self, scale: float) -> None:
        """Set every learning rate to `scale` times its peak."""
        self.optimizer.set_lr(scale)

    def loss_scale(self) -> float:
        """The factor by which fp16 multiplies the loss."""
        return self.scaler.factor

    def warm_up(self, micro_batches: MicroBatches, global_tokens: int) -> None:
        """Run passes and discard the gradients, before timing starts or a run resumes."""
        self.backward(micro_batches, global_tokens)
        self.ranks.zero_grad()

    @torch.no_grad()
    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | float:
        """The sum of the losses of these rows; 0 if another rank counts them."""
        y = own_positions(y, self.mesh.cp)
        with self.copies(), self.autocast:
            loss = self.pipeline.output(x, y) if self.pipeline else self.model(x, y)
        return loss if self.counts else 0.0

    def after_evaluation(self) -> None:
        self.ranks.after_evaluation()

    # ---- the whole state, for checkpoints and at the end

    @cached_property
    def whole(self) -> GPT:
        """The whole model on the meta device: names, shapes, formats."""
        return GPT.without_memory(self.model_config).to(self.weight_format)

    def weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield (name, whole tensor) of every parameter; on ranks other than 0, their shard."""
        bring, named = self._collector(), self.ranks.named
        for name, parameter in self.whole.named_parameters():
            mine = named[name].detach() if name in named else None
            yield name, bring(name, mine, parameter.shape, parameter.dtype)

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yield ("<parameter name>/<key>", tensor) likewise; nothing before the first step."""
        state = self.optimizer.named_state()
        if not state:
            return
        bring, parameters = self._collector(), dict(self.whole.named_parameters())
        for key, shape in state_shapes(parameters.items(), self.optimizer.kind).items():
            name = key.rsplit("/", 1)[0]
            mine = self.ranks.state(key, state) if name in self.ranks.named else None
            format = parameters[name].dtype if shape else torch.float32
            yield key, bring(name, mine, shape, format)

    def _collector(self):
        return full_tensor.OnRankZero(self.ranks.named, self.device, not self.whole_here).bring

    def save(self, folder: RunFolder, run: dict, sharded: bool = False) -> None:
        """Begin a checkpoint: of whole tensors, which only rank 0 holds, in host memory; or, if
        `sharded`, of one file per rank with its shards. All ranks call it."""
        run = {**run, "optimizer": self.optimizer.kind, "scaler": self.scaler.state_dict()}
        if sharded:
            checkpoint.save_pieces(folder, self.whole, *self._pieces(), run)
        else:
            checkpoint.save_whole(folder, self.whole, self.weights(), self.optimizer_state(), run)

    def _pieces(self):
        """(weights, optimizer's state) that this rank saves: the first rank saves shared values."""
        weights, state = {}, {}
        for name, parameter in self.ranks.owned.items():
            if self._is_counted(name, parameter):
                weights[name] = parameter.detach(), full_tensor.offset_of(parameter)
        for key, tensor in self.optimizer.named_state().items():
            _, offset = weights.get(key.rsplit("/", 1)[0], (None, None))
            if tensor.ndim == 0 and offset and not any(offset):
                state[key] = tensor, ()  # a count, once
            elif tensor.ndim and offset:
                state[key] = tensor, offset
        return weights, state

    def load(self, folder: str, run: dict) -> None:
        """Load this rank's shard of the optimizer's state from a checkpoint. The weights were
        loaded before the model was split."""
        self.scaler.load_state_dict(run.get("scaler", {}))

        def part_of(tensor, name):
            part = full_tensor.shard_of(tensor, self.ranks.named[name])
            return part.to_local() if self.offloaded and isinstance(part, DTensor) else part

        state = with_tied_copy(checkpoint.read_state(folder), self.model_config.tie_embeddings)
        self.optimizer.load_named_state(state, part_of)

    def finished(self) -> GPT | None:
        """The whole trained model. If ranks hold only parts of it: the model on rank 0's CPU, and
        None on the other ranks, for which it may be too large."""
        recompute(None, "none", layers=blocks(self.ranks.stages))
        self.ranks.release()
        if self.whole_here and not self.ranks.shards_parameters:
            return whole_sequences(self.ranks.stages[0])
        return full_tensor.full_model(self.model_config, self.weights())
