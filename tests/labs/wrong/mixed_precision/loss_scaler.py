"""Lab 03, loss_scaler: each body, written after the solution, is a wrong answer."""


def clips_first():
    """Clips gradients that are still scaled.

    kind: values
    hint: Are the gradients unscaled when they are clipped
    """

    class LossScaler(LossScaler):
        def step(self, optimizer, clip=None):
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            overflow = self.unscale(parameters)
            if not overflow:
                optimizer.step()
            self.update(overflow)
            return not overflow


def counter_not_reset():
    """After the first growth it grows in every step.

    kind: values
    hint: the counting begins anew
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            if overflow:
                self.scale *= self.backoff_factor
                self.good_steps = 0
                return
            self.good_steps += 1
            if self.good_steps >= self.growth_interval:
                self.scale *= self.growth_factor


def counts_all_good_steps():
    """Counts good steps, but an overflow does not start the counting anew.

    kind: values
    hint: in a row
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            if overflow:
                self.scale *= self.backoff_factor
                return
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale *= self.growth_factor
                self.good_steps = 0


def decides_alone():
    """Every rank looks at its own gradients only.

    kind: odd
    hint: The ranks do not agree
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = False
            for parameter in parameters:
                parameter.grad /= self.scale
                found = found or not parameter.grad.isfinite().all()
            return bool(found)


def grows_one_step_late():
    """Grows when there were more good steps than the interval.

    kind: values
    hint: should have grown
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            if overflow:
                self.scale *= self.backoff_factor
                self.good_steps = 0
                return
            self.good_steps += 1
            if self.good_steps > self.growth_interval:
                self.scale *= self.growth_factor
                self.good_steps = 0


def infinities_only():
    """Does not see a NaN.

    kind: part
    hint: in a gradient, and nobody skips
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                parameter.grad /= self.scale
                if parameter.grad.isinf().any():
                    found.fill_(1.0)
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return bool(found.item())


def never_grows():
    """The scale only ever shrinks.

    kind: part
    hint: should have grown
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            if overflow:
                self.scale *= self.backoff_factor


def never_skips():
    """Backs off, but makes the step all the same.

    kind: part
    hint: and nobody skips
    """

    class LossScaler(LossScaler):
        def step(self, optimizer, clip=None):
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            overflow = self.unscale(parameters)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            self.update(overflow)
            return True


def never_unscaled():
    """Looks for overflows and forgets to divide.

    kind: part
    hint: It is not divided by the scale
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            bad = any(not parameter.grad.isfinite().all() for parameter in parameters)
            found = torch.tensor([float(bad)])
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return bool(found.item())


def one_message_per_parameter():
    """Asks the other ranks about each parameter.

    kind: communication
    hint: one all-reduce of one number is enough
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            overflow = False
            for parameter in parameters:
                parameter.grad /= self.scale
                found = (~parameter.grad.isfinite()).any().float()
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
                overflow = overflow or bool(found)
            return overflow


def only_when_all_overflow():
    """Takes the smallest flag: skips only if every rank has overflowed.

    kind: values
    hint: which ReduceOp says that
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                parameter.grad /= self.scale
                if not parameter.grad.isfinite().all():
                    found.fill_(1.0)
            dist.all_reduce(found, op=dist.ReduceOp.MIN)
            return bool(found.item())


def speaks_only_when_it_overflows():
    """Only the rank that sees an overflow calls the all-reduce.

    kind: communication
    hint: The ranks do not agree | Does every rank call the all-reduce
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                parameter.grad /= self.scale
                if not parameter.grad.isfinite().all():
                    found.fill_(1.0)
            if found.item():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return bool(found.item())


def updates_before_unscaling():
    """Changes the scale first, and then divides by the new one.

    kind: values
    hint: First unscale, then update
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def step(self, optimizer, clip=None):
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            bad = any(not parameter.grad.isfinite().all() for parameter in parameters)
            found = torch.tensor([float(bad)])
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            self.update(bool(found))
            for parameter in parameters:
                parameter.grad /= self.scale
            if not found:
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
            return not found


def zeroes_the_bad_numbers():
    """Replaces what is not finite by 0 and goes on.

    kind: values
    hint: and nobody skips
    """

    class LossScaler(LossScaler):
        def step(self, optimizer, clip=None):
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            overflow = self.unscale(parameters)
            for parameter in parameters:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            self.update(overflow)
            return True


def a_message_after_the_step():
    """Every rank waits for the others at the end.

    kind: communication
    hint: step() calls barrier
    """

    class LossScaler(LossScaler):
        def step(self, optimizer, clip=None):
            made = super().step(optimizer, clip)
            dist.barrier()
            return made


def asks_while_updating():
    """update() asks the ranks again.

    kind: communication
    hint: unscale() has asked the ranks already
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            found = torch.tensor([float(overflow)])
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            super().update(bool(found))


