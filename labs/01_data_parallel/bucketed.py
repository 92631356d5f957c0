"""Exercise 01c: all-reduce the gradients in buckets, while the backward pass is still running.

    reducer = BucketedAllReduce(model, bucket_bytes=25_000_000)  # once
    loss.backward()        # complete buckets are sent
    reducer.wait()         # now every .grad is the mean over all ranks
    optimizer.step()

Write the three functions below.
"""

import torch
import torch.distributed as dist


def make_buckets(
    parameters: list[torch.nn.Parameter], bucket_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Group the parameters into buckets, last one first.

    The backward pass reaches the last layer first, so its gradients are ready first. Fill a bucket
    until the next parameter would exceed `bucket_bytes`; a parameter larger than that gets its own
    bucket. A parameter has p.numel() * p.element_size() bytes; parameters may differ in type.
    """
    raise NotImplementedError("return a list of lists of parameters, in reverse order")


class BucketedAllReduce:
    """Average the gradients of `model` over all ranks, a bucket at a time.

    In each step a bucket is one all-reduce of its gradients, in their own type (all have the same);
    nothing else is sent, and nothing of a step, flat tensors included, is kept when the next one
    begins. Zeros and NaNs on one rank count like any value. Several models may each have one.
    """

    def __init__(self, model: torch.nn.Module, bucket_bytes: int):
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.buckets = make_buckets(parameters, bucket_bytes)
        self.bucket_of = {p: index for index, bucket in enumerate(self.buckets) for p in bucket}
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients that are not ready yet
        self.started = []  # (bucket, its flat gradients, the handle of its all-reduce)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        """Called by PyTorch during backward, each time a parameter's .grad is complete."""
        index = self.bucket_of[parameter]
        raise NotImplementedError(
            "count down `missing`; at 0 start the bucket's all-reduce without waiting"
        )

    def wait(self) -> None:
        """Wait for all buckets, put the means into .grad and get ready for the next step."""
        raise NotImplementedError(
            "per started bucket: wait, divide by the number of ranks, copy; reset"
        )
