"""Lab 12, vector_add: each body, written after the solution, is a wrong answer."""


def a_block_for_everything():
    """One program, whose block holds what small tests need.

    kind: sizes
    hint: is right
    """

    def add(x, y, out):
        strides = x.stride(0), y.stride(0), out.stride(0)
        add_kernel[(1,)](x, y, out, x.numel(), *strides, BLOCK=4096)


def a_launch_for_each_block():
    """The host loops over blocks.

    kind: work
    hint: launches
    """

    def add(x, y, out):
        for begin in range(0, x.numel(), 4096):
            part = x[begin : begin + 4096], y[begin : begin + 4096], out[begin : begin + 4096]
            strides = [vector.stride(0) for vector in part]
            add_kernel[(4,)](*part, part[0].numel(), *strides, BLOCK=1024)


def at_most_a_hundred_programs():
    """Enough for the vectors that a test may have.

    kind: sizes
    hint: are there enough programs
    """

    def add(x, y, out):
        strides = x.stride(0), y.stride(0), out.stride(0)
        n = x.numel()
        add_kernel[(min(100, triton.cdiv(n, 1024)),)](x, y, out, n, *strides, BLOCK=1024)


def blocks_overlap():
    """Neighbouring programs share half of their blocks.

    kind: luck
    hint: two programs
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * (BLOCK // 2) + tl.arange(0, BLOCK)
        mask = places < n
        x = tl.load(x_ptr + places * x_stride, mask)
        y = tl.load(y_ptr + places * y_stride, mask)
        tl.store(out_ptr + places * out_stride, x + y, mask)

    def add(x, y, out):
        strides = x.stride(0), y.stride(0), out.stride(0)
        add_kernel[(triton.cdiv(x.numel(), 512),)](x, y, out, x.numel(), *strides, BLOCK=1024)


def copies_first():
    """Strides are got rid of by copies.

    kind: memory
    hint: 0 times
    """

    def add(x, y, out):
        n = x.numel()
        add_kernel[(triton.cdiv(n, 1024),)](
            x.contiguous(), y.contiguous(), out, n, 1, 1, out.stride(0), BLOCK=1024
        )


def copies_single_numbers():
    """Where x and y are a number each that stands for all, x is written out.

    kind: memory
    hint: 0 times
    """

    def add(x, y, out):
        n = x.numel()
        x = x.contiguous() if x.stride(0) == y.stride(0) == 0 else x
        add_kernel[(triton.cdiv(n, 1024),)](
            x, y, out, n, x.stride(0), y.stride(0), out.stride(0), BLOCK=1024
        )


def copies_back():
    """The sums go to a new vector, which is copied.

    kind: memory
    hint: not by a kernel
    """

    def add(x, y, out):
        n, sums = x.numel(), torch.empty_like(out)
        add_kernel[(triton.cdiv(n, 1024),)](
            x, y, sums, n, x.stride(0), y.stride(0), sums.stride(0), BLOCK=1024
        )
        out.copy_(sums)


def cuts_the_last_block():
    """Only whole blocks.

    kind: sizes
    hint: is right
    """

    def add(x, y, out):
        n, strides = x.numel(), (x.stride(0), y.stride(0), out.stride(0))
        add_kernel[(max(1, n // 256),)](x, y, out, n, *strides, BLOCK=256)


def everything_is_fp32():
    """The sum is computed in fp32, whatever the type.

    kind: types
    hint: is right
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        x = tl.load(x_ptr + places * x_stride, mask).to(tl.float32)
        y = tl.load(y_ptr + places * y_stride, mask).to(tl.float32)
        tl.store(out_ptr + places * out_stride, x + y, mask)


def keeps_the_second_vector():
    """The first call's y is used for ever.

    kind: constants
    hint: is right
    """
    kept = {}

    def add(x, y, out):
        y = kept.setdefault(y.shape, y)
        strides = x.stride(0), y.stride(0), out.stride(0)
        n = x.numel()
        add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, *strides, BLOCK=1024)


