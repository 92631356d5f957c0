"""Lab 03: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "03_mixed_precision",
    {
        "loss_scaler": ("check_scaler", "scaler", "loss_scaler.py"),
        "master_weights": ("check_master", "master_weights", "master_weights.py"),
        "stochastic": ("check_stochastic", "stochastic", "stochastic.py"),
    },
)

OTHERS = {
    "loss_scaler: multiplies by the inverse, asks with a sum, flags as whole numbers": """
class LossScaler(LossScaler):
    @torch.no_grad()
    def unscale(self, parameters):
        bad = torch.zeros(1, dtype=torch.int64)
        for parameter in parameters:
            if parameter.grad is not None:
                bad += (~torch.isfinite(parameter.grad)).sum()
                parameter.grad.mul_(1.0 / self.scale)
        dist.all_reduce(bad)
        return bad.item() > 0
""",
    "loss_scaler: waits for an asynchronous all-reduce, returns NumPy's truth": """
class LossScaler(LossScaler):
    @torch.no_grad()
    def unscale(self, parameters):
        import numpy as np

        grads = [p.grad for p in parameters if p.grad is not None]
        good = torch.tensor([all(bool(grad.isfinite().all()) for grad in grads)]).float()
        work = dist.all_reduce(good, op=dist.ReduceOp.MIN, async_op=True)
        for grad in grads:
            grad.div_(self.scale)
        work.wait()
        return np.bool_(good.item() == 0.0)
""",
    "loss_scaler: the scale in a tensor, nothing sent by one rank": """
class LossScaler(LossScaler):
    def __init__(self, **options):
        super().__init__(**options)
        self.scale = torch.tensor(self.scale)

    def unscale(self, parameters):
        if dist.get_world_size() > 1:
            return super().unscale(parameters)
        grads = [p.grad.div_(self.scale) for p in parameters if p.grad is not None]
        return not all(grad.isfinite().all() for grad in grads)

    def update(self, overflow):
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = self.scale * self.backoff_factor
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * self.growth_factor, 0
""",
    "loss_scaler: clips by hand": """
class LossScaler(LossScaler):
    def step(self, optimizer, clip=None):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        overflow = self.unscale(parameters)
        if not overflow:
            grads = [p.grad for p in parameters if p.grad is not None]
            norm = sum(float(grad.square().sum()) for grad in grads) ** 0.5
            for grad in grads:
                if clip is not None and norm > clip:
                    grad *= clip / norm
            optimizer.step()
        self.update(overflow)
        return not overflow
""",
    "master_weights: parameters of autograd, divided before": """
class MasterWeights(MasterWeights):
    def copies(self):
        return [torch.nn.Parameter(p.detach().clone().float()) for p in self.parameters]

    @torch.no_grad()
    def collect(self):
        for parameter, master in zip(self.parameters, self.masters):
            if parameter.grad is not None:
                part = parameter.grad.float()
                master.grad = part if master.grad is None else master.grad.add_(part)
                parameter.grad = None

    @torch.no_grad()
    def step(self):
        size = dist.get_world_size()
        for m in self.masters:
            m.grad = torch.zeros_like(m) if m.grad is None else m.grad
        flat = torch.nn.utils.parameters_to_vector([m.grad for m in self.masters]) / size
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, [m.grad for m in self.masters])
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data.copy_(master.data.bfloat16())
            master.grad = None
""",
    "master_weights: gradients are views of one buffer": """
class MasterWeights(MasterWeights):
    def copies(self):
        sizes = [p.numel() for p in self.parameters]
        self.buffer = torch.zeros(sum(sizes))
        self.views = [v.view_as(p) for v, p in zip(self.buffer.split(sizes), self.parameters)]
        return tuple(super().copies())

    @torch.no_grad()
    def collect(self):
        for parameter, master, view in zip(self.parameters, self.masters, self.views):
            if parameter.grad is not None:
                view += parameter.grad
                master.grad, parameter.grad = view, None

    @torch.no_grad()
    def step(self):
        work = dist.all_reduce(self.buffer, async_op=True)
        work.wait()
        self.buffer /= dist.get_world_size()
        for master, view in zip(self.masters, self.views):
            master.grad = view
        self.optimizer.step()
        self.buffer.zero_()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data = master.detach().to(torch.bfloat16)
            master.grad = None
""",
    "master_weights: masters are parts of one tensor": """
class MasterWeights(MasterWeights):
    def copies(self):
        sizes = [p.numel() for p in self.parameters]
        flat = torch.cat([p.detach().float().flatten() for p in self.parameters])
        return [part.view(p.shape) for part, p in zip(flat.split(sizes), self.parameters)]
""",
    "master_weights: alone, no message": """
class MasterWeights(MasterWeights):
    @torch.no_grad()
    def step(self):
        if dist.get_world_size() > 1:
            return super().step()
        for master in self.masters:
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
        self.optimizer.step()
        torch._foreach_copy_(self.parameters, self.masters)
        self.optimizer.zero_grad()
""",
    "master_weights: adds up in fp64": """
class MasterWeights(MasterWeights):
    @torch.no_grad()
    def collect(self):
        for parameter, master in zip(self.parameters, self.masters):
            if parameter.grad is None:
                continue
            before = 0.0 if master.grad is None else master.grad.double()
            master.grad = (before + parameter.grad.double()).float()
            parameter.grad = None
""",
    "stochastic: by arithmetic": """
def round_stochastically(x, generator):
    bits = x.contiguous().view(torch.int32)
    low = (bits & -(2**16)).view(torch.float32)
    high = ((bits & -(2**16)) + 2**16).view(torch.float32)
    part = ((x - low) / (high - low)).nan_to_num(0.0)
    up = torch.rand(x.shape, generator=generator) < part
    return torch.where(up, high, torch.where(x.isnan(), x, low)).bfloat16()
""",
    "stochastic: one seed for each parameter and step": """
@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            generator = torch.Generator().manual_seed(step * len(parameters) + number)
            moved = parameter.float().sub_(parameter.grad.float(), alpha=lr)
            parameter.data = round_stochastically(moved, generator)
""",
    "stochastic: all parameters at once, in fp64": """
@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    some = [p for p in parameters if p.grad is not None]
    flat = torch.cat([(p.double() - lr * p.grad.double()).float().flatten() for p in some])
    rounded = round_stochastically(flat, torch.Generator().manual_seed(10**6 + step))
    for parameter, piece in zip(some, rounded.split([p.numel() for p in some])):
        parameter.copy_(piece.view_as(parameter))
""",
    "stochastic: the other way round": """
def round_stochastically(x, generator):
    noise = torch.randint(1, 2**16 + 1, x.shape, generator=generator, dtype=torch.int32)
    bits = x.contiguous().view(torch.int32)
    low = bits & -(2**16)
    up = (bits & (2**16 - 1)) >= noise
    rounded = (low + up.int() * 2**16).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 75, (12, 6, 4)


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_figures_of_the_lab_come_from_the_answer():
    from labs.support.mixed_precision import check_scaler, check_stochastic

    scales, skipped = check_scaler.fp16_run(LAB.solution / "loss_scaler.py", steps=12)
    assert len(scales) == len(skipped) == 12 and skipped[0] and not all(skipped)
    for step in range(11):
        assert scales[step + 1] == scales[step] * (0.5 if skipped[step] else 1) or (
            not skipped[step] and scales[step + 1] == 2 * scales[step]
        )
    means = check_stochastic.walk(LAB.solution / "stochastic.py", steps=100)
    assert means[0] == 1.0 and abs(means[-1] - 1.1) < 0.02
