"""Machine code, compiled in separate processes for GPUs that this machine does not have, shows what
they would execute."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

import triton
import triton.language as tl

from utils.kernels import GPUS, MachineCode, machine_code, occupancy
from utils.kernels.adamw import adamw_many, adamw_one, numbers
from utils.kernels.compile_ahead import compile_ahead
from utils.kernels.rms_norm import backward_kernel, forward_kernel

N = 16 * 1000
HYPER = numbers(1, 1e-3, (0.9, 0.999), 1e-8, 0.1)


def tensors(count, dtype=torch.float32, size=N):
    return [torch.empty(size, dtype=dtype, device="meta") for _ in range(count)]


@pytest.mark.parametrize(
    "gpu, threads, loads, stores, instruction",
    [
        ("A100", 128, {128: 8}, {128: 6}, "LDG.E.128"),
        ("MI250X", 256, {128: 4}, {128: 3}, "global_load_dwordx4"),
        ("MI300X", 256, {128: 4}, {128: 3}, "global_load_dwordx4"),
        ("MI355X", 256, {128: 4}, {128: 3}, "global_load_dwordx4"),
    ],
)
def test_adamw_moves_28_bytes_a_parameter_by_128_bits(gpu, threads, loads, stores, instruction):
    code = machine_code(adamw_one, *tensors(4), N, *HYPER, BLOCK=1024, gpu=gpu)
    assert (code.loads, code.stores, code.scalars) == (loads, stores, {})
    assert code.bytes_per(1024) == 28.0
    assert code.threads == threads and code.spills == 0 and code.registers <= 64
    assert code.assembly.count(instruction) == loads[128]


def test_a_size_that_16_does_not_divide_moves_the_same_bytes_one_by_one():
    for gpu, loads, stores in (("H100", 32, 24), ("MI250X", 16, 12)):
        code = machine_code(adamw_one, *tensors(4), N + 1, *HYPER, BLOCK=1024, gpu=gpu)
        assert (code.loads, code.stores) == ({32: loads}, {32: stores})
        assert code.bytes_per(1024) == 28.0


def test_an_address_that_16_does_not_divide_costs_its_tensor_only():
    p = torch.empty(N + 1)[1:]
    code = machine_code(adamw_one, p, *tensors(3), N, *HYPER, BLOCK=1024)
    assert (code.loads, code.stores) == ({128: 6, 32: 8}, {128: 4, 32: 8})


@pytest.mark.parametrize(
    "kind, loads, stores, bytes_of_a_parameter",
    [
        ("master", {128: 7}, {128: 7}, 28),
        ("stochastic", {128: 6}, {128: 5}, 22),
    ],
)
def test_many_tensors_move_no_byte_more(kind, loads, stores, bytes_of_a_parameter):
    table, tensor_of = tensors(1, torch.int64)[0], tensors(1, torch.int32)[0]
    code = machine_code(
        adamw_many, table, tensors(1)[0], tensor_of, 0, KIND=kind, ALIGNED=True, BLOCK=1024
    )
    assert (code.loads, code.stores, code.spills) == (loads, stores, 0)
    assert code.bytes_per(1024) == bytes_of_a_parameter
    amd = machine_code(
        adamw_many, table, tensors(1)[0], tensor_of, 0, KIND=kind, ALIGNED=True, BLOCK=1024,
        gpu="MI250X",
    )
    assert amd.bytes_per(1024) == bytes_of_a_parameter
    assert 10 < sum(code.scalars.values()) < 20  # from the table: the same for all threads


def test_rms_norm_reads_and_writes_each_number_once():
    x = tensors(6, size=4096)
    given = {"BLOCK": 4096, "num_warps": 16}
    code = machine_code(forward_kernel, *x[:4], 4096, 1e-5, **given)
    assert code.bytes_per(4096) == 4 + 4 + 4  # x, weight; y
    assert code.scalars == {32: 1}  # 1 / rms
    code = machine_code(backward_kernel, *x, 64, 4096, STAGES=1, **given)
    assert code.bytes_per(4096) == 3 * 4 + 2 * 4  # x, dy, weight; dx, and dw once for all rows


@pytest.mark.thorough
def test_rows_of_a_backward_pass_are_loaded_ahead():
    x, stages = tensors(6, torch.bfloat16, 4096), {}
    for count in (1, 3):
        code = machine_code(
            backward_kernel, *x, 64, 4096, BLOCK=4096, STAGES=count, num_warps=8
        )
        assert code.spills == 0 and occupancy(code).warps == 16
        stages[count] = code.assembly.count("LDGSTS.E.BYPASS.128"), code.shared
    assert stages[1][0] == 0 and stages[3][0] == 3 * 2 * 2  # two before the loop, one in it
    assert stages[3][1] >= 2 * 2 * 4096 * 2  # x and dy of two rows


def test_what_amd_spills_is_no_load():
    code = machine_code(
        backward_kernel, *tensors(6, size=4096), 64, 4096, BLOCK=4096, STAGES=3, num_warps=1,
        gpu="MI250X",
    )
    assert code.spills and code.registers == 512
    assert not code.loads.keys() - {128} and not code.stores.keys() - {128}


# ---- a kernel of your own

SCALE = tl.constexpr(3)


@triton.jit
def scaled(x):
    return x * SCALE


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Uses a helper and a constant of its module."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offsets, scaled(tl.load(x_ptr + offsets, offsets < n)), offsets < n)


@triton.jit
def wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), nothing_of_this_name)  # noqa: F821


def test_a_kernel_of_ones_own_with_what_it_uses():
    x = tensors(2, torch.bfloat16)
    code = machine_code(copy_kernel, *x, N, BLOCK=512, num_warps=2)
    assert (code.loads, code.stores) == ({128: 1}, {128: 1})
    assert code.bytes_per(512) == 4.0 and code.threads == 64


def inside_the_interpreter():
    code = machine_code(copy_kernel, *tensors(2), N, BLOCK=1024)
    return code.kernel, code.loads, code.stores


def test_it_compiles_beside_the_interpreter(interpreter):
    assert interpreter(inside_the_interpreter) == ("copy_kernel", {128: 2}, {128: 2})


def test_what_cannot_be_compiled_is_named():
    with pytest.raises(ValueError, match="gpu 'K80' is not one of A100, H100, MI250X"):
        machine_code(copy_kernel, *tensors(2), N, BLOCK=1024, gpu="K80")
    with pytest.raises(ValueError, match="copy_kernel: missing a required argument: 'n'"):
        machine_code(copy_kernel, *tensors(2), BLOCK=1024)
    with pytest.raises(ValueError, match="argument n is 'many': give a tensor or a number"):
        machine_code(copy_kernel, *tensors(2), "many", BLOCK=1024)
    with pytest.raises(ValueError, match=r"is not a kernel: give a function under @triton\.jit"):
        machine_code(42)
    with pytest.raises(
        ValueError, match=r"wrong_kernel does not compile: (?s:.*)nothing_of_this_name"
    ):
        machine_code(wrong_kernel, *tensors(1), BLOCK=1024)


def test_a_triton_without_a_vendor_says_so(monkeypatch):
    monkeypatch.delitem(triton.backends.backends, "amd")
    with pytest.raises(RuntimeError, match=r"Triton 3.* has no compiler for AMD's GPUs"):
        compile_ahead("", "kernel", {}, {}, [], ("hip", "gfx90a", 64), 4)


# ---- occupancy: by hand, from the limits of an SM


@pytest.mark.parametrize(
    "gpu, threads, registers, shared, programs, share, limit",
    [
        ("A100", 128, 32, 0, 16, 1.0, "warps"),
        ("A100", 256, 64, 0, 4, 0.5, "registers"),
        ("A100", 32, 16, 0, 32, 0.5, "blocks"),
        ("A100", 96, 33, 0, 16, 0.75, "registers"),  # 33 · 32 round up to 1280: 51 warps, so 48
        ("A100", 128, 255, 0, 2, 0.125, "registers"),
        ("A100", 128, 32, 48 * 1024, 3, 0.1875, "shared memory"),
        ("H100", 128, 32, 48 * 1024, 4, 0.25, "shared memory"),
        ("H100", 1024, 32, 0, 2, 1.0, "warps"),
        ("MI250X", 256, 64, 0, 8, 1.0, "warps"),  # per SIMD of a CU, by LLVM's test: 64 allow 8,
        ("MI250X", 256, 65, 0, 7, 0.875, "registers"),  # 65 to 72 allow 7 waves,
        ("MI250X", 256, 168, 0, 3, 0.375, "registers"),  # 129 to 168 allow 3,
        ("MI250X", 64, 512, 0, 4, 0.125, "registers"),  # 257 to 512 allow 1
        ("MI300X", 256, 32, 48 * 1024, 1, 0.125, "shared memory"),
        ("MI355X", 256, 32, 48 * 1024, 3, 0.375, "shared memory"),
    ],
)
def test_occupancy(gpu, threads, registers, shared, programs, share, limit):
    facts = {"spills": 0, "loads": {}, "stores": {}, "scalars": {}, "assembly": ""}
    found = occupancy(MachineCode("kernel", gpu, threads, registers, shared=shared, **facts))
    assert (found.programs, found.share, found.limit) == (programs, share, limit)
    assert found.warps == programs * threads // GPUS[gpu].vendor.lanes