def does_not_wait():
    """Looks at the flag before it has arrived.

    kind: luck
    hint: The ranks do not agree | it is not finite, and unscale says
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.scale
                    if not parameter.grad.isfinite().all():
                        found.fill_(1.0)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, async_op=True)
            return bool(found.item())


def doubles_and_halves():
    """Growth and backoff are always 2 and ½.

    kind: constants
    hint: update(): after the steps
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            self.good_steps = 0 if overflow else self.good_steps + 1
            if overflow:
                self.scale /= 2
            elif self.good_steps == self.growth_interval:
                self.scale, self.good_steps = self.scale * 2, 0


def first_parameter_only():
    """Looks for what is not finite in the first gradient alone.

    kind: part
    hint: and nobody skips
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.scale
            bad = any(not p.grad.isfinite().all() for p in parameters[:1] if p.grad is not None)
            found = torch.tensor([float(bad)])
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return bool(found.item())


def gathers_the_flags():
    """N numbers come back where one is enough.

    kind: communication
    hint: step() calls all_gather
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.scale
                    found += float(not parameter.grad.isfinite().all())
            flags = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(flags, found)
            return any(flag.item() > 0 for flag in flags)


def half_the_rows():
    """Divides the first eight rows of each gradient.

    kind: sizes
    hint: gradient
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.view(-1)[:6] /= self.scale
                    found += float(not parameter.grad.isfinite().all())
            dist.all_reduce(found)
            return bool(found.item())


def in_fp32():
    """The gradients become fp32 on the way.

    kind: types
    hint: numbers differ
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.copy_(parameter.grad.float() / self.scale)
                    found += float(not parameter.grad.isfinite().all())
            dist.all_reduce(found)
            return bool(found.item())


def keeps_the_gradients():
    """The gradients before the division stay in a list.

    kind: memory
    hint: bytes of what was made are still held
    """

    class LossScaler(LossScaler):
        def unscale(self, parameters):
            self.before = getattr(self, "before", [])
            self.before.append([p.grad.clone() for p in parameters if p.grad is not None])
            return super().unscale(parameters)


def no_share_no_part():
    """A rank that holds no parameters does not ask.

    kind: odd
    hint: Does every rank call the all-reduce
    """

    class LossScaler(LossScaler):
        def unscale(self, parameters):
            return super().unscale(parameters) if parameters else False


def one_scale_for_all():
    """All scalers share one scale and one count.

    kind: step
    hint: update(): after the steps
    """

    class LossScaler(LossScaler):
        good = 0

        def update(self, overflow):
            LossScaler.good = 0 if overflow else LossScaler.good + 1
            if overflow:
                self.scale *= self.backoff_factor
            elif LossScaler.good == self.growth_interval:
                self.scale *= self.growth_factor
                LossScaler.good = 0


def scales_in_place():
    """Multiplies the caller's loss itself.

    kind: inputs
    hint: scale_loss changes the caller's loss
    """

    class LossScaler(LossScaler):
        def scale_loss(self, loss):
            scaled = loss * self.scale
            loss.data.mul_(self.scale)
            return scaled


def the_librarys_scaler():
    """torch.amp.GradScaler under another name.

    kind: library
    hint: uses GradScaler: that is the library
    """

    class LossScaler(LossScaler):
        def __init__(self, **options):
            super().__init__(**options)
            self.scaler = torch.amp.GradScaler("cpu", **options)

        def scale_loss(self, loss):
            return self.scaler.scale(loss)


def looks_at_the_sum():
    """Many finite numbers may have an infinite sum.

    kind: types
    hint: all gradients are finite, and unscale says that one is not
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.scale
                    found += float(not parameter.grad.sum().isfinite())
            dist.all_reduce(found)
            return bool(found.item())


def stops_at_the_first():
    """Divides no more once it has found an overflow.

    kind: odd
    hint: the first number infinite on one rank
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self.scale
                    if not parameter.grad.isfinite().all():
                        found.fill_(1.0)
                        break
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            return bool(found.item())


def never_below_one():
    """A scale below 1 seems to make no sense.

    kind: sizes
    hint: An overflow multiplies it by backoff_factor
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            super().update(overflow)
            self.scale = max(self.scale, 1.0)


def counts_on():
    """Grows at every multiple of the interval: the scale is right, the count is not.

    kind: part
    hint: good_steps is
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            self.good_steps = 0 if overflow else self.good_steps + 1
            if overflow:
                self.scale *= self.backoff_factor
            elif self.good_steps % self.growth_interval == 0:
                self.scale *= self.growth_factor


def other_memory():
    """Puts other memory below the gradients: who shares the old one sees nothing.

    kind: inputs
    hint: or not in its own memory
    """

    class LossScaler(LossScaler):
        @torch.no_grad()
        def unscale(self, parameters):
            found = torch.zeros(1)
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad / self.scale
                    found += float(not parameter.grad.isfinite().all())
            dist.all_reduce(found)
            return bool(found.item())


def the_library_by_another_name():
    """torch's scaler, its name put together.

    kind: library
    hint: is at work: it is what this exercise rebuilds
    """

    class LossScaler(LossScaler):
        def __init__(self, **options):
            super().__init__(**options)
            self.scaler = getattr(torch.amp, "Grad" + "Scaler")("cpu", **options)

        def scale_loss(self, loss):
            return self.scaler.scale(loss)
