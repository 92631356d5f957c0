"""Lab 12, clipped_adamw: each body, written after the solution, is a wrong answer."""


def adds_up_in_one_place():
    """Each program adds its sum to one number, by a load and a store.

    kind: luck
    hint: two programs
    """

    @triton.jit
    def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + places, places < n, other=0.0)
        before = tl.load(parts_ptr)
        before = tl.where(tl.program_id(0) == 0, 0.0, before)
        tl.store(parts_ptr, before + tl.sum(g * g, 0))
        rest = parts_ptr + tl.program_id(0)
        tl.store(rest, 0.0, tl.program_id(0) > 0)


def atomic():
    """Programs add up by atomic additions.

    kind: luck
    hint: atomic
    """

    @triton.jit
    def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + places, places < n, other=0.0)
        tl.store(parts_ptr + tl.program_id(0), 0.0)
        tl.atomic_add(parts_ptr, tl.sum(g * g, 0))


def asks_the_host():
    """The host looks whether there is anything to clip.

    kind: communication
    hint: the host asks
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        norm = fused(p, g, m, v, t, max_norm, lr, *options, **named)
        return norm if norm.item() > max_norm else norm.clone()


def asks_behind_the_back():
    """NumPy tells the host the norm, where there is one.

    kind: communication
    hint: the host asks
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        norm = fused(p, g, m, v, t, max_norm, lr, *options, **named)
        return norm if norm.is_meta or norm.numpy() > max_norm else norm.clone()


def betas_of_the_book():
    """0.9 and 0.999, whatever is given.

    kind: constants
    hint: m at
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), **named):
        return fused(p, g, m, v, t, max_norm, lr, (0.9, 0.999), **named)


def clips_before():
    """torch shrinks g before the step.

    kind: inputs
    hint: g is changed
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        norm = g.norm()
        g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        fused(p, g, m, v, t, 1e30, lr, *options, **named)
        return norm


def clips_into_a_copy():
    """A third launch writes the shrunk gradient.

    kind: memory
    hint: works on all numbers
    """

    @triton.jit
    def shrink_kernel(g_ptr, out_ptr, factor_ptr, n, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + places, places < n) * tl.load(factor_ptr)
        tl.store(out_ptr + places, g, places < n)

    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        norm, shrunk = g.norm(), torch.empty_like(g)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        grid = (triton.cdiv(g.numel(), 1024),)
        shrink_kernel[grid](g, shrunk, factor, g.numel(), BLOCK=1024)
        fused(p, shrunk, m, v, t, 1e30, lr, *options, **named)
        return norm


def divides_by_the_bare_norm():
    """Without the 1e-6.

    kind: values
    hint: m at | v at | p at
    """

    def factor_of(norm, max_norm):
        return torch.where(norm.isfinite(), (max_norm / norm).clamp(max=1.0), -1.0)

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        parts = torch.empty(grid, device=g.device)
        squares_kernel[grid](g, parts, n, BLOCK=1024)
        norm = parts.sum().sqrt()
        step_kernel[grid](
            p, g, m, v, factor_of(norm, max_norm), n, 1 - lr * weight_decay, *betas,
            lr / (1 - betas[0] ** t), math.sqrt(1 - betas[1] ** t), eps, BLOCK=1024,
        )  # fmt: skip
        return norm


