"""Lab 15, prune_heads: each body, written after the solution, is a wrong answer."""


def activations_alone():
    """How large a head's numbers are before o_proj, which may make nothing of them.

    kind: values
    hint: the held-out loss is
    """

    @torch.no_grad()
    def importance(model, batches):
        D, found, hooks = model.config.head_size, [], []
        for layer in model.model.layers:
            hook = layer.self_attn.o_proj.register_forward_pre_hook
            hooks.append(hook(lambda _, x: found.append(x[0].unflatten(-1, (-1, D)))))
        model(torch.cat([tokens for tokens, _ in batches]))
        for hook in hooks:
            hook.remove()
        return torch.stack([heads.square().sum((0, 1, 3)) for heads in found])


def a_list_is_sorted_in_place():
    """Sorts the caller's lists.

    kind: inputs
    hint: the lists of heads
    """
    cut = shrink

    def shrink(model, keep):
        for heads in keep:
            heads.sort()
        return cut(model, keep)


def by_lot():
    """Any heads.

    kind: luck
    hint: the held-out loss is
    """

    def importance(model, batches):
        return torch.rand(model.config.layers, model.config.key_value_heads)


def by_the_first_model():
    """Remembers the scores of the model that came first.

    kind: constants
    hint: the held-out loss is
    """
    measure, known = importance, {}

    def importance(model, batches):
        size = model.config.layers, model.config.key_value_heads
        if size not in known:
            known[size] = measure(model, batches)
        return known[size]


def by_the_weights():
    """The product of the norms of a head's weights: what meets nothing counts, too.

    kind: values
    hint: the held-out loss is
    """

    @torch.no_grad()
    def importance(model, batches):
        D = model.config.head_size
        scores = []
        for layer in model.model.layers:
            attention = layer.self_attn
            v = attention.v_proj.weight.unflatten(0, (-1, D)).norm(dim=(1, 2))
            o = attention.o_proj.weight.unflatten(1, (-1, D)).norm(dim=(0, 2))
            scores.append(v * o)
        return torch.stack(scores)


def biases_are_forgotten():
    """Cuts weights alone.

    kind: part
    hint: size mismatch | is (
    """

    def shrink(model, keep):
        config, D = model.config, model.config.head_size
        group = config.heads // config.key_value_heads
        kept = len(keep[0])
        smaller = replace(config, heads=kept * group, kv_heads=kept, head_dim=D)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for index, heads in enumerate(keep):
            rows = torch.cat([torch.arange(head * D, (head + 1) * D) for head in heads])
            wide = torch.cat([torch.arange(h * group * D, (h + 1) * group * D) for h in heads])
            name = f"model.layers.{index}.self_attn."
            for part, places in (("q_proj", wide), ("k_proj", rows), ("v_proj", rows)):
                state[f"{name}{part}.weight"] = state[f"{name}{part}.weight"][places]
            state[f"{name}o_proj.weight"] = state[f"{name}o_proj.weight"][:, wide]
        small = GPT(smaller).to(model.lm_head.weight.dtype).train(model.training)
        small.load_state_dict(state)
        return small


def cuts_the_given_model():
    """Changes the model that was given, and returns it.

    kind: inputs
    hint: is not what it was before the call
    """
    cut = shrink

    def shrink(model, keep):
        small = cut(model, keep)
        for name in ("config", "model", "lm_head"):
            setattr(model, name, getattr(small, name))
        return model


def fp32_comes_out():
    """A new GPT is fp32, whatever the given one was.

    kind: types
    hint: is torch.float32, and
    """
    cut = shrink

    def shrink(model, keep):
        small = cut(model, keep)
        new = GPT(small.config).train(model.training)
        new.load_state_dict(small.state_dict())
        return new


