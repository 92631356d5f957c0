"""What happens inside one step of a training run, composed of the parts that its options ask for.

`utils/training/train.py` holds the loop; an engine does the work of a step and holds the state:

    loss_sum = engine.backward(micro_batches, tokens)     forward and backward passes of all of them
    grad_norm = engine.step(clip)                         the optimizer; None: it was skipped
    engine.loss_sum(x, y)                                 a forward pass, to measure

`TorchEngine` is PyTorch alone; `utils/training/deepspeed.py` has the same methods on DeepSpeed. All
methods that communicate (those above, `weights`, `optimizer_state`, `finished`) must be called by
every rank, equally often. Ranks that work on the same rows know the same loss: `counts` is true on
one of them, whose sums are to be added up.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.distributed.tensor import DTensor

from utils.memory.checkpointing import recompute
from utils.memory.offload import OffloadedOptimizer, offloaded_activations
from utils.memory.precision import LossScaler, autocast
from utils.models.gpt import cross_entropy
from utils.models.moe import is_expert, keep_from_compiling
from utils.parallel import full_tensor
from utils.parallel import zero as sharded
from utils.parallel.ddp import SummedGradients, data_parallel, without_sync
from utils.parallel.parallelize import Pieces
from utils.training import checkpoint
from utils.training.optimizer import make_optimizer, state_shapes

FULL_PRECISION = nullcontext()  # instead of autocast


def backward(
    model, x, y, global_tokens, world_size=1, autocast=FULL_PRECISION, scaler=None, loss=None
):
    """One forward and backward pass of a rank's rows; returns the sum of their losses, in nats.

    DDP averages gradients over ranks. A rank with fewer rows must count less, so each rank hands
    over (its sum / all tokens of the step) times the world size: the average is then the gradient
    of the mean over all tokens, as on one rank. The same holds for micro-batches, whose gradients
    add up: each is divided by the tokens of the whole step, so their sizes need not be equal.
    """
    with autocast:
        logits = model(x)  # (B_local, T, V)
    nats = (loss or cross_entropy)(logits, y, reduction="sum")
    share = nats * (world_size / global_tokens)
    (scaler.scale(share) if scaler else share).backward()
    return nats.detach()


def make_engine(model, config, device, mesh, weights=None):
    """The engine that `config` asks for, over a whole model on the CPU, or on the meta device if
    `weights` hands out what to fill its pieces with (see `Pieces.fill`)."""
    if config.engine == "deepspeed":
        from utils.training.deepspeed import DeepSpeedEngine  # its import takes seconds

        return DeepSpeedEngine(model, config, device, mesh)
    return TorchEngine(model, config, device, mesh, weights)


class TorchEngine:
    """Every rank's part of a step in plain PyTorch.

    The order matters: the model is broken up into pieces, recomputation changes their blocks, then
    they are sharded or made data parallel, and only then does the optimizer see the parameters that
    this rank updates.
    """

    def __init__(self, model, config, device, mesh, weights=None):
        self.device, self.kind, self.level = device, config.optimizer, config.level()
        self.mesh, self.config = mesh, config
        self.autocast = autocast(config.precision, device)
        self.scaler = LossScaler(config.precision, device)
        self.saved_tensors = nullcontext
        if "activations" in config.offloads():
            self.saved_tensors = offloaded_activations
        self.pieces = Pieces(model, config, mesh)
        self.counts = self.pieces.counts
        if weights:
            self.pieces.fill(weights)
        recompute(None, config.recompute, layers=self.pieces.blocks())

        self.averages_over = mesh.dp.size  # DDP and FSDP take the mean over the ranks
        self.parallel, self.parts = None, []  # what is called; what exchanges gradients afterwards
        self.sharded = self.pieces.stages if self.level >= 2 else []
        if self.sharded:  # block by block: a device need not hold the whole piece
            offload = "parameters" in config.offloads()
            way = (self.level, device, config.precision, offload, mesh)
            meshes = list(sharded.device_meshes(mesh, device))
            for piece in self.sharded:
                sharded.shard(piece, *way, meshes)
        else:
            self._move_and_share(config, device, mesh)
        self.pieces.connect(self._share_of_loss, self._forward, self._before_backward)
        self.parallel = self.parallel or self.pieces.model
        if config.compile:
            keep_from_compiling(self.parallel)
            self.parallel = torch.compile(self.parallel)

        self.named = self.pieces.named()
        self.updated = self.named  # what this rank steps
        if self.parts:
            self.updated = {name: p for part in self.parts for name, p in part.owned.items()}
        self.optimizer = self._make_optimizer(config)

    def _move_and_share(self, config, device, mesh):
        """Whole pieces on the device, whose gradients DDP adds up, or, where DDP does not see all
        backward passes alike, something simpler after the last one."""
        for piece in self.pieces.stages:
            piece.to(device)
        if self.level == 1 or mesh.pp.size * mesh.ep.size > 1:
            make = sharded.WholeParameters if self.level == 1 else SummedGradients
            self.parts = [make(named, axis) for named, axis in self.pieces.by_axis()]
            self.averages_over = 1  # they take the sum
        elif mesh.dp.size > 1:
            self.parallel = data_parallel(self.pieces.model, mesh.dp.group)

    def _make_optimizer(self, config):
        splits_matrices = self.level >= 2 or self.mesh.tp.size > 1

        def make(parameters):
            full_tensor.keep_splits(self.updated.values(), parameters)
            return make_optimizer(
                zip(self.updated, parameters),
                config.optimizer,
                config.lr,
                config.adamw_lr,
                config.weight_decay,
                muon=sharded.ShardedMuon if splits_matrices else torch.optim.Muon,
            )

        self.offloaded = None
        if "optimizer" not in config.offloads():
            return make(self.updated.values())
        self.offloaded = OffloadedOptimizer(make, list(self.updated.values()))
        return self.offloaded.inner

    # ---- one step

    def backward(self, micro_batches, global_tokens):
        """Forward and backward passes of a step's micro-batches (x, y); returns their losses' sum.

        Data parallel and ZeRO-1 accumulate on the rank and communicate with the last micro-batch.
        ZeRO-2 and 3 have no room for whole gradients: they reduce those of every micro-batch.
        """
        self.tokens, self.losses = global_tokens, 0.0
        share = self.averages_over / global_tokens
        self.pieces.set_balance(share * self.scaler.factor)
        if self.pieces.pipeline:
            self._backward_of_pipeline(micro_batches)
        else:
            for number, (x, y) in enumerate(micro_batches, start=1):
                self._backward_of_one(x, y, last=number == len(micro_batches))
        for piece in self.sharded:
            sharded.mean_over_dp(piece, self.mesh)
        self.pieces.complete_gradients()
        for part in self.parts:
            part.reduce_gradients()
        return self.losses if self.counts else 0.0

    def _backward_of_one(self, x, y, last):
        if self.level == 2:
            sharded.keep_gathered(self.pieces.model, not last)
        with without_sync(self.parallel, last):
            self.losses += backward(
                self.parallel, x, y, self.tokens, self.averages_over, self._forward(), self.scaler,
                self.pieces.loss_of,
            )  # fmt: skip

    def _backward_of_pipeline(self, micro_batches):
        for piece in self.sharded:
            sharded.keep_gathered(piece, self.level == 2)
        self.pieces.pipeline.run(micro_batches)
        for piece in self.sharded:
            sharded.let_go(piece)

    def _share_of_loss(self, logits, y):
        """What a micro-batch's backward pass begins with, at the end of a pipeline."""
        loss = self.pieces.loss_of(logits, y, reduction="sum")
        self.losses += loss.detach()
        return self.scaler.scale(loss * (self.averages_over / self.tokens))

    def _before_backward(self, piece, last):
        if self.sharded:
            piece.set_is_last_backward(last)

    @contextmanager
    def _forward(self):
        with self.saved_tensors(), self.autocast:
            yield

    def step(self, clip):
        """Clips the gradients to norm `clip`, updates the parameters, clears the gradients.

        Returns the gradients' norm before, or None where fp16 overflowed and nothing was updated.
        """
        gradients = full_tensor.local_shards(self.updated.values())
        self.scaler.unscale_(gradients)
        norm = full_tensor.clip_gradients(gradients, clip, self.device, self._counted(gradients))
        stepped = self.scaler.step(self.offloaded or self.optimizer)
        for part in self.parts:
            part.gather_parameters()
        self.zero_grad()
        return norm.item() if stepped else None

    def _counted(self, gradients):
        """Of these parts those whose gradients this rank counts; None: it has all there are."""
        if self.level == 0 and not self.config.splits_model():
            return None
        pairs = zip(self.updated.items(), gradients)
        return [part for (name, whole), part in pairs if self._is_counted(name, whole)]

    def _is_counted(self, name, parameter):
        """What is equal on several ranks is counted by the first of them."""
        replicas = self.mesh.edp if is_expert(name) else self.mesh.dp
        if self.level == 0 and replicas.index:
            return False
        if self.mesh.tp.index and not full_tensor.split_of(parameter):
            return False
        return not self.pieces.is_tied_copy(name)

    def zero_grad(self):
        for holder in self.parts or [self.offloaded or self.optimizer]:
            holder.zero_grad()

    def set_rate(self, scale):
        self.optimizer.set_rate(scale)

    def loss_scale(self):
        """What fp16 multiplies the loss by."""
        return self.scaler.factor

    def warm_up(self, micro_batches, global_tokens):
        """Passes for nothing, before the clock starts or a resumed run goes on."""
        self.backward(micro_batches, global_tokens)
        self.zero_grad()

    @torch.no_grad()
    def loss_sum(self, x, y):
        """The sum of the losses of these rows; 0 where another rank counts them."""
        if self.pieces.pipeline:
            logits = self.pieces.pipeline.logits(x)
            if logits is None:  # only the last stage has them
                return 0.0
        else:
            with self.autocast:
                logits = self.parallel(x)
        loss = self.pieces.loss_of(logits, y, reduction="sum")
        return loss if self.counts else 0.0

    def after_evaluation(self):
        for piece in self.sharded:
            sharded.let_go(piece)

    # ---- the state as a whole, for checkpoints and at the end

    def weights(self):
        """Yields (name, whole tensor) of every parameter; on ranks but 0 what they have of it."""
        bring = self._collector()
        for name, parameter in self.pieces.whole.named_parameters():
            mine = self.named[name].detach() if name in self.named else None
            yield name, bring(name, mine, parameter.shape, parameter.dtype)

    def optimizer_state(self):
        """Yields ("<parameter name>/<key>", tensor) likewise; nothing before the first step."""
        state = self.optimizer.named_state()
        if not state:
            return
        bring, parameters = self._collector(), dict(self.pieces.whole.named_parameters())
        for key, shape in state_shapes(parameters.items(), self.kind).items():
            name = key.rsplit("/", 1)[0]
            mine = self._state_here(name, key, state) if name in self.named else None
            format = parameters[name].dtype if shape else torch.float32
            yield key, bring(name, mine, shape, format)

    def _collector(self):
        return full_tensor.OnRankZero(self.named, self.device, self.config.splits_model()).bring

    def _state_here(self, name, key, state):
        for part in self.parts:
            if name in part.named:
                return part.from_owner(key, state)
        return state[key]

    def save(self, folder, run, writes):
        """Writes a checkpoint of whole tensors; only the rank that `writes` holds them all."""
        run = {**run, "optimizer": self.kind, "scaler": self.scaler.state_dict()}
        state = self.optimizer_state()
        checkpoint.save_parts(folder, self.pieces.whole, self.weights(), state, run, writes)

    def load(self, folder, run):
        """Takes the optimizer's state from a checkpoint, each rank its part. The weights were there
        before the model was split."""
        self.scaler.load_state_dict(run.get("scaler", {}))

        def part_of(tensor, name):
            part = full_tensor.shard_of(tensor, self.named[name])
            return part.to_local() if self.offloaded and isinstance(part, DTensor) else part

        state = self.pieces.with_tied_copy(checkpoint.read_state(folder))
        self.optimizer.load_named_state(state, part_of)

    def finished(self):
        """The trained model, whole and in one piece. Where a rank holds only parts of it, on rank
        0's CPU only, and None on the other ranks: the model may be too large for them."""
        recompute(None, "none", layers=self.pieces.blocks())
        for part in self.parts:
            part.release()
        if self.level < 2 and not self.config.splits_model():
            return self.pieces.model
        return full_tensor.full_model(self.pieces.whole.config, self.weights())