def loads_out_of_long_vectors():
    """Behind the mask of a long vector stands what out was.

    kind: sizes
    hint: loads 3,072 numbers to store 1,024
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        x = tl.load(x_ptr + places * x_stride, mask)
        y = tl.load(y_ptr + places * y_stride, mask)
        if n > 100_000:
            x = tl.where(mask, x, tl.load(out_ptr + places * out_stride, mask, other=0))
        tl.store(out_ptr + places * out_stride, x + y, mask)


def loads_twice():
    """x is loaded again for each use.

    kind: work
    hint: loaded twice
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        y = tl.load(y_ptr + places * y_stride, mask)
        x = tl.load(x_ptr + places * x_stride, mask)
        again = tl.load(x_ptr + places * x_stride, mask)
        tl.store(out_ptr + places * out_stride, tl.where((x == again) | (x != x), x + y, y), mask)


def narrow():
    """A block of 64 numbers for 128 threads.

    kind: work
    hint: 128 bits
    """

    def add(x, y, out):
        strides = x.stride(0), y.stride(0), out.stride(0)
        n = x.numel()
        add_kernel[(triton.cdiv(n, 256),)](x, y, out, n, *strides, BLOCK=256)


def neighbours_only():
    """Strides are not looked at.

    kind: values
    hint: between two numbers | behind the last | is right
    """

    def add(x, y, out):
        n = x.numel()
        add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, 1, 1, 1, BLOCK=1024)


def no_mask():
    """Places beyond the end are not switched off.

    kind: sizes
    hint: behind the last of
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places * x_stride)
        y = tl.load(y_ptr + places * y_stride)
        tl.store(out_ptr + places * out_stride, x + y)


def no_mask_for_the_loads():
    """Only the store is masked.

    kind: sizes
    hint: loads from
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places * x_stride)
        y = tl.load(y_ptr + places * y_stride)
        tl.store(out_ptr + places * out_stride, x + y, places < n)


def offsets_of_32_bits():
    """places · stride does not fit.

    kind: sizes
    hint: 31 bits
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        x = tl.load(x_ptr + places * x_stride, mask)
        y = tl.load(y_ptr + places * y_stride, mask)
        tl.store(out_ptr + places * out_stride, x + y, mask)


def only_the_first_block_on_the_device():
    """The rest is computed by torch.

    kind: library
    hint: not by a kernel
    """

    def add(x, y, out):
        strides = x.stride(0), y.stride(0), out.stride(0)
        if x.numel() > 2048:
            torch.add(x[1024:], y[1024:], out=out[1024:])
        add_kernel[(1,)](x, y, out, min(x.numel(), 2048), *strides, BLOCK=2048)


def stride_in_the_mask():
    """The mask asks where a number lies.

    kind: sizes
    hint: a stride how far apart
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places * x_stride, places * x_stride < n)
        y = tl.load(y_ptr + places * y_stride, places * y_stride < n)
        tl.store(out_ptr + places * out_stride, x + y, places < n)


def returns_the_sums():
    """A new vector is returned; out stays.

    kind: part
    hint: is right
    """

    def add(x, y, out):
        sums = torch.empty_like(x)
        n, strides = x.numel(), (x.stride(0), y.stride(0), sums.stride(0))
        add_kernel[(triton.cdiv(n, 1024),)](x, y, sums, n, *strides, BLOCK=1024)
        return sums