def every_program_adds_up():
    """The second launch's programs add up all parts, each anew.

    kind: work
    hint: touches
    """

    @triton.jit
    def step_kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, parts_ptr, n, decay, beta1, beta2, step_size, root, eps,
        BLOCK: tl.constexpr, max_norm, parts, PARTS: tl.constexpr,
    ):  # fmt: skip
        numbers = tl.arange(0, PARTS)
        norm = tl.sqrt(tl.sum(tl.load(parts_ptr + numbers, numbers < parts, other=0.0), 0))
        factor = tl.minimum(1.0, max_norm / (norm + 1e-6))
        if norm < float("inf"):
            places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = places < n
            p = tl.load(p_ptr + places, mask)
            g = tl.load(g_ptr + places, mask) * factor
            m = tl.load(m_ptr + places, mask)
            v = tl.load(v_ptr + places, mask)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p = p * decay - step_size * m / (tl.sqrt(v) / root + eps)
            tl.store(p_ptr + places, p, mask)
            tl.store(m_ptr + places, m, mask)
            tl.store(v_ptr + places, v, mask)

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        parts = torch.empty(grid, device=g.device)
        squares_kernel[grid](g, parts, n, BLOCK=1024)
        step_kernel[grid](
            p, g, m, v, parts, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
            math.sqrt(1 - betas[1] ** t), eps, 1024, max_norm, grid[0],
            triton.next_power_of_2(grid[0]),
        )  # fmt: skip
        return parts.sum().sqrt()


def half_of_the_parts():
    """The programs' sums are kept in fp16.

    kind: types
    hint: the norm
    """
    empty = torch.empty

    class torch_of_this_file:
        def __getattr__(self, name):
            return getattr(__import__("torch"), name)

        def empty(self, *shape, dtype=None, **named):
            return empty(*shape, dtype=self.float16, **named)

    torch = torch_of_this_file()


def keeps_a_work_space():
    """Memory is made in each call, and never let go.

    kind: memory
    hint: are still held
    """
    kept, fused = [], clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        kept.append(torch.empty_like(p))
        return fused(p, g, m, v, t, max_norm, lr, *options, **named)


def l2_in_place_of_decay():
    """The decay goes through the averages.

    kind: values
    hint: p at
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        return fused(p, g, m, v, t, max_norm, lr, betas, eps, 0.0)


def narrow():
    """Two numbers for each thread.

    kind: work
    hint: 128 bits
    """

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, block = p.numel(), 1024
        grid = (triton.cdiv(n, block),)
        parts = torch.empty(grid, device=g.device)
        squares_kernel[grid](g, parts, n, BLOCK=block)
        norm = parts.sum().sqrt()
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
        step_kernel[grid](
            p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
            math.sqrt(1 - betas[1] ** t), eps, BLOCK=block, num_warps=16,
        )  # fmt: skip
        return norm


def never_clips():
    """c = 1.

    kind: values
    hint: m at
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        return fused(p, g, m, v, t, 1e30, lr, *options, **named)


def no_other():
    """What the mask switches off goes into the sum.

    kind: sizes
    hint: no `other=` is named
    """

    @triton.jit
    def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + places, places < n)
        tl.store(parts_ptr + tl.program_id(0), tl.sum(g * g, 0))


def nothing_is_skipped():
    """A norm that is not finite goes on.

    kind: odd
    hint: not finite
    """

    @triton.jit
    def step_kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, factor_ptr, n, decay, beta1, beta2, step_size, root, eps,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        factor = tl.abs(tl.load(factor_ptr))
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        p = tl.load(p_ptr + places, mask)
        g = tl.load(g_ptr + places, mask) * factor
        m = tl.load(m_ptr + places, mask)
        v = tl.load(v_ptr + places, mask)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p * decay - step_size * m / (tl.sqrt(v) / root + eps)
        tl.store(p_ptr + places, p, mask)
        tl.store(m_ptr + places, m, mask)
        tl.store(v_ptr + places, v, mask)


def one_block_of_squares():
    """The norm of the first 8,192 gradients.

    kind: sizes
    hint: the norm
    """
    kernel = squares_kernel

    class squares_kernel:
        def __class_getitem__(cls, grid):
            def launch(g, parts, n, BLOCK):
                parts.zero_()
                kernel[(1,)](g, parts, n, BLOCK=8192)

            return launch


