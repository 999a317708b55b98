"""Row ops in C++ (norms, SwiGLU, rotary embedding, cache rows) against fp64 and PyTorch's own
rounding; a row's bits depend on the row alone."""

import pytest
import torch
from native_cases import DTYPES, ORDERS, assert_close, bounds, shuffled_cache, split_qkv, threads

from kernels import add_rms_norm, apply_rope, qk_norm_rope, rms_norm, swiglu
from kernels.torch.kv_cache import key_rows

pytestmark = pytest.mark.usefixtures("native")

WIDTHS = [1, 7, 15, 16, 17, 40, 63, 64, 65, 80, 100, 576]
FEW_ULPS = 8 * 2.0**-24


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_fp64s_rounded_once(dtype, width):
    torch.manual_seed(width)
    weight = torch.randn(width).to(dtype)
    for shape in ((0, width), (1, width), (5, width), (2, 3, width)):
        x, residual = (torch.randn(shape).to(dtype) * 3 for _ in range(2))
        assert_close(rms_norm(x, weight, 1e-5), norm64(x, weight, 1e-5), FEW_ULPS)
        y, total = add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, residual + x)  # PyTorch's sum, with its rounding
        assert torch.equal(y, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu_is_fp64s_rounded_once(dtype, width):
    torch.manual_seed(width)
    for num_rows in (0, 1, 5):
        x = torch.randn(num_rows, 2 * width).to(dtype) * 4
        gate, up = x.double().chunk(2, -1)
        assert_close(swiglu(x), gate / (1 + (-gate).exp()) * up, FEW_ULPS)


def test_exp_is_right_from_where_it_vanishes_to_where_it_overflows():
    edges = [0.0, -0.0, 87.33, 87.34, 88.0, 88.72, 88.73, 89.0, 104.0, 200.0, 3e38, torch.inf]
    values = torch.tensor(edges)
    gate = torch.cat([torch.linspace(-87, 87, 17401), values, -values[:-1]])
    ours = swiglu(torch.stack([gate, torch.ones_like(gate)], -1)).squeeze(-1)
    exact = gate.double() / (1 + (-gate.double()).exp())
    is_inf = exact.isinf()
    assert torch.equal(ours[is_inf].double(), exact[is_inf]) and is_inf.sum() == 1
    is_normal = ~is_inf & (gate >= -87)
    assert_close(ours[is_normal], exact[is_normal], FEW_ULPS)
    is_small = (gate < -87) & (gate >= -88.72)  # a sigmoid below fp32's normal numbers
    assert_close(ours[is_small], exact[is_small], 1e-5, 0.0)
    is_lost = ~is_inf & (gate < -88.72)
    assert_close(ours[is_lost], exact[is_lost], FEW_ULPS, 3e-37)
    assert swiglu(torch.tensor([[torch.nan, 1.0], [-torch.inf, 1.0]])).isnan().all()


def test_bf16_is_rounded_as_pytorch_rounds():
    """A rotation by (cos, sin) = (x, 0) of the pair (1, 0) stores x itself, rounded to bf16."""
    torch.manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (20000,), dtype=torch.int64).to(torch.int32)
    high = torch.randint(-(2**15), 2**15, (2000,), dtype=torch.int64) << 16
    ties = torch.cat([high + 0x8000, high + 0x7FFF, high + 0x8001, high]).to(torch.int32)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, 1e-45, 1e-39])
    x = torch.cat([patterns.view(torch.float32), ties.view(torch.float32), special])
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FFF8000, -1, -(2**15)], dtype=torch.int32)
    x = torch.cat([x, nans.view(torch.float32)])[:, None]
    q = torch.tensor([1.0, 0.0], dtype=torch.bfloat16).expand(len(x), 1, 2).contiguous()
    ours = apply_rope(q, q, x, torch.zeros_like(x), None)[0][:, 0, 0]
    expected = x[:, 0].to(torch.bfloat16)
    is_nan = expected.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert torch.equal(ours.view(torch.int16)[~is_nan], expected.view(torch.int16)[~is_nan])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 6, 16, 32, 40, 64, 80, 96, 128])
