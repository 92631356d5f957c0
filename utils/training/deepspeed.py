"""A training step on DeepSpeed, with the methods of `step.TrainStep` and ZeRO 0 to 3 underneath.

DeepSpeed takes the model, the optimizer and a dictionary, and then decides itself when to reduce
gradients and gather parameters. The loss curve and the checkpoints are the same as PyTorch's.

    stage 0   data parallel              stage 2   gradients sharded too
    stage 1   optimizer state sharded    stage 3   parameters sharded too

Its options: https://www.deepspeed.ai/docs/config-json/. On a CPU nothing is compiled: the helpers
that DeepSpeed would build there (its own Adam, shared-memory collectives) are not used.
"""

import importlib
import math
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

from utils.memory.checkpointing import recompute as recompute_layers
from utils.memory.offload import offloaded_activations
from utils.memory.precision import DTYPES, is_mixed
from utils.models.gpt import GPT
from utils.models.moe import set_balance
from utils.parallel.full_tensor import full_model
from utils.parallel.mesh import Mesh
from utils.training import checkpoint
from utils.training.optimizer import STATE, make_optimizer
from utils.training.run_folder import RunFolder

MOMENTS = [key for key in STATE[torch.optim.AdamW] if key != "step"]


def import_deepspeed(device: torch.device) -> ModuleType:
    """The package, prepared for a run. Raises ValueError if it is not installed."""
    on_cpu = device.type == "cpu"
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # it reads a variable that torchrun would set
    os.environ.setdefault("LOCAL_RANK", str(device.index or dist.get_rank()))
    try:
        import deepspeed
        from deepspeed.runtime import compiler, torch_autocast
        from deepspeed.utils import groups
    except ImportError as error:
        raise ValueError(f"--engine deepspeed cannot be used here: {error}") from None
    if on_cpu:  # its ZeRO imports its Muon, which would load torch's compiler: a second per rank
        with mock.patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)
    # forget an earlier run in this process: its autocast, and its group, which may be gone
    groups._WORLD_GROUP = None
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    return deepspeed


def settings(
    device: torch.device,
    ranks: int,
    parameters: int,
    *,
    zero_stage: int,
    accumulation_steps: int = 1,
    clip: float = 1.0,
    precision: str = "fp32",
    offload: Collection[str] = (),
) -> dict:
    """The dictionary for DeepSpeed.

    parameters           number of parameters of the whole model
    accumulation_steps   micro-batches per step
    offload              those of "optimizer" and "parameters" that host memory holds
    """
    pinned = {"device": "cpu", "pin_memory": device.type == "cuda"}
    # elements per bucket: at most 32 MiB, like DDP's 25 MB; DeepSpeed's default of 500 million
    # makes buffers of 2 GB even for a small model
    bucket = min(2**23, parameters)
    zero = {
        "stage": zero_stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_param_persistence_threshold": 0,  # small parameters are sharded too
    }
    if "optimizer" in offload:
        zero["offload_optimizer"] = pinned
    if "parameters" in offload:
        zero.update(offload_param=pinned, offload_optimizer=pinned)
    result = {
        "train_micro_batch_size_per_gpu": 1,  # only the product of the three matters
        "gradient_accumulation_steps": accumulation_steps,
        "train_batch_size": accumulation_steps * ranks,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
    }
    if is_mixed(precision):  # as in torch: weights in fp32, matmuls under autocast
        name = str(DTYPES[precision]).removeprefix("torch.")
        result["torch_autocast"] = {"enabled": True, "dtype": name}
    return result


