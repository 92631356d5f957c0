"""Leaves the sum undivided.

hint: the sum is not divided by the ranks
"""


class BucketedAllReduce(BucketedAllReduce):  # noqa: F821
    def wait(self):
        for bucket, flat, handle in self.started:
            handle.wait()
            for parameter, total in zip(bucket, flat.split([p.numel() for p in bucket])):
                parameter.grad.copy_(total.view_as(parameter))
        self.started = []
        self.missing = [len(bucket) for bucket in self.buckets]
