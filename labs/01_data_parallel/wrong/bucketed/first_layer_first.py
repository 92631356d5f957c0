"""Fills the buckets in the order of the forward pass.

hint: makes the last layer's gradients first
"""

Right = make_buckets  # noqa: F821


def make_buckets(parameters, bucket_bytes):
    return Right(parameters[::-1], bucket_bytes)
