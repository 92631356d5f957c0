"""Ignores the size.

hint: make_buckets makes 1 buckets, not
"""


def make_buckets(parameters, bucket_bytes):
    return [parameters[::-1]]
