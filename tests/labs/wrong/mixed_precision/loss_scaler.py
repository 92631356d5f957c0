"""Lab 03, loss_scaler: each body, written after the solution, is a wrong answer."""


def clips_first():
    """Clips gradients that are still scaled.

    hint: clipped before
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

    hint: NaN
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

    hint: should have grown
    """

    class LossScaler(LossScaler):
        def update(self, overflow):
            if overflow:
                self.scale *= self.backoff_factor


def never_skips():
    """Backs off, but makes the step all the same.

    hint: GradScaler skips it
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

    hint: not divided by the scale
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

    hint: One rank's overflow is everybody's
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

    hint: also the ranks that see no overflow
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

    hint: divided by another scale
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

    hint: GradScaler skips it
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
