"""Lab 03, master_weights: each body, written after the solution, is a wrong answer."""


def a_sum_not_a_mean():
    """Forgets the number of ranks.

    kind: values
    hint: is not divided by the ranks
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            flat = torch.cat([master.grad.view(-1) for master in self.masters])
            dist.all_reduce(flat)
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def adds_up_in_bf16():
    """Micro-batches are added up in bf16, and only the sum becomes fp32.

    kind: types
    hint: It was added up in bf16
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def collect(self):
            for parameter, master in zip(self.parameters, self.masters):
                before = 0.0 if master.grad is None else master.grad.bfloat16()
                master.grad = (before + parameter.grad).float()
                parameter.grad = None


def all_reduce_in_bf16():
    """Sends half the bytes, and adds up in bf16.

    kind: types
    hint: bytes, and
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            flat = torch.cat([master.grad.view(-1) for master in self.masters]).bfloat16()
            dist.all_reduce(flat)
            flat = flat.float() / dist.get_world_size()
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def bf16_gradients_stay():
    """Does not free .grad, so the first micro-batch is counted again with the second.

    kind: memory
    hint: is not None after collect
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def collect(self):
            for parameter, master in zip(self.parameters, self.masters):
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
                master.grad += parameter.grad


def forgotten_all_reduce():
    """Every rank follows its own gradients.

    kind: communication
    hint: no all-reduce
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def gradients_not_cleared():
    """The next step begins with this step's gradients.

    kind: memory
    hint: still have a .grad
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            flat = torch.cat([master.grad.view(-1) for master in self.masters])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)


def last_micro_batch_only():
    """Overwrites the gradients of the earlier micro-batches.

    kind: part
    hint: that of the last micro-batch alone
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def collect(self):
            for parameter, master in zip(self.parameters, self.masters):
                master.grad = parameter.grad.float()
                parameter.grad = None


def masters_made_anew():
    """Takes the bf16 weights up into fp32 at each step: what was rounded away is gone.

    kind: values
    hint: for the whole training
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            for master, parameter in zip(self.masters, self.parameters):
                master.copy_(parameter)
            super().step()


def no_masters():
    """The masters are the bf16 parameters themselves.

    kind: types
    hint: torch.bfloat16, and torch.float32 is right
    """

    class MasterWeights(MasterWeights):
        def copies(self):
            return [parameter.detach() for parameter in self.parameters]


def not_copied_back():
    """The model never sees the update.

    kind: part
    hint: It should be its master
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            flat = torch.cat([master.grad.view(-1) for master in self.masters])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            self.optimizer.zero_grad()


def one_message_per_parameter():
    """An all-reduce for each parameter.

    kind: communication
    hint: One message
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            for master in self.masters:
                dist.all_reduce(master.grad)
                master.grad /= dist.get_world_size()
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def the_model_becomes_fp32():
    """Lets the parameters point to the masters.

    kind: types
    hint: parameters are float32
    """

    class MasterWeights(MasterWeights):
        def step(self):
            super().step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.data = master


def as_many_as_in_the_first_step():
    """Divides by the number of micro-batches of the first step.

    kind: constants
    hint: .grad of master
    """

    class MasterWeights(MasterWeights):
        def collect(self):
            self.count = getattr(self, "count", 0) + 1
            super().collect()

        def step(self):
            self.first = getattr(self, "first", self.count)
            for master in self.masters:
                if master.grad is not None:
                    master.grad *= self.count / self.first
            self.count = 0
            super().step()


