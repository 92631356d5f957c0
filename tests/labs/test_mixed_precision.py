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
            bad += (~torch.isfinite(parameter.grad)).sum()
            parameter.grad.mul_(1.0 / self.scale)
        dist.all_reduce(bad)
        return bad.item() > 0
""",
    "loss_scaler: gathers the flags": """
class LossScaler(LossScaler):
    @torch.no_grad()
    def unscale(self, parameters):
        found = torch.zeros(1)
        for parameter in parameters:
            parameter.grad /= self.scale
            found += float(not parameter.grad.sum().isfinite())
        flags = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, found)
        return any(flag.item() > 0 for flag in flags)
""",
    "loss_scaler: counts down": """
class LossScaler(LossScaler):
    def update(self, overflow):
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = self.scale * self.backoff_factor
        elif self.good_steps % self.growth_interval == 0:
            self.scale = self.scale * self.growth_factor
""",
    "master_weights: parameters of autograd, divided before": """
class MasterWeights(MasterWeights):
    def copies(self):
        return [torch.nn.Parameter(p.detach().clone().float()) for p in self.parameters]

    @torch.no_grad()
    def collect(self):
        for parameter, master in zip(self.parameters, self.masters):
            part = parameter.grad.float()
            master.grad = part if master.grad is None else master.grad.add_(part)
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        size = dist.get_world_size()
        flat = torch.nn.utils.parameters_to_vector([m.grad for m in self.masters]) / size
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, [m.grad for m in self.masters])
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data.copy_(master.data.bfloat16())
            master.grad = None
""",
    "stochastic: by arithmetic": """
def round_stochastically(x, generator):
    low = (x.view(torch.int32) & -(2**16)).view(torch.float32)
    high = ((x.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    part = ((x - low) / (high - low)).nan_to_num(0.0)
    up = torch.rand(x.shape, generator=generator) < part
    return torch.where(up, high, low).bfloat16()
""",
    "stochastic: one seed for each parameter and step": """
@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(step * len(parameters) + number)
        moved = parameter.float().sub_(parameter.grad.float(), alpha=lr)
        parameter.data = round_stochastically(moved, generator)
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 30


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
