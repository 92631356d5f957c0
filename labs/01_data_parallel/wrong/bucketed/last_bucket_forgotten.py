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
