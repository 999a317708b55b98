"""The row ops on a GPU: the interpreter's bar at model sizes, and the same bits twice."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))
from guard import check

from kernels import (
    add_rms_norm,
    add_rows_,
    apply_rope,
    gather_rows,
    linear,
    make_row_gather,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
from kernels.gpu.gather_rows import gather_rows_ref
from kernels.torch.rms_norm import rms_norm_ref
from kernels.torch.rope import apply_rope_ref, qk_norm_rope_ref
from kernels.torch.swiglu import swiglu_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape):
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(8192, 1024), (4099, 2560), (8192, 4096), (1, 4095), (70001, 128), (300, 16384)]
)
def test_rms_norm(dtype, shape):
    torch.manual_seed(0)
    check(
        lambda x, w: rms_norm(x, w, 1e-6, backend="triton"),
        lambda x, w: rms_norm_ref(x, w, 1e-6),
        [normal(*shape), normal(shape[-1])],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8192, 1024), (4099, 4096), (33, 2561)])
def test_add_rms_norm(dtype, shape):
    torch.manual_seed(0)

    def plain(x, r, w):
        return rms_norm_ref(x + r, w, 1e-6), x + r

    check(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-6, backend="triton"),
        plain,
        [normal(*shape), normal(*shape), normal(shape[-1])],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4099, 2 * 3072), (1024, 2 * 14336), (7, 2 * 1501)])
def test_swiglu(dtype, shape):
    torch.manual_seed(0)
    check(lambda x: swiglu(x, backend="triton"), swiglu_ref, [normal(*shape)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (9, 3, 64), (28, 4, 80)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_with_and_without_the_norm(dtype, heads, has_norm):
    torch.manual_seed(0)
    num_tokens, (q_heads, k_heads, dim) = 4099, heads
    angle = torch.rand(40960, dim // 2, device="cuda", dtype=torch.float64) * 6.283
    at = torch.randint(0, 40960, (num_tokens,), device="cuda")
    cos, sin = angle.cos().float(), angle.sin().float()

    def both(rope, norm_rope):
        def op(fused, *weights):
            parts = fused.split((q_heads * dim, k_heads * dim, k_heads * dim), -1)
            q, k = (x.view(num_tokens, -1, dim) for x in parts[:2])
            return norm_rope(q, k, *weights) if has_norm else rope(q, k)

        return op

    def wide(q):
        kind = torch.promote_types(q.dtype, torch.float32)
        return cos.to(kind), sin.to(kind), at

    inputs = [normal(num_tokens, (q_heads + 2 * k_heads) * dim)]
    inputs += [normal(dim), normal(dim)] if has_norm else []
    check(
        both(
            lambda q, k: apply_rope(q, k, cos, sin, at, backend="triton"),
            lambda q, k, *w: qk_norm_rope(q, k, *w, cos, sin, at, 1e-6, backend="triton"),
        ),
        both(
            lambda q, k: apply_rope_ref(q, k, *wide(q)),
            lambda q, k, *w: qk_norm_rope_ref(q, k, *w, *wide(q), 1e-6),
        ),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_rows_adds_gradients_in_a_fixed_order(dtype):
    torch.manual_seed(0)
    index = torch.randint(0, 1000, (9001,))
    plan = make_row_gather(index, 1000, "cuda")
    check(
        lambda x: gather_rows(x, plan, backend="triton"),
        lambda x: gather_rows_ref(x, index.cuda()),
        [normal(1000, 8, 128)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embeddings_gradient_is_the_same_bits_every_time(dtype):
    torch.manual_seed(0)
    index = torch.randint(0, 50, (9001,), device="cuda")
    rows, before = normal(9001, 1030).cuda().to(dtype), normal(1000, 1030).cuda().float()
    totals = [before.clone() for _ in range(3)]
    for total in totals:
        add_rows_(total, index, rows)
    exact = before.double().index_add_(0, index, rows.double())
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])
    assert (totals[0] - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weights_gradient_reaches_its_fp32_buffer_unrounded(dtype):
    torch.manual_seed(0)
    x, dy = (normal(512, n).cuda().to(dtype) for n in (96, 64))
    weight = torch.zeros(64, 96, device="cuda", dtype=dtype, requires_grad=True)
    weight.main_grad = torch.zeros(64, 96, device="cuda")
    linear(x, weight).backward(dy)
    exact = dy.double().t() @ x.double()
    assert (weight.main_grad - exact).norm() < 1e-5 * exact.norm()  # bf16: 2e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_on_a_second_gpu_while_the_first_is_current():
    x, w = torch.randn(5, 96, device="cuda:1"), torch.randn(96, device="cuda:1")
    assert torch.cuda.current_device() == 0
    y = rms_norm(x, w, 1e-6)
    assert y.device == x.device and torch.cuda.current_device() == 0
    assert (y - rms_norm_ref(x, w, 1e-6)).abs().max() < 1e-5
