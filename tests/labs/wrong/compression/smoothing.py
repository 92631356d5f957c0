"""Lab 15, smoothing: each body, written after the solution, is a wrong answer."""


def a_fixed_number_is_found():
    """The three largest, however large they are.

    kind: constants
    hint: are right
    """

    def outliers(largest, times=8.0):
        return sorted(largest.topk(3).indices.tolist())


def a_maximum_that_is_signed():
    """The largest number of each channel, not the largest magnitude.

    kind: values
    hint: was found
    """

    @torch.no_grad()
    def observe(block, inputs):
        seen = {name: [] for name in READERS}
        hooks = [
            block.get_submodule(name).register_forward_hook(
                lambda _, given, y, name=name: seen[name].append(y.flatten(0, -2).amax(dim=0))
            )
            for name in READERS
        ]
        for x in inputs:
            run(block, x)
        for hook in hooks:
            hook.remove()
        return {name: torch.stack(found).amax(dim=0).float() for name, found in seen.items()}


def alpha_the_other_way():
    """alpha belongs to the weights.

    kind: values
    hint: away from the formula
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        right(block, seen, 1 - alpha)


def alpha_is_a_half():
    """The usual alpha, whichever is asked for.

    kind: constants
    hint: away from the formula
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        right(block, seen)


def before_the_norm():
    """What comes into the norm, not what it hands on.

    kind: values
    hint: was found
    """

    @torch.no_grad()
    def observe(block, inputs):
        seen = {name: [] for name in READERS}
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(
                lambda _, given, name=name: seen[name].append(given[0].abs().flatten(0, -2))
            )
            for name in READERS
        ]
        for x in inputs:
            run(block, x)
        for hook in hooks:
            hook.remove()
        return {name: torch.cat(found).amax(dim=0).float() for name, found in seen.items()}


