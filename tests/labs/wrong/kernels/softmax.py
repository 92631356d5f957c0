"""Lab 12, softmax: each body, written after the solution, is a wrong answer."""


def a_copy_by_numpy():
    """The backward half's node keeps a copy of x that torch does not know of.

    kind: memory
    hint: the host asks for a number
    """

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        forward_kernel[(x.numel() // d,)](x.contiguous(), y, d, scale, **sizes(d))
        ctx.save_for_backward(y)
        ctx.x, ctx.scale = x.detach().numpy().copy(), scale
        return y

    Softmax.forward = staticmethod(forward)


def a_row_of_minus_infinity_is_zero():
    """Where a row is masked whole, 0 comes out.

    kind: odd
    hint: nan is right
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=-float("inf")).to(tl.float32) * scale
        e = tl.exp(x - tl.maximum(tl.max(x, 0), -1e30))
        tl.store(y_ptr + offsets, e / tl.maximum(tl.sum(e, 0), 1e-30), mask)


def a_sum_by_torch():
    """The backward half's sum is a pass of torch.

    kind: work
    hint: torch's own operators
    """

    @triton.jit
    def backward_kernel(y_ptr, dy_ptr, sums_ptr, dx_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        y = tl.load(y_ptr + offsets, mask).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask).to(tl.float32)
        dx = scale * y * (dy - tl.load(sums_ptr + tl.program_id(0)))
        tl.store(dx_ptr + offsets, dx, mask)

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        sums = (y.float() * dy.float()).sum(-1)
        dx, d = torch.empty_like(y), y.shape[-1]
        backward_kernel[(y.numel() // d,)](
            y, dy.contiguous(), sums, dx, d, ctx.scale, BLOCK=triton.next_power_of_2(d)
        )
        return dx, None

    Softmax.backward = staticmethod(backward)


def believes_in_neighbours():
    """dy is taken as it lies.

    kind: values
    hint: behind the last of dy | between two numbers of dy
    """

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, d = torch.empty_like(y), y.shape[-1]
        block = triton.next_power_of_2(d)
        backward_kernel[(y.numel() // d,)](y, dy, dx, d, ctx.scale, BLOCK=block)
        return dx, None

    Softmax.backward = staticmethod(backward)


def blocks_of_1024():
    """Longer rows are cut.

    kind: sizes
    hint: y at
    """

    class triton:
        jit, cdiv = triton.jit, triton.cdiv

        def next_power_of_2(d):
            return 1024


def dx_over_a_long_dy():
    """A long gradient is written over.

    kind: sizes
    hint: dx lies in the memory of dy
    """

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        long, d = dy.is_contiguous() and dy.numel() > 40_000, y.shape[-1]
        dx = dy if long else torch.empty_like(y)
        backward_kernel[(y.numel() // d,)](y, dy.contiguous(), dx, d, ctx.scale, **sizes(d))
        return dx, None

    Softmax.backward = staticmethod(backward)


def dx_over_y():
    """dx is written where y was.

    kind: inputs
    hint: y[0, 0] is stored
    """

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        d = y.shape[-1]
        block = triton.next_power_of_2(d)
        backward_kernel[(y.numel() // d,)](y, dy.contiguous(), y, d, ctx.scale, BLOCK=block)
        return y, None

    Softmax.backward = staticmethod(backward)


def four_warps():
    """Four warps share rows of any length.

    kind: sizes
    hint: for an H100 forward_kernel has loads {32
    """

    def sizes(d):
        return {"BLOCK": triton.next_power_of_2(d), "num_warps": 4}


def in_fp16():
    """All is computed in fp16.

    kind: types
    hint: y at
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=-float("inf")).to(tl.float16) * scale
        e = tl.exp((x - tl.max(x, 0)).to(tl.float32)).to(tl.float16)
        tl.store(y_ptr + offsets, e / tl.sum(e, 0), mask)


def in_the_type_of_x():
    """fp16 rows are computed in fp16.

    kind: types
    hint: y at
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=-float("inf"))
        x = (x * scale).to(x_ptr.dtype.element_ty)
        e = tl.exp((x - tl.max(x, 0)).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets, e / tl.sum(e, 0), mask)


def in_place():
    """y is written over x.

    kind: inputs
    hint: x[0, 0] is stored
    """

    def forward(ctx, x, scale):
        d = x.shape[-1]
        block = triton.next_power_of_2(d)
        forward_kernel[(x.numel() // d,)](x, x.detach(), d, scale, BLOCK=block)
        y = x.detach().view_as(x)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    Softmax.forward = staticmethod(forward)


def keeps_everything():
    """A work space for each call, which nobody frees.

    kind: memory
    hint: so much is held
    """
    kept, function = [], softmax

    def softmax(x, scale=1.0):
        kept.append(torch.empty(x.shape))
        return function(x, scale)


def keeps_the_last_scale():
    """The scale is the function's, not the graph's.

    kind: constants
    hint: dx at
    """

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        forward_kernel[(x.numel() // d,)](x.contiguous(), y, d, scale, **sizes(d))
        ctx.save_for_backward(y)
        Softmax.scale = scale
        return y

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, d = torch.empty_like(y), y.shape[-1]
        backward_kernel[(y.numel() // d,)](y, dy.contiguous(), dx, d, Softmax.scale, **sizes(d))
        return dx, None

    Softmax.forward, Softmax.backward = staticmethod(forward), staticmethod(backward)


def keeps_the_memory_of_x():
    """Not x, but its storage waits for the backward half.

    kind: memory
    hint: the memory of x
    """

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        forward_kernel[(x.numel() // d,)](x.contiguous(), y, d, scale, **sizes(d))
        ctx.save_for_backward(y)
        ctx.memory, ctx.scale = x.untyped_storage(), scale
        return y

    Softmax.forward = staticmethod(forward)


def keeps_x():
    """x waits for the backward half, beside y.

    kind: memory
    hint: waits for the backward half
    """

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        block = triton.next_power_of_2(d)
        forward_kernel[(x.numel() // d,)](x.contiguous(), y, d, scale, BLOCK=block)
        ctx.save_for_backward(y)
        ctx.x, ctx.scale = x, scale
        return y

    Softmax.forward = staticmethod(forward)


def maximum_of_the_first_numbers():
    """The maximum of the first 1,024 numbers.

    kind: part
    hint: y at
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=-float("inf")).to(tl.float32) * scale
        e = tl.exp(x - tl.max(tl.where(columns < 1024, x, -float("inf")), 0))
        tl.store(y_ptr + offsets, e / tl.sum(e, 0), mask)


def no_gradient_of_the_scale():
    """dx without the scale.

    kind: values
    hint: dx at
    """

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, d = torch.empty_like(y), y.shape[-1]
        block = triton.next_power_of_2(d)
        backward_kernel[(y.numel() // d,)](y, dy.contiguous(), dx, d, 1.0, BLOCK=block)
        return dx, None

    Softmax.backward = staticmethod(backward)


def no_maximum():
    """The exponential of x itself.

    kind: values
    hint: e to the power of a large number
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=-float("inf")).to(tl.float32) * scale
        e = tl.exp(x)
        tl.store(y_ptr + offsets, e / tl.sum(e, 0), mask)


def no_other():
    """Nothing is said about what the mask switches off.

    kind: sizes
    hint: no `other=` is named
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask).to(tl.float32) * scale
        e = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + offsets, e / tl.sum(e, 0), mask)


def offsets_in_32_bits():
    """The place of a row is made in 32 bits.

    kind: sizes
    hint: 31 bits
    """

    @triton.jit
    def backward_kernel(y_ptr, dy_ptr, dx_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0) * d + columns
        y = tl.load(y_ptr + offsets, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, scale * y * (dy - tl.sum(y * dy, 0)), mask)


def one_scale_for_ever():
    """The backward half takes the scale of the first call.

    kind: constants
    hint: dx at
    """
    scales = []

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        block = triton.next_power_of_2(d)
        forward_kernel[(x.numel() // d,)](x.contiguous(), y, d, scale, BLOCK=block)
        ctx.save_for_backward(y)
        scales.append(scale)
        ctx.scale = scales[0]
        return y

    Softmax.forward = staticmethod(forward)


def other_is_zero():
    """0 in place of -inf for what the mask switches off.

    kind: sizes
    hint: y at
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32) * scale
        e = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + offsets, e / tl.sum(e, 0), mask)


def products_in_fp16():
    """The products of the backward half's sum are rounded to the type of y.

    kind: types
    hint: dx at
    """

    @triton.jit
    def backward_kernel(y_ptr, dy_ptr, dx_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        y = tl.load(y_ptr + offsets, mask, other=0.0)
        dy = tl.load(dy_ptr + offsets, mask, other=0.0)
        along = tl.sum((y * dy).to(tl.float32), 0)
        tl.store(dx_ptr + offsets, scale * y.to(tl.float32) * (dy.to(tl.float32) - along), mask)


def rows_of_a_matrix():
    """Only the first dimension is rows.

    kind: sizes
    hint: y at
    """

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        block = triton.next_power_of_2(d)
        forward_kernel[(x.shape[0],)](x.contiguous(), y, d, scale, BLOCK=block)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    Softmax.forward = staticmethod(forward)


def scaled_by_numpy():
    """The scale is a pass of NumPy over dx.

    kind: work
    hint: not by a kernel | the host asks for a number
    """

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, d = torch.empty_like(y), y.shape[-1]
        backward_kernel[(y.numel() // d,)](y, dy.contiguous(), dx, d, 1.0, **sizes(d))
        rows = dx.numpy()
        rows *= ctx.scale
        return dx, None

    Softmax.backward = staticmethod(backward)


def sixteen_warps_for_few_rows():
    """512 threads share a row where there are few.

    kind: sizes
    hint: for an H100 forward_kernel has loads {32
    """

    def forward(ctx, x, scale):
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        d = x.shape[-1]
        rows = x.numel() // d
        few = {"num_warps": 16} if rows <= 132 else {}
        forward_kernel[(rows,)](x.contiguous(), y, d, scale, **sizes(d) | few)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    Softmax.forward = staticmethod(forward)


def strides_of_a_matrix():
    """dy is read by its last two strides.

    kind: sizes
    hint: of dy
    """

    @triton.jit
    def backward_kernel(y_ptr, dy_ptr, dx_ptr, d, row, number, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        program = tl.program_id(0).to(tl.int64)
        offsets = program * d + columns
        y = tl.load(y_ptr + offsets, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + program * row + columns * number, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offsets, scale * y * (dy - tl.sum(y * dy, 0)), mask)

    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, d = torch.empty_like(y), y.shape[-1]
        row = dy.stride(-2) if dy.ndim > 1 else 0
        backward_kernel[(y.numel() // d,)](y, dy, dx, d, row, dy.stride(-1), ctx.scale, **sizes(d))
        return dx, None

    Softmax.backward = staticmethod(backward)


def the_library():
    """torch.softmax, and its own backward half.

    kind: library
    hint: 0 launches
    """

    def softmax(x, scale=1.0):
        return torch.softmax(x * scale, -1)


def the_library_on_a_gpu():
    """The kernels run for the check alone.

    kind: library
    hint: 0 launches
    """
    function = softmax

    def softmax(x, scale=1.0):
        return torch.softmax(scale * x, -1) if x.is_cuda else function(x, scale)


def three_passes():
    """The row is read three times.

    kind: work
    hint: 3 times
    """

    @triton.jit
    def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        places = x_ptr + tl.program_id(0).to(tl.int64) * d + columns
        low = -float("inf")
        top = tl.max(tl.load(places, mask, other=low).to(tl.float32) * scale, 0)
        total = tl.sum(tl.exp(tl.load(places, mask, other=low).to(tl.float32) * scale - top), 0)
        e = tl.exp(tl.load(places, mask, other=low).to(tl.float32) * scale - top)
        y = y_ptr + tl.program_id(0).to(tl.int64) * d + columns
        tl.store(y, e / total, mask)


def without_the_sum():
    """dx = scale · y · dy.

    kind: values
    hint: dx at
    """

    @triton.jit
    def backward_kernel(y_ptr, dy_ptr, dx_ptr, d, scale, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        offsets = tl.program_id(0).to(tl.int64) * d + columns
        y = tl.load(y_ptr + offsets, mask).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask).to(tl.float32)
        tl.store(dx_ptr + offsets, scale * y * dy, mask)