def test_rotation_is_multiplication_of_complex_numbers(dtype, head_dim):
    torch.manual_seed(head_dim)
    angle = torch.randn(50, head_dim // 2) * 3
    cos, sin = angle.cos(), angle.sin()
    turn = torch.complex(cos.double(), sin.double())
    for num_tokens in (0, 1, 9):
        q, k, _ = split_qkv(num_tokens, 2, 3, head_dim, dtype)
        positions = torch.randint(0, 50, (num_tokens,))
        for ours, x in zip(apply_rope(q, k, cos, sin, positions), (q, k), strict=True):
            exact = torch.complex(*x.double().chunk(2, -1)) * turn[positions].unsqueeze(1)
            # a difference of products: relative to the pair's length, not to the element
            limit = exact.abs().float() * (2.0**-8 if dtype == torch.bfloat16 else FEW_ULPS)
            for part, of in zip(ours.double().chunk(2, -1), (exact.real, exact.imag), strict=True):
                assert ((part - of).abs() <= limit + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_split_product_are_normalised_where_they_lie(dtype):
    q, k, _ = split_qkv(7, 2, 3, 40, dtype)
    weights = [torch.randn(40).to(dtype) for _ in range(2)]
    angle = torch.randn(7, 20)
    views = qk_norm_rope(q, k, *weights, angle.cos(), angle.sin(), None)
    copies = qk_norm_rope(q.contiguous(), k.contiguous(), *weights, angle.cos(), angle.sin(), None)
    normed = rms_norm(q, weights[0]), rms_norm(k, weights[1])
    assert_close(normed[0], norm64(q, weights[0], 1e-6), FEW_ULPS)
    expected = apply_rope(*normed, angle.cos(), angle.sin(), None)
    for a, b, c in zip(views, copies, expected, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("width", [40, 96, 576])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads, width):
    torch.manual_seed(0)
    rows = (1 << 16) // width + 5  # enough to be shared among threads
    x, weight = torch.randn(rows, width).to(dtype) * 3, torch.randn(width).to(dtype)
    angle = torch.randn(rows, width // 2)

    def rope(x, rows):
        return apply_rope(x[:, None], x[:, None], angle[rows].cos(), angle[rows].sin(), None)[0]

    ops = [
        lambda x, rows: swiglu(x),
        lambda x, rows: rms_norm(x, weight, 1e-5),
        lambda x, rows: torch.cat(add_rms_norm(x, x * 2, weight, 1e-5), -1),
        rope,
    ]
    for op in ops:
        picked = [0, 1, 7, rows // 2, rows - 1]
        alone = torch.cat([op(x[i : i + 1], slice(i, i + 1)) for i in picked])
        with threads(num_threads):
            whole = op(x, slice(None))
            assert torch.equal(whole[picked], alone)
            assert torch.equal(op(x[3:20], slice(3, 20)), whole[3:20])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_kv", [1, 3])
def test_keys_and_values_of_a_split_product_lie_in_their_slots(dtype, order, num_kv):
    torch.manual_seed(0)
    lengths, block_size = [1, 7, 40], 32 if order == "runs" else 5
    _, k, v = split_qkv(sum(lengths), num_kv, 2, 6, dtype)
    k = k.contiguous()  # as rotated keys are: v alone lies apart
    k_cache, v_cache, tables = shuffled_cache(k, v, lengths, block_size, order)
    assert (k_cache.dim() == 6) == (order == "runs")
    for cache, x in ((key_rows(k_cache), k), (v_cache, v)):
        written = torch.zeros(cache.shape[:2], dtype=torch.bool)
        for i, lo in enumerate(bounds(lengths)[:-1]):
            for t in range(lengths[i]):
                block, row = int(tables[i, t // block_size]), t % block_size
                assert torch.equal(cache[block, row], x[lo + t])
                written[block, row] = True
        assert cache[~written].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_tables_may_lie_apart_and_tables_in_any_dtype(dtype):
    x, wide = torch.randn(5, 64).to(dtype), torch.randn(128).to(dtype)
    for op in (rms_norm, lambda x, weight: add_rms_norm(x, x, weight)[0]):
        assert torch.equal(op(x, wide[::2]), op(x, wide[::2].contiguous()))
    q, k, _ = split_qkv(5, 1, 2, 32, dtype)
    cos, sin = (torch.randn(5, 32)[:, ::2] for _ in range(2))
    expected = apply_rope(q, k, cos.contiguous(), sin.contiguous(), None)
    found = apply_rope(q, k, cos, sin, None)
    mixed = apply_rope(q, k, cos, sin.double(), None)
    for a, b, c in zip(found, expected, mixed, strict=True):
        assert torch.equal(a, b) and torch.allclose(a.double(), c.double(), rtol=1e-2, atol=1e-2)
