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
    ### BEGIN SOLUTION: a smaller config, and the rows and columns that stay
    kept = len(keep[0])
    smaller = replace(config, heads=kept * group, kv_heads=kept, head_dim=D)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for index, heads in enumerate(keep):
        rows = torch.cat([torch.arange(head * D, (head + 1) * D) for head in heads])
        wide = torch.cat([torch.arange(h * group * D, (h + 1) * group * D) for h in heads])
        name = f"model.layers.{index}.self_attn."
        for part, places in (("q_proj", wide), ("k_proj", rows), ("v_proj", rows)):
            for kind in ("weight", "bias"):
                if f"{name}{part}.{kind}" in state:
                    state[f"{name}{part}.{kind}"] = state[f"{name}{part}.{kind}"][places]
        state[f"{name}o_proj.weight"] = state[f"{name}o_proj.weight"][:, wide]
    small = GPT.without_memory(smaller)
    small.load_state_dict(state, assign=True)
    small.tie()
    return small.requires_grad_().train(model.training)
    ### END SOLUTION


def importance(model, batches):
    """How much each key-value head (with its query heads) matters: (layers, K), larger is more.

    batches: a list of (tokens, targets), int64 (B, T) each. The measure is your choice: the loss
    without the head, the size of a gate's gradient, what the head adds to the residual stream …
    Only one thing counts: `prune` should keep the heads that held-out text needs. Afterwards the
    model is unchanged: no gradient, no hook, no flag is left.
    """
    ### BEGIN SOLUTION: a score for each head of each layer, measured on the batches
    config, layers = model.config, model.model.layers
    width = config.query_width // config.key_value_heads  # elements of a head's queries
    gates = [torch.ones(config.key_value_heads, requires_grad=True) for _ in layers]

    def through(gate):
        return lambda _, given: (given[0] * gate.repeat_interleave(width).to(given[0].dtype),)

    hooks = [
        layer.self_attn.o_proj.register_forward_pre_hook(through(gate))
        for layer, gate in zip(layers, gates)
    ]
    total = torch.zeros(len(gates), config.key_value_heads)
    try:
        for tokens, targets in batches:
            for row, target in zip(tokens, targets):  # row by row: signs must not cancel
                loss = cross_entropy(model(row[None]), target[None])
                total += torch.stack(torch.autograd.grad(loss, gates)).abs()
    finally:
        for hook in hooks:
            hook.remove()
    return total
    ### END SOLUTION


def prune(model, batches, kept):
    """The model with the `kept` most important key-value heads of each layer, by `importance`.

    Given; you may change it if your measure needs more than one score per head.
    """
    scores = importance(model, batches)
    return shrink(model, [sorted(row.topk(kept).indices.tolist()) for row in scores])
