"""Lab 03, master_weights: each body, written after the solution, is a wrong answer."""


def a_sum_not_a_mean():
    """Forgets the number of ranks.

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

    hint: added up in bf16
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

    hint: only the last micro-batch
    """

    class MasterWeights(MasterWeights):
        @torch.no_grad()
        def collect(self):
            for parameter, master in zip(self.parameters, self.masters):
                master.grad = parameter.grad.float()
                parameter.grad = None


def masters_made_anew():
    """Takes the bf16 weights up into fp32 at each step: what was rounded away is gone.

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

    hint: bfloat16, not float32
    """

    class MasterWeights(MasterWeights):
        def copies(self):
            return [parameter.detach() for parameter in self.parameters]


def not_copied_back():
    """The model never sees the update.

    hint: are still those of the beginning
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

    hint: parameters are float32
    """

    class MasterWeights(MasterWeights):
        def step(self):
            super().step()
            for parameter, master in zip(self.parameters, self.masters):
                parameter.data = master
