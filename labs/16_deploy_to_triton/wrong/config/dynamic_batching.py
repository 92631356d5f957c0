"""Dynamic batching and a model that batches by itself.

hint: dynamic_batching is on
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("instance_group", "dynamic_batching { }\ninstance_group")