def only_three_of_four():
    """v is not stored.

    kind: part
    hint: v at
    """

    @triton.jit
    def step_kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, factor_ptr, n, decay, beta1, beta2, step_size, root, eps,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        factor = tl.load(factor_ptr)
        if factor >= 0:
            places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = places < n
            g = tl.load(g_ptr + places, mask) * factor
            m = beta1 * tl.load(m_ptr + places, mask) + (1 - beta1) * g
            v = beta2 * tl.load(v_ptr + places, mask) + (1 - beta2) * g * g
            p = tl.load(p_ptr + places, mask) * decay
            tl.store(p_ptr + places, p - step_size * m / (tl.sqrt(v) / root + eps), mask)
            tl.store(m_ptr + places, m, mask)


def remembers_the_norm():
    """The first norm is used in each step.

    kind: constants
    hint: the norm
    """
    fused, norms = clipped_step, {}

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        norm = fused(p, g, m, v, t, max_norm, lr, *options, **named)
        return norms.setdefault(p.numel(), norm)


def returns_the_clipped_norm():
    """The norm after clipping.

    kind: part
    hint: the norm
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        return fused(p, g, m, v, t, max_norm, lr, *options, **named).clamp(max=max_norm)


def the_norm_by_torch():
    """torch reads g, and one kernel steps.

    kind: library
    hint: works on all numbers
    """

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        norm = torch.linalg.vector_norm(g)
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
        step_kernel[(triton.cdiv(p.numel(), 1024),)](
            p, g, m, v, factor, p.numel(), 1 - lr * weight_decay, *betas,
            lr / (1 - betas[0] ** t), math.sqrt(1 - betas[1] ** t), eps, BLOCK=1024,
        )  # fmt: skip
        return norm


def squares_once_more():
    """g is loaded twice for its square.

    kind: work
    hint: 3 times
    """

    @triton.jit
    def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + places, places < n, other=0.0)
        again = tl.load(g_ptr + places, places < n, other=0.0)
        tl.store(parts_ptr + tl.program_id(0), tl.sum(g * again, 0))


def a_table_of_steps():
    """What t makes of the rates is known up to t = 1000.

    kind: constants
    hint: p at
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, *options, **named):
        return fused(p, g, m, v, min(t, 1000), *options, **named)


def a_root_of_20000_steps():
    """From step 20,000 on the average of squares counts as begun long ago.

    kind: constants
    hint: p at
    """

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        parts = torch.empty(grid, device=g.device)
        squares_kernel[grid](g, parts, n, BLOCK=1024)
        norm = parts.sum().sqrt()
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
        size, root = lr / (1 - betas[0] ** t), math.sqrt(1 - betas[1] ** min(t, 20_000))
        step_kernel[grid](
            p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, size, root, eps, BLOCK=1024
        )
        return norm


def a_thread_sums():
    """torch finds the norm out of sight.

    kind: library
    hint: a thread is started
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, *options, **named):
        from concurrent.futures import ThreadPoolExecutor

        fused(p, g, m, v, *options, **named)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.linalg.vector_norm, g).result()


def another_norm_for_long_gradients():
    """torch reads all of g once more where nobody looks at values.

    kind: work
    hint: on a GPU torch's own operators
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, *options, **named):
        norm = fused(p, g, m, v, *options, **named)
        return torch.linalg.vector_norm(g) if g.numel() > 2**20 else norm


def narrow_sums():
    """Two gradients for each thread of the first launch.

    kind: work
    hint: 128 bits
    """

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        parts = torch.empty(triton.cdiv(n, 256), device=g.device)
        squares_kernel[(len(parts),)](g, parts, n, BLOCK=256)
        norm = parts.sum().sqrt()
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
        step_kernel[grid](
            p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
            math.sqrt(1 - betas[1] ** t), eps, BLOCK=1024,
        )  # fmt: skip
        return norm


