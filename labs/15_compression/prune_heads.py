"""Exercise 15c: attention heads that a model can do without, and a model without them.

    small = shrink(model, [[0, 3], [1, 2]])   # layer 0 keeps its heads 0 and 3, layer 1 …
    scores = importance(model, batches)       # (layers, K): what is each head worth?
    small = prune(model, batches, kept=2)     # both: the two that matter most in each layer

K key-value heads; with grouped-query attention H / K query heads share each of them, and stay or go
with it: query heads 0 … H/K − 1 belong to key-value head 0, and so on. Each head has D values. The
given model is not changed, and the new one shares no memory with it.
"""

from dataclasses import replace

import torch

from utils.models.gpt import GPT, cross_entropy


def shrink(model, keep):
    """A GPT whose attention has only the heads in `keep`, in smaller matrices.

    keep   for each layer a list of the key-value heads that stay, in any order; the same number in
           each layer. The number of remaining query heads divides the hidden size
    Its logits are those of the model in which the other heads return 0. It has the same type, its
    own memory, tied embeddings if the model has, and the config of the smaller model.
    """
    config, D = model.config, model.config.head_size
    group = config.heads // config.key_value_heads  # query heads per key-value head
    raise NotImplementedError("a smaller config, and the rows and columns that stay")


def importance(model, batches):
    """How much each key-value head (with its query heads) matters: (layers, K), larger is more.

    batches: a list of (tokens, targets), int64 (B, T) each. The measure is your choice: the loss
    without the head, the size of a gate's gradient, what the head adds to the residual stream …
    Only one thing counts: `prune` should keep the heads that held-out text needs. Afterwards the
    model is unchanged: no gradient, no hook, no flag is left.
    """
    raise NotImplementedError("a score for each head of each layer, measured on the batches")


def prune(model, batches, kept):
    """The model with the `kept` most important key-value heads of each layer, by `importance`.

    Given; you may change it if your measure needs more than one score per head.
    """
    scores = importance(model, batches)
    return shrink(model, [sorted(row.topk(kept).indices.tolist()) for row in scores])
