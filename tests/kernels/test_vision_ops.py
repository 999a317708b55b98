"""layer_norm, gelu and attention in which all see all: against fp64, gradients, rows that do not
depend on their batch."""

import math

import pytest
import torch
from native_cases import DTYPES, bounds, split_qkv, threads

from kernels import flash_attn_varlen, make_varlen_plan
from kernels.cpp import vision_ops
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.vision.gelu import gelu, gelu_ref
from kernels.vision.layer_norm import layer_norm, layer_norm_ref

WIDTHS = [1, 7, 16, 17, 63, 64, 65, 100, 768, 1152]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 200]
SHAPES = [(16, 2, 1), (64, 3, 1), (40, 1, 7), (72, 4, 1), (7, 1, 5), (80, 2, 2), (128, 1, 60)]


def norm64(x, weight, bias, eps):
    x = x.double()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight.double(), bias.double(), eps)


def gelu64(x, approximate):
    """By the formulas of the papers, in fp64."""
    x = x.double()
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * 0.5 * torch.erfc(-x / math.sqrt(2))


def run(op, inputs, slopes, dtype):
    """Result and gradients."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = op(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, slopes.to(dtype))]


def assert_as_good_as_plain(ours, plain, inputs, dtype):
    """Error against fp64 at most twice that of plain PyTorch in the same dtype."""
    inputs = [x.to(dtype) for x in inputs]
    slopes = torch.randn(plain(*inputs).shape).bfloat16()
    exact = run(plain, inputs, slopes, torch.float64)
    found, naive = run(ours, inputs, slopes, dtype), run(plain, inputs, slopes, dtype)
    for ours_, plain_, exact_ in zip(found, naive, exact, strict=True):
        assert ours_.dtype == dtype
        floor = torch.finfo(dtype).eps / 4 * exact_.norm()  # plain can be exact by luck
        assert (ours_.double() - exact_).norm() <= 2 * (plain_.double() - exact_).norm() + floor


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.usefixtures("cpu_path")
def test_layer_norm_and_its_gradient_are_fp64s(dtype, width):
    torch.manual_seed(width)
    weight, bias = torch.randn(width), torch.randn(width)
    for shape in ((40, width), (2, 33, width)):  # one row may be exact by luck
        assert_as_good_as_plain(
            lambda x, w, b: layer_norm(x, w, b, 1e-6),
            lambda x, w, b: layer_norm_ref(x, w, b, 1e-6),
            [torch.randn(shape) * 3, weight, bias],
            dtype,
        )


@pytest.mark.usefixtures("cpu_path")
def test_layer_norm_is_the_one_of_pytorch_also_far_from_zero():
    torch.manual_seed(0)
    errors = torch.zeros(2, dtype=torch.float64)
    for _ in range(200):
        width = int(torch.randint(2, 200, ()))
        x = torch.randn(3, width) + torch.randn(()) * 1000
        weight, bias = torch.randn(width), torch.randn(width)
        exact = norm64(x, weight, bias, 1e-6)
        plain = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-6)
        found = layer_norm(x, weight, bias), plain
        errors += torch.stack([(one.double() - exact).abs().max() for one in found])
    assert errors[0] <= 1.5 * errors[1] and errors[0] / 200 < 1e-3


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("cpu_path")
def test_gelu_and_its_gradient_are_fp64s(dtype, approximate):
    torch.manual_seed(0)
    for shape in ((40, 63), (2, 30, 64), (33, 257)):
        assert_as_good_as_plain(
            lambda x: gelu(x, approximate),
            lambda x: gelu_ref(x, approximate),
            [torch.randn(shape) * 3],
            dtype,
        )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.usefixtures("cpu_path")
def test_gelu_is_right_from_where_it_vanishes_to_where_it_is_x(approximate):
    x = torch.cat([torch.linspace(-14, 14, 20001), torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])])
    x.requires_grad_()
    y = gelu(x, approximate)
    (slope,) = torch.autograd.grad(y.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = gelu64(wide, approximate)
    (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
    assert ((y.double() - exact).abs() <= 2e-7 * exact.abs() + 1e-7).all()
    assert ((slope.double() - exact_slope).abs() <= 5e-7).all()
    assert gelu(torch.tensor([math.nan, math.inf]), approximate)[0].isnan()
    assert gelu(torch.tensor([math.inf]), approximate).isinf().all()


def test_gradients_equal_finite_differences():
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 7), 7, 7))
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, w, b, 1e-5), (x, w, b))
    for approximate in ("none", "tanh"):
        assert torch.autograd.gradcheck(lambda x, a=approximate: gelu(x, a), (x,))
    qkv = [torch.randn(9, 2, 5, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
    assert torch.autograd.gradcheck(lambda *qkv: attend(*qkv, [2, 0, 7]), qkv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("width", [40, 96, 768])
@pytest.mark.usefixtures("cpu_path")
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads, width):
    torch.manual_seed(0)
    rows = (1 << 16) // width + 5  # enough to be shared among threads
    x, w, b = torch.randn(rows, width).to(dtype) * 3, torch.randn(width), torch.randn(width)
    w, b = w.to(dtype), b.to(dtype)
    slopes = torch.randn(rows, width).to(dtype)

    def with_gradient(op):
        def both(x, slopes):
            leaf = x.clone().requires_grad_()
            y = op(leaf)
            return torch.cat([y.detach(), *torch.autograd.grad(y, leaf, slopes)], 1)

        return both

    ops = [
        lambda x: layer_norm(x, w, b, 1e-5),
        lambda x: gelu(x),
        lambda x: gelu(x, "tanh"),
    ]
    for op in map(with_gradient, ops):
        picked = [0, 1, 7, rows // 2, rows - 1]
        alone = torch.cat([op(x[i : i + 1], slopes[i : i + 1]) for i in picked])
        with threads(num_threads):
            whole = op(x, slopes)
            assert torch.equal(whole[picked], alone)
            assert torch.equal(op(x[3:20], slopes[3:20]), whole[3:20])


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_gradients_of_weights_do_not_depend_on_threads(num_threads):
    torch.manual_seed(0)
    x, w, b = torch.randn(700, 96), torch.randn(96), torch.randn(96)
    slopes = torch.randn(700, 96)
    before = run(layer_norm, [x, w, b], slopes, torch.float32)
    with threads(num_threads):
        after = run(layer_norm, [x, w, b], slopes, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.usefixtures("cpu_path")
def test_no_rows_give_no_output_and_a_zero_weight_gradient():
    w = torch.ones(24)
    out = run(layer_norm, [torch.empty(0, 24), w, w], torch.empty(0, 24), torch.float32)
    assert torch.equal(out[2], 0 * w) and torch.equal(out[3], 0 * w)
    assert run(gelu, [torch.empty(0, 24)], torch.empty(0, 24), torch.float32)[1].shape == (0, 24)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: layer_norm(torch.zeros(2, 4), torch.zeros(5), torch.zeros(4)), "weight"),
        (lambda: layer_norm(torch.zeros(2, 4), torch.zeros(4), torch.zeros(5)), "bias"),
        (lambda: layer_norm(torch.zeros(2, 4), *[torch.zeros(4)] * 2, 0.0), "eps"),
        (lambda: layer_norm(torch.zeros(2, 4), *[torch.zeros(4)] * 2, backend="c"), "backend"),
        (lambda: gelu(torch.zeros(2, 4), "erf"), "approximate='erf'"),
        (lambda: gelu(torch.zeros(2, 4, dtype=torch.int64)), "x: dtype"),
        (lambda: gelu(torch.zeros(2, 4), backend="triton"), "backend='triton'"),
        (lambda: gelu(torch.zeros(2, 4).double(), backend="cpp"), "float64"),
    ],
)
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()


# -- attention -------------------------------------------------------------------------------------


def attend(q, k, v, lengths, **options):
    cu, longest = bounds(lengths), max(lengths)
    return flash_attn_varlen(q, k, v, cu, cu, longest, longest, causal=False, **options)


def attend64(q, k, v, lengths):
    outs = []
    for q_, k_, v_ in zip(*(x.double().split(lengths) for x in (q, k, v)), strict=True):
        k_, v_ = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k_, v_))
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * q.shape[2] ** -0.5
        outs.append(torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v_))
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("native")
def test_attention_and_its_gradient_are_fp64s(dtype, shape):
    head_dim, num_kv, group = shape
    torch.manual_seed(head_dim)
    qkv = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    slopes = torch.randn(sum(LENGTHS), num_kv * group, head_dim).bfloat16()
    exact = run(lambda *x: attend64(*x, LENGTHS), qkv, slopes, torch.float64)
    found = run(lambda *x: attend(*x, LENGTHS, backend="cpp"), qkv, slopes, dtype)
    plain = run(lambda *x: attend(*x, LENGTHS, backend="torch"), qkv, slopes, dtype)
    for ours, torchs, wanted in zip(found, plain, exact, strict=True):
        assert ours.isfinite().all()
        if dtype == torch.float32:
            assert (ours.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        else:
            error, allowed = ((x.double() - wanted).norm() for x in (ours, torchs))
            assert error <= 1.02 * allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(64, 3, 1), (40, 1, 7)])
@pytest.mark.usefixtures("native")
def test_a_sequence_alone_has_the_bits_it_has_among_others(dtype, num_threads, shape):
    head_dim, num_kv, group = shape
    torch.manual_seed(0)
    qkv = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    slopes = torch.randn(sum(LENGTHS), num_kv * group, head_dim).to(dtype)
    together = run(lambda *x: attend(*x, LENGTHS), qkv, slopes, dtype)
    with threads(num_threads):
        again = run(lambda *x: attend(*x, LENGTHS), qkv, slopes, dtype)
        assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))
        for lo, n in zip(bounds(LENGTHS), LENGTHS, strict=False):
            rows = slice(lo, lo + n)
            inputs, own = [x[rows] for x in qkv], slopes[rows]
            alone = run(lambda *x, n=n: attend(*x, [n]), inputs, own, dtype)
            assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("native")
def test_queries_have_the_same_bits_in_tiles_of_any_size(dtype, monkeypatch):
    torch.manual_seed(0)
    q, k, v = split_qkv(sum(LENGTHS), 1, 3, 40, dtype)
    found = []
    for rows in (3, 7 * 3, vision_ops._TILE_ROWS):
        monkeypatch.setattr(vision_ops, "_TILE_ROWS", rows)
        found.append(attend(q, k, v, LENGTHS))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.usefixtures("cpu_path")
def test_one_plan_serves_calls_with_both_masks():
    torch.manual_seed(0)
    q, k, v = split_qkv(sum(LENGTHS), 2, 3, 32, torch.float32)
    plan = make_varlen_plan(bounds(LENGTHS))
    for _ in range(2):
        assert torch.equal(attend(q, k, v, LENGTHS, plan=plan), attend(q, k, v, LENGTHS))
        cu, longest = bounds(LENGTHS), max(LENGTHS)
        causal = flash_attn_varlen(q, k, v, cu, cu, longest, longest, plan=plan)
        assert torch.equal(causal, flash_attn_varlen(q, k, v, cu, cu, longest, longest))
    wanted = flash_attn_varlen_ref(q, k, v, cu, cu, 32**-0.5, causal=False)[0]
    assert (attend(q, k, v, LENGTHS) - wanted).abs().max() <= 4e-6


def test_keys_of_other_lengths_and_lse_take_the_definition():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    out, lse = flash_attn_varlen(q, k, v, [0, 2, 5], [0, 3, 9], 3, 6, causal=False, return_lse=True)
    scores = torch.einsum("qhd,khd->qhk", q[2:], k[3:]) * 8**-0.5
    assert torch.allclose(lse[2:], scores.logsumexp(-1), atol=1e-5)
    p = torch.softmax(scores, -1)
    assert torch.allclose(out[2:], torch.einsum("qhk,khd->qhd", p, v[3:]), atol=1e-5)
    with pytest.raises(ValueError, match="backend='cpp': only for return_lse=False"):
        flash_attn_varlen(q, k, v, [0, 2, 5], [0, 3, 9], 3, 6, causal=False, backend="cpp")
    with pytest.raises(ValueError, match="plan: only for return_lse=False"):
        attend(q, q, q, [2, 3], return_lse=True, plan=make_varlen_plan([0, 2, 5]))