class DeepSpeedEngine:
    """Takes this rank's steps with DeepSpeed and AdamW, with these options:

    zero_stage           0 to 3
    lr, weight_decay     of AdamW; lr is the peak
    accumulation_steps   micro-batches per step
    clip                 largest norm of the gradients
    precision, recompute as named in `utils.memory`
    balance              weight of the balancing loss of experts, per token of a sequence
    offload              held in host memory: "optimizer", "parameters", "activations"
    """

    counts = True  # no two ranks work on the same rows
    kind = "adamw"

    def __init__(
        self,
        model: GPT,
        mesh: Mesh,
        device: torch.device,
        *,
        zero_stage: int = 0,
        lr: float | None = None,
        weight_decay: float = 0.0,
        accumulation_steps: int = 1,
        clip: float = 1.0,
        precision: str = "fp32",
        recompute: str = "none",
        balance: float = 0.0,
        offload: Collection[str] = (),
    ):
        self.world_size = mesh.dp.size
        self.deepspeed = import_deepspeed(device)
        self.device, self.stage, self.clip, self.balance = device, zero_stage, clip, balance
        self.saved_tensors = offloaded_activations if "activations" in offload else nullcontext
        recompute_layers(model, recompute)  # DeepSpeed moves the model itself
        optimizer = make_optimizer(model, self.kind, lr, weight_decay=weight_decay)
        self.adamw = optimizer.parts[0]  # torch's; with ZeRO its parameters become flat shards
        self.engine, *_ = self.deepspeed.initialize(
            model=model,
            optimizer=self.adamw,
            config=settings(
                device,
                self.world_size,
                model.config.parameter_count(),
                zero_stage=zero_stage,
                accumulation_steps=accumulation_steps,
                clip=clip,
                precision=precision,
                offload=offload,
            ),
            dist_init_required=False,
        )
        self.model = self.engine.module

    # ---- one step

    def backward(
        self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]], global_tokens: int
    ) -> torch.Tensor:
        """Run forward and backward passes of the micro-batches (x, y); return their summed loss.

        Gradients are averaged over the ranks, as with DDP, but not over the micro-batches
        (`scale_wrt_gas`): each is already divided by the tokens of the whole step.
        """
        share, losses = self.world_size / global_tokens, 0.0
        set_balance(self.model, self.balance * share)
        for number, (x, y) in enumerate(micro_batches, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(micro_batches))
            with self.saved_tensors():
                loss = self.engine(x, y)
            self.engine.backward(loss * share, scale_wrt_gas=False)
            losses += loss.detach()
        return losses

    def step(self, clip: float) -> float:
        """Clip, update and clear the gradients; return their norm before clipping.

        `clip` is ignored: DeepSpeed was given it at the start.
        """
        norm = None
        if self.stage == 0:  # only ZeRO stores the norm
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = get_total_norm(gradients)
        self.engine.step()
        return float(self.engine.get_global_grad_norm() if norm is None else norm)

    def set_lr(self, scale: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = scale * group["peak_lr"]

    def warm_up(
        self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]], global_tokens: int
    ) -> None:
        """Do nothing: DeepSpeed does not change its order after the first pass."""

    @torch.no_grad()
    def loss_sum(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sum of the losses of these rows."""
        return self.engine(x, y)

    def after_evaluation(self) -> None:
        """Do nothing: DeepSpeed itself releases what it gathered."""

    # ---- the whole state

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of every parameter."""
        for name, parameter in self.model.named_parameters():
            if self.stage < 3:
                yield name, parameter.detach()
                continue
            with self.deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach().clone()

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ("<parameter name>/<key>", whole tensor); nothing before the first step."""
        if not any("exp_avg" in state for state in self.adamw.state.values()):
            return
        self._link_state()
        count = self._counts()[0]
        for name, parameter in self.model.named_parameters():
            yield f"{name}/step", count.clone()
            for key in MOMENTS:
                if self.stage == 0:
                    yield f"{name}/{key}", self.adamw.state[parameter][key]
                    continue
                yield (
                    f"{name}/{key}",
                    self.deepspeed.utils.safe_get_full_optimizer_state(parameter, key),
                )

    def _counts(self):
        """AdamW's step counts, which are all equal."""
        return [state["step"] for state in self.adamw.state.values() if "step" in state]

    def save(self, folder: RunFolder, run: dict, sharded: bool = False) -> None:
        """Begin a checkpoint of whole tensors, the only form supported here."""
        run = {**run, "optimizer": self.kind}
        checkpoint.save_whole(folder, self.model, self.weights(), self.optimizer_state(), run)

    def load(self, folder: str, run: dict) -> None:
        """Load the optimizer's state from a checkpoint. DeepSpeed allocates it in the first step,
        so one step is taken with learning rate 0, which changes no weight."""
        self.set_lr(0.0)
        nothing = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        self.backward([(nothing, nothing)], self.world_size)
        self.step(self.clip)
        self._link_state()
        parameters = dict(self.model.named_parameters())
        for name, tensor in checkpoint.read_state(folder):
            parameter_name, key = name.rsplit("/", 1)
            if key == "step":
                for count in self._counts():
                    count.copy_(tensor)
            else:
                self._put(parameters[parameter_name], key, tensor.to(self.device))

    def _link_state(self):
        """Tell ZeRO-1 and 2 where the state of each parameter is. DeepSpeed 0.19 does so itself
        after the first step, but too early for all parameter groups except the first."""
        if self.stage not in (1, 2):
            return
        zero = self.engine.optimizer
        for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups):
            link = self.deepspeed.utils.lazy_init_hp_params_optimizer_state
            link(parameters, flat, self.adamw.state)

    def _put(self, parameter, key, tensor):
        zero = self.deepspeed.utils
        if self.stage == 0:
            self.adamw.state[parameter][key].copy_(tensor)
        elif self.stage < 3:
            zero.safe_set_full_optimizer_state(parameter, tensor, key)
        else:  # every rank has a shard of the same length; the last one is padded
            part = math.ceil(tensor.numel() / self.world_size)
            padded = F.pad(tensor.flatten(), (0, part * self.world_size - tensor.numel()))
            mine = padded.view(self.world_size, part)[dist.get_rank()]
            zero.safe_set_local_optimizer_state(parameter, mine, key)

    def finished(self) -> GPT | None:
        """Return the trained model on rank 0's CPU, None on the other ranks; end DeepSpeed."""
        recompute_layers(self.model, "none")
        model = full_model(self.model.config, self.weights())
        self.engine.destroy()
        return model