def gates_that_stay():
    """The hooks are left in the model.

    kind: odd
    hint: a hook is left
    """

    def importance(model, batches):
        gates = [torch.ones(model.config.heads, requires_grad=True) for _ in model.model.layers]
        D = model.config.head_size
        for layer, gate in zip(model.model.layers, gates):
            layer.self_attn.o_proj.register_forward_pre_hook(
                lambda _, x, gate=gate: (x[0] * gate.repeat_interleave(D),)
            )
        total = torch.zeros(len(gates), len(gates[0]))
        for tokens, targets in batches:
            loss = cross_entropy(model(tokens), targets)
            total += torch.stack(torch.autograd.grad(loss, gates)).abs()
        return total


def gradients_are_left():
    """backward() leaves a gradient in each weight.

    kind: memory
    hint: has a gradient now
    """

    def importance(model, batches):
        D = model.config.head_size
        for tokens, targets in batches:
            cross_entropy(model(tokens), targets).backward()
        scores = []
        for layer in model.model.layers:
            weight = layer.self_attn.o_proj.weight
            taylor = (weight * weight.grad).unflatten(1, (-1, D)).sum(dim=(0, 2)).abs()
            scores.append(taylor.detach())
        return torch.stack(scores)


def grouped_queries_by_turns():
    """Takes query head h for one of key-value head h modulo K.

    kind: sizes
    hint: a logit
    """

    def shrink(model, keep):
        config, D = model.config, model.config.head_size
        K, group = config.key_value_heads, config.heads // config.key_value_heads
        kept = len(keep[0])
        smaller = replace(config, heads=kept * group, kv_heads=kept, head_dim=D)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for index, heads in enumerate(keep):
            rows = torch.cat([torch.arange(head * D, (head + 1) * D) for head in heads])
            queries = [h for h in range(config.heads) if h % K in heads] if group > 1 else heads
            wide = torch.cat([torch.arange(h * D, (h + 1) * D) for h in queries])
            name = f"model.layers.{index}.self_attn."
            for part, places in (("q_proj", wide), ("k_proj", rows), ("v_proj", rows)):
                for kind in ("weight", "bias"):
                    if f"{name}{part}.{kind}" in state:
                        state[f"{name}{part}.{kind}"] = state[f"{name}{part}.{kind}"][places]
            state[f"{name}o_proj.weight"] = state[f"{name}o_proj.weight"][:, wide]
        small = GPT(smaller).to(model.lm_head.weight.dtype).train(model.training)
        small.load_state_dict(state)
        return small


def heads_of_layer_0_everywhere():
    """All layers keep the heads that the first one keeps.

    kind: part
    hint: a logit
    """
    cut = shrink

    def shrink(model, keep):
        return cut(model, [keep[0] for _ in keep])


def head_size_follows_from_the_config():
    """With fewer heads hidden_size / heads is another number.

    kind: sizes
    hint: size mismatch | is (
    """

    def replace(config, head_dim=None, **changes):
        import dataclasses

        return dataclasses.replace(config, **changes)


def inner_config_is_the_old_one():
    """The rotary tables are made by the old config.

    kind: odd
    hint: model.model.config | The size of tensor | a logit
    """
    cut = shrink

    def shrink(model, keep):
        small = cut(model, keep)
        small.model.config = model.config
        return small


def keys_in_another_order():
    """Queries are sorted, keys are not.

    kind: values
    hint: a logit
    """
    cut = shrink

    def shrink(model, keep):
        small, other = cut(model, [sorted(heads) for heads in keep]), cut(model, keep)
        for layer, from_ in zip(small.model.layers, other.model.layers):
            layer.self_attn.k_proj = from_.self_attn.k_proj
        return small


def masks_without_cutting():
    """The heads give 0, and are computed all the same.

    kind: memory
    hint: is right
    """

    def shrink(model, keep):
        import copy

        small, D = copy.deepcopy(model), model.config.head_size
        group = model.config.heads // model.config.key_value_heads
        with torch.no_grad():
            for layer, heads in zip(small.model.layers, keep):
                for head in set(range(model.config.key_value_heads)) - set(heads):
                    places = slice(head * group * D, (head + 1) * group * D)
                    layer.self_attn.o_proj.weight[:, places] = 0
        return small


