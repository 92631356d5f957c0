"""Lab 15, int8_linear: each body, written after the solution, is a wrong answer."""


def a_bias_of_whole_steps():
    """The bias is rounded to steps of the product, as some chips have it.

    kind: values
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            if self.bias is not None:
                step = 50 * self.scale * self.weight_scale
                self.bias = (self.bias / step).round() * step


def a_copy_by_numpy():
    """Keeps the float weights where torch does not see them.

    kind: memory
    hint: bytes alive
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            self.exact = linear.weight.detach().float().numpy().copy()


def a_linear_layer_inside():
    """Holds the linear layer, for its bias.

    kind: memory
    hint: bytes alive
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            self.linear = linear


def a_maximum_that_is_kept():
    """Goes on from what the last calibration found.

    kind: constants
    hint: is right
    """
    rest, seen = calibrate, [0.0]

    def calibrate(batches, percentile=100.0):
        if percentile < 100:
            return rest(batches, percentile)
        for x in batches:
            seen[0] = max(seen[0], x.abs().max().item())
        return torch.tensor(seen[0] / HIGHEST or 1.0)


def a_scale_for_all_of_w():
    """One scale for the whole matrix.

    kind: values
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            weight = linear.weight.detach().float()
            whole = weight.abs().max() / HIGHEST
            self.weight = (weight / whole).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
            self.weight_scale = whole.expand(len(weight)).clone()


def a_transposed_copy_each_time():
    """The transposed matrix is laid out anew in each call.

    kind: work
    hint: as large as W
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
            y = torch._int_mm(values, self.weight.T.contiguous()).float()
            y = y * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def beyond_the_range_wraps():
    """What lies beyond becomes int8 without a clamp.

    kind: odd
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-1000, 1000).to(torch.int32).to(torch.int8)
            y = torch._int_mm(values, self.weight.T).float() * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def changes_x():
    """Divides in place.

    kind: inputs
    hint: x is not what it was
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            scale = self.scale.to(x.dtype)
            x /= scale
            y = super().forward(x * scale)
            return y


def counts_from_128():
    """128 steps downwards, 127 upwards: a number and its negative are not alike.

    kind: values
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-HIGHEST - 1, HIGHEST).to(torch.int8)
            y = torch._int_mm(values, self.weight.T).float() * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def cuts_off():
    """Whole numbers by cutting off, not by rounding.

    kind: values
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).clamp(-HIGHEST, HIGHEST).to(torch.int8)
            y = torch._int_mm(values, self.weight.T).float() * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def factors_of_32_bits():
    """Whole numbers, in four times the bytes.

    kind: types
    hint: factors of torch.int32
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-HIGHEST, HIGHEST).to(torch.int32)
            y = (values @ self.weight.T.int()).float() * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def fp32_comes_out():
    """The result of bf16 is fp32.

    kind: types
    hint: y is torch.float32
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            return super().forward(x.float())


def goes_through_twice():
    """Counts the batches first: a generator is empty then.

    kind: part
    hint: nothing | stack | expected | is right | cannot divide
    """

    def calibrate(batches, percentile=100.0):
        rows = sum(len(x) for x in batches)
        sizes = torch.cat([x.float().abs().flatten() for x in batches] or [torch.ones(rows)])
        place = max(int(-(-len(sizes) * percentile // 100)) - 1, 0)
        scale = sizes.sort().values[place] / HIGHEST
        return scale.where(scale > 0, 1.0)


def keeps_all_batches():
    """Joins all batches to find their maximum.

    kind: memory
    hint: live at once
    """

    def calibrate(batches, percentile=100.0):
        sizes = torch.cat([x.float().abs().flatten() for x in batches]).sort().values
        place = max(int(-(-len(sizes) * percentile // 100)) - 1, 0)
        scale = sizes[place] / HIGHEST
        return scale.where(scale > 0, 1.0)


def largest_not_magnitude():
    """The largest number: the negative ones are larger.

    kind: values
    hint: largest magnitude may be a negative
    """
    rest = calibrate

    def calibrate(batches, percentile=100.0):
        if percentile < 100:
            return rest(batches, percentile)
        largest = torch.stack([x.max().float() for x in batches]).max()
        return (largest / HIGHEST).where(largest > 0, 1.0)


def mean_of_maxima():
    """The mean over batches of each batch's largest.

    kind: values
    hint: all numbers of all batches
    """
    rest = calibrate

    def calibrate(batches, percentile=100.0):
        if percentile < 100:
            return rest(batches, percentile)
        largest = torch.stack([x.abs().max().float() for x in batches]).mean()
        return (largest / HIGHEST).where(largest > 0, 1.0)


def mean_of_percentiles():
    """The mean over batches of each batch's percentile.

    kind: values
    hint: all numbers of all batches
    """

    def calibrate(batches, percentile=100.0):
        if percentile == 100:
            largest = torch.stack([x.abs().max().float() for x in batches]).max()
        else:
            found = [x.float().abs().flatten().quantile(percentile / 100) for x in batches]
            largest = torch.stack(found).mean()
        return (largest / HIGHEST).where(largest > 0, 1.0)


def of_the_last_batch():
    """Each batch begins anew.

    kind: part
    hint: all numbers of all batches
    """
    rest = calibrate

    def calibrate(batches, percentile=100.0):
        if percentile < 100:
            return rest(batches, percentile)
        for x in batches:
            largest = x.abs().max().float()
        return (largest / HIGHEST).where(largest > 0, 1.0)


def one_scale_a_call():
    """The scale of the numbers that come: not the calibrated one, and it depends on the company.

    kind: constants
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            scale = rows.abs().max() / HIGHEST if len(rows) else self.scale
            values = (rows / scale).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
            y = torch._int_mm(values, self.weight.T).float() * (scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def products_of_floats():
    """Whole numbers are kept, and floats multiplied.

    kind: work
    hint: factors of torch.float32
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-HIGHEST, HIGHEST)
            y = (values @ self.weight.T.float()) * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def products_out_of_sight():
    """NumPy multiplies, in whole numbers.

    kind: library
    hint: 0 multiplications are int8
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-HIGHEST, HIGHEST)
            sums = values.numpy().astype("int32") @ self.weight.numpy().T.astype("int32")
            y = torch.from_numpy(sums).float() * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def remembers_the_last_input():
    """Keeps x, to look at it later.

    kind: memory
    hint: still held | holds more than before
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            self.last = (x / self.scale).round()
            return super().forward(x)


def rows_become_a_matrix():
    """All rows in one matrix, whatever shape they came in.

    kind: sizes
    hint: has the shape
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            return super().forward(x.reshape(-1, x.shape[-1]))


