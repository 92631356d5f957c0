"""The transaction policy is left out: one response for each request.

hint: the model is not decoupled
"""

# ruff: noqa: F821

right = config


def config(tp):
    return right(tp).replace("model_transaction_policy { decoupled: true }", "")
