"""Lab 12, fused_norm: each body, written after the solution, is a wrong answer."""


def a_row_for_each_program():
    """The weight is loaded for each row.

    kind: work
    hint: 20.00 bytes a number
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(rows,)](x, residual, weight, y, h, rows, d, eps, BLOCK=block)
        return y, h


def eps_outside():
    """eps is added to the root.

    kind: values
    hint: y at
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            y = h / (tl.sqrt(tl.sum(h * h, 0) / d) + eps) * w
            tl.store(y_ptr + offsets, y, mask)


def few_programs_have_a_row():
    """44 programs work, the others end at once.

    kind: work
    hint: SMs
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows * (tl.program_id(0) < 44), 44):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            y = h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w
            tl.store(y_ptr + offsets, y, mask)


def few_programs():
    """Eight programs share all rows: fewer bytes, and an idle GPU.

    kind: work
    hint: SMs
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, 8),)](x, residual, weight, y, h, rows, d, eps, BLOCK=block)
        return y, h


def few_programs_for_many_rows():
    """Half of the SMs rest where there are more than 1,000 rows.

    kind: sizes
    hint: SMs
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS if rows < 1000 else SMS // 2),)](
            x, residual, weight, y, h, rows, d, eps, BLOCK=block, num_warps=max(1, block // 1024)
        )
        return y, h


def four_rows_each():
    """Four rows for each program, however few there are.

    kind: sizes
    hint: SMs
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(triton.cdiv(rows, 4),)](x, residual, weight, y, h, rows, d, eps, BLOCK=block)
        return y, h


def h_by_torch():
    """The sum is an operation of its own.

    kind: work
    hint: bytes a number
    """

    @triton.jit
    def norm_kernel(x_ptr, w_ptr, y_ptr, rows, d, eps, BLOCK: tl.constexpr):
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        h = x + residual
        y = torch.empty_like(h)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](h, weight, y, rows, d, eps, BLOCK=block)
        return y, h


def h_over_a_long_residual():
    """No memory for h where there is much of it.

    kind: sizes
    hint: h lies in the memory of residual
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), residual if x.numel() > 40_000 else torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, h, rows, d, eps, BLOCK=block, num_warps=max(1, block // 256)
        )
        return y, h


def h_over_the_residual():
    """No memory for h: it goes where the residual was.

    kind: inputs
    hint: residual is not what it was
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y = torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, residual, rows, d, eps, BLOCK=block
        )  # fmt: skip
        return y, residual


def half_of_h():
    """h is stored in fp16: fewer bytes.

    kind: types
    hint: h is torch.float16
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x, dtype=torch.float16)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](x, residual, weight, y, h, rows, d, eps, BLOCK=block)
        return y, h


def mean_of_the_block():
    """The sum is divided by the block's size.

    kind: sizes
    hint: y at
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / BLOCK + eps) * w, mask)


def nan_is_zero():
    """A row that is spoilt hides.

    kind: odd
    hint: nan is right
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            y = h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w
            tl.store(y_ptr + offsets, tl.where(y == y, y, 0.0), mask)


def nan_spoils_later_rows():
    """Where a row has a NaN, the program's copy of the weight gets it.

    kind: odd
    hint: y at
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            w = tl.where(h == h, w, h)
            tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)


def no_other():
    """What the mask switches off goes into the sum.

    kind: sizes
    hint: no `other=` is named
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask) + tl.load(residual_ptr + offsets, mask)
            tl.store(h_ptr + offsets, h, mask)
            tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)


def offsets_in_32_bits():
    """The place of a row is made in 32 bits.

    kind: sizes
    hint: 31 bits
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = row * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            y = h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w
            tl.store(y_ptr + offsets, y, mask)


def one_eps_for_ever():
    """The eps of the first call with rows of this length.

    kind: constants
    hint: y at
    """
    kept, function = {}, add_norm

    def add_norm(x, residual, weight, eps):
        return function(x, residual, weight, kept.setdefault(weight.shape, eps))


def one_weight_for_ever():
    """The weight of the first call.

    kind: constants
    hint: y at
    """
    kept, function = {}, add_norm

    def add_norm(x, residual, weight, eps):
        return function(x, residual, kept.setdefault(weight.shape, weight), eps)


def only_y():
    """h is kept to itself.

    kind: part
    hint: not (y, h)
    """
    function = add_norm

    def add_norm(x, residual, weight, eps):
        return function(x, residual, weight, eps)[0]


