"""Lab 01, bucketed: each body, written after the solution, is a wrong answer."""


def first_layer_first():
    """Fills the buckets in the order of the forward pass.

    hint: makes the last layer's gradients first
    """

    Right = make_buckets

    def make_buckets(parameters, bucket_bytes):
        return Right(parameters[::-1], bucket_bytes)


def last_bucket_forgotten():
    """Keeps only buckets that got full.

    hint: make_buckets leaves out 0.weight
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

    hint: They are still this rank's own
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

    hint: is everything reset for the next step?
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

    hint: buckets were on their way
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

    hint: make_buckets makes 1 buckets, not
    """

    def make_buckets(parameters, bucket_bytes):
        return [parameters[::-1]]


def one_per_parameter():
    """An all-reduce for every parameter: many small messages.

    hint: send each bucket once, as one tensor
    """

    class BucketedAllReduce(BucketedAllReduce):
        def gradient_ready(self, parameter):
            flat = parameter.grad.view(-1)
            self.started.append(([parameter], flat, dist.all_reduce(flat, async_op=True)))


def starts_in_wait():
    """Starts all buckets after the backward pass.

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