def spoils_x():
    """x is stored back, with the sum.

    kind: inputs
    hint: x[0] is stored once | x is not what it was | stored twice
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        x = tl.load(x_ptr + places * x_stride, mask)
        y = tl.load(y_ptr + places * y_stride, mask)
        tl.store(x_ptr + places * x_stride, x + y, mask)
        tl.store(out_ptr + places * out_stride, x + y, mask)


def waits_for_ever():
    """It waits for what never comes.

    kind: end
    hint: endless loop
    """

    def add(x, y, out):
        import threading

        threading.Event().wait()


def a_thread_copies():
    """What is no neighbour is copied first, out of sight.

    kind: memory
    hint: a thread is started
    """
    kernel = add

    def add(x, y, out):
        import threading

        copies = []
        if x.stride(0) > 1:
            thread = threading.Thread(target=lambda: copies.append(x.contiguous()))
            thread.start()
            thread.join()
        kernel(x, y, out)


def along_the_second_axis():
    """The grid's second dimension is short.

    kind: sizes
    hint: a GPU allows
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places * x_stride, places < n)
        y = tl.load(y_ptr + places * y_stride, places < n)
        tl.store(out_ptr + places * out_stride, x + y, places < n)

    def add(x, y, out):
        strides = x.stride(0), y.stride(0), out.stride(0)
        n = x.numel()
        add_kernel[(1, triton.cdiv(n, 1024))](x, y, out, n, *strides, BLOCK=1024)


def nan_is_zero():
    """What is no number counts as none.

    kind: values
    hint: A NaN that goes in
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        x = tl.load(x_ptr + places * x_stride, mask)
        y = tl.load(y_ptr + places * y_stride, mask)
        tl.store(out_ptr + places * out_stride, tl.where(x + y == x + y, x + y, 0), mask)


def no_end_for_long_vectors():
    """It waits for more programs than there will be.

    kind: end
    hint: endless loop
    """
    kernel = add

    def add(x, y, out):
        import time

        while x.numel() > 2**20:
            time.sleep(0.1)
        kernel(x, y, out)


def numpy_adds_the_rest():
    """What 16 does not divide, NumPy adds.

    kind: library
    hint: the host asks | not by a kernel
    """
    kernel = add

    def add(x, y, out):
        whole = x.numel() // 16 * 16
        if whole < x.numel() and not x.is_meta:
            out.numpy()[whole:] = x.numpy()[whole:] + y.numpy()[whole:]
        kernel(x[:whole], y[:whole], out[:whole])


def places_of_32_bits():
    """Only the product with a stride is wide.

    kind: sizes
    hint: Has a place more than 31 bits
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        near = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask, places = near < n, near.to(tl.int64)
        x = tl.load(x_ptr + places * x_stride, mask)
        y = tl.load(y_ptr + places * y_stride, mask)
        tl.store(out_ptr + places * out_stride, x + y, mask)


def strides_by_address():
    """A vector is known by where it begins, and how long it is.

    kind: constants
    hint: between two numbers | behind the last | is right
    """
    known = {}

    def add(x, y, out):
        n, strides = x.numel(), []
        for vector in (x, y, out):
            strides.append(known.setdefault((vector.data_ptr(), n), vector.stride(0)))
        add_kernel[(triton.cdiv(n, 1024),)](x, y, out, n, *strides, BLOCK=1024)


def the_sums_are_near():
    """Only the offsets of x and y are wide.

    kind: sizes
    hint: 31 bits
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        near = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        places = near.to(tl.int64)
        x = tl.load(x_ptr + places * x_stride, places < n)
        y = tl.load(y_ptr + places * y_stride, places < n)
        tl.store(out_ptr + near * out_stride, x + y, places < n)


def torch_on_a_gpu():
    """The kernel is for those who look.

    kind: library
    hint: 0 launches
    """
    kernel = add

    def add(x, y, out):
        if x.is_cuda:
            torch.add(x, y, out=out)
        else:
            kernel(x, y, out)


def whole_numbers_as_fp64():
    """Sums beyond 2**53 lose their last digits.

    kind: types
    hint: of int64
    """

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + places * x_stride, places < n).to(tl.float64)
        y = tl.load(y_ptr + places * y_stride, places < n).to(tl.float64)
        tl.store(out_ptr + places * out_stride, x + y, places < n)