def rows_of_zeros_are_divided_by_zero():
    """0 / 0 where a row of W has nothing but zeros.

    kind: odd
    hint: divided by a scale of 0
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            weight = linear.weight.detach().float()
            self.weight_scale = weight.abs().amax(dim=1) / HIGHEST
            self.weight_scale = self.weight_scale / (self.weight_scale > 0)


def scales_in_bf16():
    """W's scales are found in W's type.

    kind: types
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            weight = linear.weight.detach()
            scales = weight.abs().amax(dim=1, keepdim=True) / HIGHEST
            scales = scales.where(scales > 0, 1.0)
            values = (weight / scales).round().clamp(-HIGHEST, HIGHEST)
            self.weight, self.weight_scale = values.to(torch.int8), scales.float().squeeze(1)


def the_graph_is_kept():
    """Without detach: the scales remember the weights that they come from.

    kind: memory
    hint: bytes alive
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            scales = linear.weight.float().abs().amax(dim=1) / HIGHEST
            self.weight_scale = scales.where(scales > 0, 1.0)


def the_scale_is_an_attribute():
    """A float that no state_dict knows of.

    kind: part
    hint: computes something else
    """

    class Int8Linear(Int8Linear):
        def __init__(self, linear, scale):
            super().__init__(linear, scale)
            del self.scale
            self.scale = scale.item()


def the_scale_learns_on():
    """Widens the range when larger numbers come.

    kind: constants
    hint: numbers differ | not what it was before the calls | still held
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            y = super().forward(x)
            if x.numel():
                self.scale = torch.maximum(self.scale, x.abs().max().float() / HIGHEST)
            return y


def the_sum_has_a_float_for_a_part():
    """Outlier channels apart, in floats: exact, and not the contract.

    kind: work
    hint: factors of torch.float32
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            values = (rows / self.scale).round().clamp(-HIGHEST, HIGHEST)
            whole, rest = values[:, 1:].to(torch.int8), values[:, :1]
            y = torch._int_mm(whole, self.weight[:, 1:].T) + rest @ self.weight[:, :1].T.float()
            y = y * (self.scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def a_finer_scale_where_x_is_small():
    """The calibrated scale only where it is needed: the same row differs by its company.

    kind: odd
    hint: numbers differ
    """

    class Int8Linear(Int8Linear):
        def forward(self, x):
            rows = x.reshape(-1, x.shape[-1]).float()
            own = rows.abs().max() / HIGHEST if rows.numel() else self.scale
            scale = torch.minimum(self.scale, own.clamp(min=1e-20))
            values = (rows / scale).round().clamp(-HIGHEST, HIGHEST).to(torch.int8)
            y = torch._int_mm(values, self.weight.T).float() * (scale * self.weight_scale)
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
