"""Lab 01, bucketed: each body, written after the solution, is a wrong answer."""


def first_layer_first():
    """Fills the buckets in the order of the forward pass.

    kind: values
    hint: makes the last layer's gradients first
    """

    Right = make_buckets

    def make_buckets(parameters, bucket_bytes):
        return Right(parameters[::-1], bucket_bytes)


def last_bucket_forgotten():
    """Keeps only buckets that got full.

    kind: part
    hint: make_buckets leaves out
    """

    def make_buckets(parameters, bucket_bytes):
        buckets, bucket, filled = [], [], 0
        for parameter in reversed(parameters):
            size = parameter.numel() * parameter.element_size()
            if bucket and filled + size > bucket_bytes:
                buckets.append(bucket)
                bucket, filled = [], 0
            bucket.append(parameter)
            filled += size
        return buckets


def missing_scale():
    """Leaves the sum undivided.

    kind: values
    hint: the sum is not divided by the ranks
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, handle in self.started:
                handle.wait()
                for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(total.view_as(parameter))
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def not_copied_back():
    """The means stay in the flat tensors.

    kind: values
    hint: It is still this rank's own
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for _, flat, handle in self.started:
                handle.wait()
                flat /= dist.get_world_size()
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def not_reset():
    """Does not make ready for the next step.

    kind: constants
    hint: what is left over from the step before? | this rank calls nothing
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, handle in self.started:
                handle.wait()
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter))
            self.started = []


def one_bucket_late():
    """A bucket starts only when the next one is complete.

    kind: work
    hint: buckets were on their way | before the backward pass has ended
    """

    Right = BucketedAllReduce

    class BucketedAllReduce(Right):
        full = None

        def start(self):
            if self.full is not None:
                flat = torch.cat([p.grad.view(-1) for p in self.full])
                self.started.append((self.full, flat, dist.all_reduce(flat, async_op=True)))

        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                self.start()
                self.full = self.buckets[index]

        def wait(self):
            self.start()
            self.full = None
            super().wait()


def one_large_bucket():
    """Ignores the size.

    kind: communication
    hint: make_buckets makes 1 buckets, of
    """

    def make_buckets(parameters, bucket_bytes):
        return [parameters[::-1]]


def one_per_parameter():
    """An all-reduce for every parameter: many small messages.

    kind: communication
    hint: Send each bucket once, as one tensor
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            flat = parameter.grad.view(-1)
            self.started.append(([parameter], flat, dist.all_reduce(flat, async_op=True)))


def starts_in_wait():
    """Starts all buckets after the backward pass.

    kind: work
    hint: no all-reduce starts before the backward pass has ended
    """

    Right = BucketedAllReduce

    class BucketedAllReduce(Right):
        def gradient_ready(self, parameter):
            pass

        def wait(self):
            for bucket in self.buckets:
                flat = torch.cat([p.grad.view(-1) for p in bucket])
                self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
            super().wait()


def synchronous():
    """The all-reduce in the hook is not asynchronous.

    kind: luck
    hint: the hook waits, and nothing overlaps
    """

    class Finished:
        def wait(self):
            pass

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket = self.buckets[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket])
                dist.all_reduce(flat)
                self.started.append((bucket, flat, Finished()))


def waits_in_the_hook():
    """Starts asynchronously and waits at once.

    kind: luck
    hint: the hook waits, and nothing overlaps
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket = self.buckets[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket])
                handle = dist.all_reduce(flat, async_op=True)
                handle.wait()
                self.started.append((bucket, flat, handle))


def in_half_precision():
    """Half of the bytes: bf16 on the wire.

    kind: types
    hint: numbers differ
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket = self.buckets[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket]).bfloat16()
                self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


def in_single_precision():
    """Four bytes a number, whatever the gradients have.

    kind: types
    hint: with
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket = self.buckets[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket]).float()
                self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


def divided_by_two():
    """The mean of two ranks.

    kind: sizes
    hint: with 3 ranks
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, handle in self.started:
                handle.wait()
                flat /= 2
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter))
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def last_handle_only():
    """Waits for the last bucket: the others often are there.

    kind: luck
    hint: the gradient of
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, _handle in self.started:
                self.started[-1][2].wait()
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter))
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def does_not_wait():
    """Copies what is there.

    kind: luck
    hint: the gradient of
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, _handle in self.started:
                pass
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter))
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def keeps_buckets():
    """Every flat tensor stays in a list.

    kind: memory
    hint: bytes stay after the step
    """

    history = []

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            super().gradient_ready(parameter)
            history.append(self.started[-1:])