def reads_h_back():
    """h goes to memory and comes back.

    kind: work
    hint: bytes a number
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            root = tl.sqrt(tl.sum(h * h, 0) / d + eps)
            tl.store(y_ptr + offsets, tl.load(h_ptr + offsets, mask) / root * w, mask)


def results_in_one_place():
    """Memory is made once for each shape.

    kind: constants
    hint: make new memory
    """
    made, empty_like = {}, torch.empty_like

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = made.setdefault(x.shape, (empty_like(x), empty_like(x)))
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, h, rows, d, eps, BLOCK=block, num_warps=max(1, block // 256)
        )
        return y, h


def results_in_a_ring():
    """Three pairs of results for each shape, used in turn.

    kind: memory
    hint: make new memory
    """
    made, empty_like = {}, torch.empty_like

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        ring = made.setdefault(x.shape, [])
        ring.append((empty_like(x), empty_like(x)) if len(ring) < 3 else ring.pop(0))
        y, h = ring[-1]
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, h, rows, d, eps, BLOCK=block, num_warps=max(1, block // 256)
        )
        return y, h


def results_by_the_place_of_x():
    """Memory is made once for each x.

    kind: constants
    hint: make new memory
    """
    made, empty_like = {}, torch.empty_like

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = made.setdefault((rows, d, x.data_ptr()), (empty_like(x), empty_like(x)))
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, h, rows, d, eps, BLOCK=block, num_warps=max(1, block // 256)
        )
        return y, h


def rows_left_over():
    """Each program takes rows // programs.

    kind: sizes
    hint: is right
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        each = rows // tl.num_programs(0)
        for row in range(tl.program_id(0) * each, (tl.program_id(0) + 1) * each):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)


def sixteen_warps():
    """512 threads share rows of any length.

    kind: sizes
    hint: for an H100 norm_kernel has loads {32
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, h, rows, d, eps, triton.next_power_of_2(d), num_warps=16
        )
        return y, h


def sixteen_warps_for_few_rows():
    """512 threads share a row where there is one for each program.

    kind: sizes
    hint: for an H100 norm_kernel has loads {32
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x,
            residual,
            weight,
            y,
            h,
            rows,
            d,
            eps,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)) if rows > SMS else 16,
        )
        return y, h


def spills():
    """One warp holds rows of any length.

    kind: memory
    hint: do not fit into registers
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x, residual, weight, y, h, rows, d, eps, BLOCK=block, num_warps=1
        )
        return y, h


def spills_for_few_rows():
    """One warp holds a row where there is one for each program.

    kind: memory
    hint: do not fit into registers
    """

    def add_norm(x, residual, weight, eps):
        rows, d = x.shape
        y, h = torch.empty_like(x), torch.empty_like(x)
        block = triton.next_power_of_2(d)
        norm_kernel[(min(rows, SMS),)](
            x,
            residual,
            weight,
            y,
            h,
            rows,
            d,
            eps,
            BLOCK=block,
            num_warps=max(1, min(16, block // 256)) if rows > SMS else 1,
        )
        return y, h


def the_library():
    """torch's own RMSNorm.

    kind: library
    hint: that is the library
    """

    def add_norm(x, residual, weight, eps):
        h = x + residual
        return torch.rms_norm(h, weight.shape, weight, eps), h


def three_rows_each():
    """132 programs have three rows each, however many there are.

    kind: constants
    hint: is right
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        w = tl.load(w_ptr + columns, mask, other=0.0)
        for row in range(
            tl.program_id(0), tl.minimum(rows, 3 * tl.num_programs(0)), tl.num_programs(0)
        ):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            y = h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w
            tl.store(y_ptr + offsets, y, mask)


def two_launches():
    """The sum, then the norm.

    kind: work
    hint: launches
    """

    @triton.jit
    def sum_kernel(x_ptr, residual_ptr, h_ptr, n, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        h = tl.load(x_ptr + places, mask) + tl.load(residual_ptr + places, mask)
        tl.store(h_ptr + places, h, mask)

    function = add_norm

    def add_norm(x, residual, weight, eps):
        h = torch.empty_like(x)
        sum_kernel[(triton.cdiv(x.numel(), 1024),)](x, residual, h, x.numel(), BLOCK=1024)
        y, _ = function(x, residual, weight, eps)
        return y, h


def waits_for_ever():
    """It waits for what never comes.

    kind: end
    hint: endless loop
    """

    def add_norm(x, residual, weight, eps):
        import threading

        threading.Event().wait()


def weight_by_numpy():
    """y without the weight, and NumPy multiplies by it.

    kind: work
    hint: not by a kernel | the host asks for a number
    """

    @triton.jit
    def norm_kernel(
        x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
    ):  # fmt: skip
        columns = tl.arange(0, BLOCK)
        mask = columns < d
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            offsets = tl.cast(row, tl.int64) * d + columns
            h = tl.load(x_ptr + offsets, mask, other=0.0)
            h += tl.load(residual_ptr + offsets, mask, other=0.0)
            tl.store(h_ptr + offsets, h, mask)
            tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps), mask)

    function = add_norm

    def add_norm(x, residual, weight, eps):
        y, h = function(x, residual, weight, eps)
        rows = y.numpy()
        rows *= weight.numpy()
        return y, h