def does_not_wait():
    """Nobody waits for the all-reduce.

    kind: luck
    hint: at the optimizer's step
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            for master in self.masters:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            flat = torch.cat([master.grad.view(-1) for master in self.masters])
            dist.all_reduce(flat, async_op=True)
            flat /= dist.get_world_size()
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def drops_nan():
    """A NaN becomes 0.

    kind: odd
    hint: and nan is right
    """

    class MasterWeights(MasterWeights):
        def step(self):
            for master in self.masters:
                if master.grad is not None:
                    master.grad.nan_to_num_()
            super().step()


def each_micro_batch_a_message():
    """collect() sends the gradients at once.

    kind: communication
    hint: nobody needs the sum before
    """

    class MasterWeights(MasterWeights):
        def collect(self):
            for parameter in self.parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            super().collect()


def gradients_of_zeros_stay():
    """Zeros stay in the masters' gradients: 4 bytes a parameter between the steps.

    kind: memory
    hint: after step() masters still have a .grad
    """

    class MasterWeights(MasterWeights):
        def step(self):
            zero = self.optimizer.zero_grad
            self.optimizer.zero_grad = lambda **_: zero(set_to_none=False)
            super().step()


def history_of_messages():
    """The messages of all steps are kept.

    kind: memory
    hint: bytes of what was made are still held
    """

    class MasterWeights(MasterWeights):
        def step(self):
            self.history = getattr(self, "history", [])
            self.history.append([m.grad.clone() for m in self.masters if m.grad is not None])
            super().step()


def missing_is_none():
    """A parameter without a gradient stops the step.

    kind: odd
    hint: AttributeError in master_weights.py line
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            flat = torch.cat([master.grad.view(-1) for master in self.masters])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def no_collect_no_part():
    """A rank without micro-batches takes no part in the message.

    kind: odd
    hint: Does every rank call the same collectives
    """

    class MasterWeights(MasterWeights):
        def step(self):
            if any(master.grad is not None for master in self.masters):
                super().step()
            else:
                self.optimizer.step()


def one_list_for_all():
    """Masters of all models in one list of the class.

    kind: step
    hint: masters do not have the shapes
    """

    EVERY = []

    class MasterWeights(MasterWeights):
        def copies(self):
            EVERY.extend(parameter.detach().float() for parameter in self.parameters)
            return EVERY


def rounds_down():
    """Cuts the lower bits of the masters off.

    kind: values
    hint: It should be its master, rounded to the nearest
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            super().step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_((master.view(torch.int32) & -(2**16)).view(torch.float32))


def three_micro_batches():
    """Only the first three micro-batches of a step are added.

    kind: sizes
    hint: Is each micro-batch added once
    """

    class MasterWeights(MasterWeights):
        def collect(self):
            self.count = getattr(self, "count", 0) + 1
            if self.count <= 3:
                return super().collect()
            for parameter in self.parameters:
                parameter.grad = None

        def step(self):
            self.count = 0
            super().step()


def two_halves_of_a_message():
    """fp64 numbers: twice the bytes.

    kind: communication
    hint: fp32 gradients have
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            for master in self.masters:
                master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            flat = torch.cat([master.grad.view(-1) for master in self.masters]).double()
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            sizes = [master.numel() for master in self.masters]
            for master, mean in zip(self.masters, flat.split(sizes)):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def bf16_gradients_in_a_list():
    """The bf16 gradients leave the parameters, and stay in a list.

    kind: memory
    hint: bf16 gradients are still held
    """

    class MasterWeights(MasterWeights):
        def collect(self):
            self.before = [*getattr(self, "before", []), *(p.grad for p in self.parameters)]
            super().collect()


def in_pieces():
    """Long messages travel in pieces of 4,096 numbers.

    kind: sizes
    hint: One message, of all gradients in one flat tensor
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            for master in self.masters:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            flat = torch.cat([master.grad.reshape(-1) for master in self.masters])
            for piece in flat.split(4096):
                dist.all_reduce(piece)
            flat /= dist.get_world_size()
            for master, mean in zip(self.masters, flat.split([m.numel() for m in self.masters])):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()


def asks_for_a_while():
    """Looks for the message thirty times, and goes on.

    kind: luck
    hint: at the optimizer's step at
    """

    import time

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def step(self):
            for master in self.masters:
                if master.grad is None:
                    master.grad = torch.zeros_like(master)
            flat = torch.cat([master.grad.reshape(-1) for master in self.masters])
            work = dist.all_reduce(flat, async_op=True)
            for _ in range(30):
                if work.is_completed():
                    break
                time.sleep(0.01)
            flat /= dist.get_world_size()
            for master, mean in zip(self.masters, flat.split([m.numel() for m in self.masters])):
                master.grad.copy_(mean.view_as(master))
            self.optimizer.step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.copy_(master)
            self.optimizer.zero_grad()