def biases_too():
    """The readers' biases are scaled as well.

    kind: values
    hint: has changed
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        right(block, seen, alpha)
        if block.self_attn.q_proj.bias is not None:
            block.self_attn.q_proj.bias.data *= 1.5


def both_norms_have_one_name():
    """A hook that looks up its name when it runs: the last one's.

    kind: part
    hint: was found | has [
    """

    @torch.no_grad()
    def observe(block, inputs):
        seen, hooks, last = dict.fromkeys(READERS), [], []

        def record(norm, given, y):
            largest = y.abs().flatten(0, -2).amax(dim=0).float()
            old = seen[last[-1]]
            seen[last[-1]] = largest if old is None else torch.maximum(old, largest)

        for name in READERS:
            last.append(name)
            hooks.append(block.get_submodule(name).register_forward_hook(record))
        for x in inputs:
            run(block, x)
        for hook in hooks:
            hook.remove()
        return dict.fromkeys(READERS, seen[last[-1]])


def counts_the_batches():
    """Asks for the length first: a generator has none.

    kind: types
    hint: has no len
    """
    right = observe

    def observe(block, inputs):
        if len(inputs) == 0:
            return {}
        return right(block, inputs)


def dead_channels_are_divided_by_zero():
    """s is 0 or infinite where a channel is dead.

    kind: odd
    hint: not finite
    """

    @torch.no_grad()
    def smooth(block, seen, alpha=0.5):
        for name, readers in READERS.items():
            norm = block.get_submodule(name)
            weights = [block.get_submodule(reader).weight for reader in readers]
            columns = torch.cat([weight.abs().float() for weight in weights]).amax(dim=0)
            s = seen[name] ** alpha / columns ** (1 - alpha)
            norm.weight.copy_(norm.weight / s)
            for weight in weights:
                weight.copy_(weight * s)


def dead_channels_count():
    """The median of all channels, those that are always 0 among them.

    kind: odd
    hint: are right
    """

    def outliers(largest, times=8.0):
        return (largest > times * largest.median()).nonzero().flatten().tolist()


def fp16_has_no_room():
    """What was seen comes back in the block's own type.

    kind: types
    hint: fp32 is asked for
    """
    right = observe

    def observe(block, inputs):
        dtype = block.input_layernorm.weight.dtype
        return {name: largest.to(dtype) for name, largest in right(block, inputs).items()}


def hooks_stay():
    """Nobody takes the hooks out.

    kind: inputs
    hint: a hook is left
    """
    right = observe

    def observe(block, inputs):
        block.input_layernorm.register_forward_hook(lambda *_: None)
        return right(block, inputs)


def last_batch_only():
    """Each batch overwrites what was seen.

    kind: part
    hint: was found
    """
    right = observe

    def observe(block, inputs):
        return right(block, list(inputs)[-1:])


def means_over_batches():
    """The mean of each batch's maximum.

    kind: values
    hint: was found
    """
    right = observe

    def observe(block, inputs):
        found = [right(block, [x]) for x in inputs]
        return {name: torch.stack([one[name] for one in found]).mean(0) for name in READERS}


def mean_and_not_median():
    """The mean of all channels: the outliers raise it.

    kind: values
    hint: are right | are found
    """

    def outliers(largest, times=8.0):
        return (largest > times * largest.mean()).nonzero().flatten().tolist()


def multiplied_where_divided():
    """The norm grows, and the columns shrink.

    kind: values
    hint: away from the formula
    """

    @torch.no_grad()
    def smooth(block, seen, alpha=0.5):
        for name, readers in READERS.items():
            norm = block.get_submodule(name)
            weights = [block.get_submodule(reader).weight for reader in readers]
            columns = torch.cat([weight.abs().float() for weight in weights]).amax(dim=0)
            s = seen[name] ** alpha / columns ** (1 - alpha)
            s = s.where((seen[name] > 0) & (columns > 0), 1.0)
            norm.weight.copy_(norm.weight * s)
            for weight in weights:
                weight.copy_(weight / s)


def new_parameters():
    """New ones in place of the old: an optimizer would go on with those.

    kind: inputs
    hint: is a new parameter
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        right(block, seen, alpha)
        for name in READERS:
            norm = block.get_submodule(name)
            norm.weight = torch.nn.Parameter(norm.weight.detach().clone())


def only_outliers_are_moved():
    """The other channels stay as they are.

    kind: part
    hint: away from the formula
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        only = {}
        for name, readers in READERS.items():
            weights = [block.get_submodule(reader).weight for reader in readers]
            columns = torch.cat([weight.abs().float() for weight in weights]).amax(dim=0)
            own = torch.full_like(columns, False, dtype=torch.bool)
            own[outliers(seen[name])] = True
            neutral = columns ** ((1 - alpha) / alpha) if alpha else columns
            only[name] = seen[name].where(own, neutral)
        right(block, only, alpha)


def only_the_first_reader():
    """q and gate get the factor, the others still read what was.

    kind: part
    hint: divided by, the columns of all readers
    """

    @torch.no_grad()
    def smooth(block, seen, alpha=0.5):
        for name, readers in READERS.items():
            norm, weight = block.get_submodule(name), block.get_submodule(readers[0]).weight
            columns = weight.abs().float().amax(dim=0)
            s = seen[name] ** alpha / columns ** (1 - alpha)
            s = s.where((seen[name] > 0) & (columns > 0), 1.0)
            norm.weight.copy_(norm.weight / s)
            weight.copy_(weight * s)


def passes_are_kept():
    """Each batch's graph stays with what was seen.

    kind: memory
    hint: has a past
    """

    def observe(block, inputs):
        seen, hooks = {}, []
        for name in READERS:

            def record(norm, given, y, name=name):
                largest = y.abs().flatten(0, -2).amax(dim=0).float()
                seen[name] = torch.maximum(seen[name], largest) if name in seen else largest

            hooks.append(block.get_submodule(name).register_forward_hook(record))
        for x in inputs:
            run(block, x)
        for hook in hooks:
            hook.remove()
        return seen


def s_of_one_matrix():
    """All readers are scaled, and W_j is the first one's.

    kind: values
    hint: away from the formula
    """

    @torch.no_grad()
    def smooth(block, seen, alpha=0.5):
        for name, readers in READERS.items():
            norm = block.get_submodule(name)
            weights = [block.get_submodule(reader).weight for reader in readers]
            columns = weights[0].abs().float().amax(dim=0) ** 0.05
            s = seen[name] ** alpha / columns ** (1 - alpha)
            s = s.where((seen[name] > 0) & (columns > 0), 1.0)
            norm.weight.copy_(norm.weight / s)
            for weight in weights:
                weight.copy_(weight * s)


def seen_is_changed():
    """What was seen is used up.

    kind: inputs
    hint: is not what it was before the call
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        right(block, seen, alpha)
        for name in READERS:
            seen[name].div_(2)


def the_next_matrix_too():
    """v is made smaller and o larger: not what was asked, though the function stays.

    kind: work
    hint: has changed, and what it stands for
    """
    right = smooth

    def smooth(block, seen, alpha=0.5):
        right(block, seen, alpha)
        block.mlp.up_proj.weight.data /= 2
        block.mlp.down_proj.weight.data *= 2


def the_library():
    """Asks the course's own room.

    kind: library
    hint: is the library
    """
    import utils.compression

    rounded = utils.compression.quantize


def s_is_never_below_1():
    """Channels are only ever made smaller.

    kind: odd
    hint: away from the formula
    """

    @torch.no_grad()
    def smooth(block, seen, alpha=0.5):
        for name, readers in READERS.items():
            norm = block.get_submodule(name)
            weights = [block.get_submodule(reader).weight for reader in readers]
            columns = torch.cat([weight.abs().float() for weight in weights]).amax(dim=0)
            s = (seen[name] ** alpha / columns ** (1 - alpha)).clamp(1.0, 1e5).nan_to_num(1.0, 1.0)
            norm.weight.copy_(norm.weight / s)
            for weight in weights:
                weight.copy_(weight * s)


def the_mean_of_a_column():
    """The mean of a column's magnitudes, not the largest.

    kind: values
    hint: away from the formula
    """

    @torch.no_grad()
    def smooth(block, seen, alpha=0.5):
        for name, readers in READERS.items():
            norm = block.get_submodule(name)
            weights = [block.get_submodule(reader).weight for reader in readers]
            columns = torch.cat([weight.abs().float() for weight in weights]).mean(dim=0)
            s = seen[name] ** alpha / columns ** (1 - alpha)
            s = s.where((seen[name] > 0) & (columns > 0), 1.0)
            norm.weight.copy_(norm.weight / s)
            for weight in weights:
                weight.copy_(weight * s)