def hides_nan():
    """What is no number becomes 0.

    kind: odd
    hint: and nan is right
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket = self.buckets[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket]).nan_to_num()
                self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


def steps_itself():
    """Moves the parameters, too.

    kind: inputs
    hint: is not what it was before the call
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            super().wait()
            with torch.no_grad():
                for bucket in self.buckets:
                    for parameter in bucket:
                        parameter -= 0.01 * parameter.grad


def weights_only():
    """Copies back matrices, and forgets biases.

    kind: part
    hint: bias
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, handle in self.started:
                handle.wait()
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter)) if parameter.dim() > 1 else None
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def adds_to_the_gradient():
    """Adds the mean to the rank's own gradient.

    kind: values
    hint: the gradient of
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, handle in self.started:
                handle.wait()
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.add_(mean.view_as(parameter))
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def summed_first_step_only():
    """Divides in the first step alone.

    kind: constants
    hint: Step 1 was right
    """

    class BucketedAllReduce(BucketedAllReduce):
        divide = True

        def wait(self):
            for bucket, flat, handle in self.started:
                handle.wait()
                flat /= dist.get_world_size() if self.divide else 1
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter))
            self.divide = False
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def barrier_in_wait():
    """Waits for everybody, and then for the buckets.

    kind: communication
    hint: Send each bucket once
    """

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            dist.barrier()
            super().wait()


def full_at_the_limit():
    """Closes a bucket one byte early.

    kind: sizes
    hint: make_buckets makes
    """

    def make_buckets(parameters, bucket_bytes):
        buckets, space = [], 0
        for parameter in reversed(parameters):
            size = parameter.numel() * parameter.element_size()
            if size >= space:
                buckets.append([])
                space = bucket_bytes
            buckets[-1].append(parameter)
            space -= size
        return buckets


def four_bytes_a_number():
    """Takes every number for four bytes.

    kind: types
    hint: widths (
    """

    def make_buckets(parameters, bucket_bytes):
        buckets, space = [], 0
        for parameter in reversed(parameters):
            size = 4 * parameter.numel()
            if size > space:
                buckets.append([])
                space = bucket_bytes
            buckets[-1].append(parameter)
            space -= size
        return buckets


def keeps_its_flat_tensors():
    """One flat tensor for each bucket, for all steps.

    kind: memory
    hint: bytes stay after the step
    """

    class BucketedAllReduce(BucketedAllReduce):
        flats = None

        def gradient_ready(self, parameter):
            self.flats = self.flats or [
                torch.cat([torch.zeros_like(p).view(-1) for p in bucket]) for bucket in self.buckets
            ]
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket, flat = self.buckets[index], self.flats[index]
                torch.cat([p.grad.view(-1) for p in bucket], out=flat)
                self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


def four_on_their_way():
    """Never more than four buckets on their way: the hook waits for the oldest.

    kind: luck
    hint: the hook waits, and nothing overlaps
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            if len(self.started) >= 4:
                self.started[-4][2].wait()
            super().gradient_ready(parameter)


def asks_for_a_while():
    """Looks for each bucket thirty times, and goes on.

    kind: luck
    hint: on a slow network, rank
    """

    import time

    class BucketedAllReduce(BucketedAllReduce):
        def wait(self):
            for bucket, flat, handle in self.started:
                for _ in range(30):
                    if handle.is_completed():
                        break
                    time.sleep(0.01)
                flat /= dist.get_world_size()
                for parameter, mean in zip(bucket, flat.split([p.numel() for p in bucket])):
                    parameter.grad.copy_(mean.view_as(parameter))
            self.started = []
            self.missing = [len(bucket) for bucket in self.buckets]


def zeros_stay_at_home():
    """A bucket of zeros is not sent: the others wait for it, or get another one.

    kind: odd
    hint: zeros in step 3
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            self.missing[index] -= 1
            if self.missing[index] == 0:
                bucket = self.buckets[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket])
                if flat.any():
                    self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))


def type_of_the_first():
    """All parameters have as many bytes a number as the first.

    kind: types
    hint: by turns
    """

    def make_buckets(parameters, bucket_bytes):
        buckets, space = [], 0
        for parameter in reversed(parameters):
            size = parameter.numel() * parameters[0].element_size()
            if size > space:
                buckets.append([])
                space = bucket_bytes
            buckets[-1].append(parameter)
            space -= size
        return buckets


def one_count_for_all_models():
    """Counts in a dictionary of the module, by the bucket's number.

    kind: constants
    hint: and, beside it,
    """

    MISSING = {}

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            index = self.bucket_of[parameter]
            bucket = self.buckets[index]
            MISSING[index] = MISSING.get(index, len(bucket)) - 1
            if MISSING[index] == 0:
                del MISSING[index]
                flat = torch.cat([p.grad.view(-1) for p in bucket])
                self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