def never_put_back():
    """Heads are masked in turn, and stay so.

    kind: inputs
    hint: is not what it was before the call
    """

    @torch.no_grad()
    def importance(model, batches):
        D, scores = model.config.head_size, []
        for layer in model.model.layers:
            weight = layer.self_attn.o_proj.weight
            for head in range(model.config.heads):
                weight[:, head * D : (head + 1) * D] *= 0.0
                scores.append(sum(cross_entropy(model(x), y) for x, y in batches))
        return torch.stack(scores).view(model.config.layers, -1)


def nothing_learns():
    """The new model's weights want no gradient: no distillation could follow.

    kind: part
    hint: could not be trained
    """
    cut = shrink

    def shrink(model, keep):
        return cut(model, keep).requires_grad_(False)


def rows_of_o():
    """Cuts rows of o_proj in place of columns.

    kind: values
    hint: size mismatch | is ( | a logit | out of
    """

    def shrink(model, keep):
        small, D = GPT(model.config), model.config.head_size
        group = model.config.heads // model.config.key_value_heads
        small.load_state_dict(model.state_dict())
        for layer, heads in zip(small.model.layers, keep):
            wide = torch.cat([torch.arange(h * group * D, (h + 1) * group * D) for h in heads])
            weight = layer.self_attn.o_proj.weight
            layer.self_attn.o_proj.weight = torch.nn.Parameter(weight[wide % len(weight)])
        return small


def shares_what_is_not_cut():
    """Words, norms and MLPs are those of the given model.

    kind: memory
    hint: lies in the memory
    """
    cut = shrink

    def shrink(model, keep):
        small = cut(model, keep)
        small.model.norm = model.model.norm
        return small


def slices_are_views():
    """The large matrix lives on behind the small one.

    kind: memory
    hint: alive: a slice is a view
    """
    cut = shrink

    def shrink(model, keep):
        small = cut(model, keep)
        for layer in small.model.layers:
            weight = layer.self_attn.k_proj.weight.detach()
            whole = torch.cat((weight, weight))
            layer.self_attn.k_proj.weight = torch.nn.Parameter(whole[: len(weight)])
        return small


def the_least_important_stay():
    """Scores are as they should be, and read the other way round.

    kind: values
    hint: the held-out loss is
    """
    measure = importance

    def importance(model, batches):
        return -measure(model, batches)


def the_library():
    """Asks the course's own room.

    kind: library
    hint: is the library
    """
    import utils.compression

    rounded = utils.compression.quantize


def trains_on():
    """Leaves the model in the other mode.

    kind: inputs
    hint: train() was called
    """
    measure = importance

    def importance(model, batches):
        scores = measure(model, batches)
        model.train()
        return scores


def trains_what_is_left():
    """Some steps of training on the calibration text, as if that were pruning.

    kind: work
    hint: of a head that the model has not
    """
    right = prune

    def prune(model, batches, kept):
        small = right(model, batches, kept)
        o = torch.optim.AdamW(small.parameters(), 1e-3)
        for x, y in batches:
            o.zero_grad()
            cross_entropy(small(x), y).backward()
            o.step()
        small.zero_grad()
        return small


def signs_cancel():
    """The gradient of all text: of the gates that a trained model has, it is about 0.

    kind: values
    hint: the held-out loss is
    """

    def importance(model, batches):
        D, hooks = model.config.head_size, []
        gates = [torch.ones(model.config.heads, requires_grad=True) for _ in model.model.layers]
        for layer, gate in zip(model.model.layers, gates):
            hook = layer.self_attn.o_proj.register_forward_pre_hook
            hooks.append(hook(lambda _, x, gate=gate: (x[0] * gate.repeat_interleave(D),)))
        loss = sum(cross_entropy(model(tokens), targets) for tokens, targets in batches)
        for hook in hooks:
            hook.remove()
        return torch.stack(torch.autograd.grad(loss, gates))