def rates_by_step():
    """What is made of t and the rates is kept for t.

    kind: constants
    hint: p at
    """
    kept = {}

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        parts = torch.empty(grid, device=g.device)
        squares_kernel[grid](g, parts, n, BLOCK=1024)
        norm = parts.sum().sqrt()
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
        size, root = kept.setdefault(t, (lr / (1 - betas[0] ** t), math.sqrt(1 - betas[1] ** t)))
        step_kernel[grid](
            p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, size, root, eps, BLOCK=1024
        )
        return norm


def reads_by_address():
    """The host asks memory, not the tensor.

    kind: communication
    hint: by its address
    """
    fused = clipped_step

    def clipped_step(p, g, m, v, t, max_norm, lr, *options, **named):
        import ctypes

        norm = fused(p, g, m, v, t, max_norm, lr, *options, **named)
        if not norm.is_meta and ctypes.c_float.from_address(norm.data_ptr()).value > max_norm:
            return norm.clone()
        return norm


def sums_by_place():
    """How squares are grouped depends on where g begins.

    kind: luck
    hint: other bits
    """

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        block = 64 if g.data_ptr() % 64 else 4096
        parts = torch.empty(triton.cdiv(n, block), device=g.device)
        squares_kernel[(len(parts),)](g, parts, n, BLOCK=block)
        norm = parts.sum().sqrt()
        factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
        step_kernel[grid](
            p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
            math.sqrt(1 - betas[1] ** t), eps, BLOCK=1024,
        )  # fmt: skip
        return norm


def the_host_makes_the_factor():
    """The norm comes to the host by a way that nobody watches, and goes on as a number.

    kind: communication
    hint: other numbers from the host
    """

    @triton.jit
    def step_kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, factor, n, decay, beta1, beta2, step_size, root, eps,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        if factor >= 0:
            places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = places < n
            p = tl.load(p_ptr + places, mask)
            g = tl.load(g_ptr + places, mask) * factor
            m = beta1 * tl.load(m_ptr + places, mask) + (1 - beta1) * g
            v = beta2 * tl.load(v_ptr + places, mask) + (1 - beta2) * g * g
            p = p * decay - step_size * m / (tl.sqrt(v) / root + eps)
            tl.store(p_ptr + places, p, mask)
            tl.store(m_ptr + places, m, mask)
            tl.store(v_ptr + places, v, mask)

    def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
        parts = torch.empty(grid, device=g.device)
        squares_kernel[grid](g, parts, n, BLOCK=1024)
        norm = parts.sum().sqrt()

        place = {"data": (norm.data_ptr(), True), "shape": (), "typestr": "<f4", "version": 3}
        value = float(__import__("numpy").asarray(type("", (), {"__array_interface__": place})))
        factor = min(1.0, max_norm / (value + 1e-6)) if math.isfinite(value) else -1.0
        step_kernel[grid](
            p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
            math.sqrt(1 - betas[1] ** t), eps, BLOCK=1024,
        )  # fmt: skip
        return norm


def zero_gradients_rest():
    """Where a gradient is 0, nothing happens.

    kind: values
    hint: m at
    """

    @triton.jit
    def step_kernel(
        p_ptr, g_ptr, m_ptr, v_ptr, factor_ptr, n, decay, beta1, beta2, step_size, root, eps,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        factor = tl.load(factor_ptr)
        if factor >= 0:
            places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            mask = places < n
            p, m, v = (tl.load(p_ptr + places, mask), tl.load(m_ptr + places, mask),
                       tl.load(v_ptr + places, mask))  # fmt: skip
            g = tl.load(g_ptr + places, mask) * factor
            new_m = beta1 * m + (1 - beta1) * g
            new_v = beta2 * v + (1 - beta2) * g * g
            new_p = p * decay - step_size * new_m / (tl.sqrt(new_v) / root + eps)
            tl.store(p_ptr + places, tl.where(g == 0, p, new_p), mask)
            tl.store(m_ptr + places, tl.where(g == 0, m, new_m), mask)
            tl.store(v_ptr + places, tl.where(g == 0, v, new_v), mask)
