"""rms_norm, rope, swiglu and geglu: values, gradients, rows that do not depend on their batch."""

import pytest
import torch

from kernels import add_rms_norm, apply_rope, geglu, rms_norm, swiglu
from kernels.torch.geglu import geglu_ref
from kernels.torch.rms_norm import rms_norm_ref
from kernels.torch.rope import apply_rope_ref
from kernels.torch.swiglu import swiglu_ref


def rope_inputs(dtype=torch.float64):
    torch.manual_seed(0)
    angle = torch.rand(50, 8, dtype=torch.float64) * 6
    q, k = (torch.randn(7, n, 16, dtype=torch.float64).to(dtype) for n in (4, 2))
    table = torch.promote_types(dtype, torch.float32)
    return q, k, angle.cos().to(table), angle.sin().to(table), torch.randint(0, 50, (7,))


def test_gradients_equal_finite_differences():
    torch.manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 16), (16,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, w))
    assert torch.autograd.gradcheck(lambda x, w: add_rms_norm(x, x * 2, w, 1e-5), (x, w))
    assert torch.autograd.gradcheck(swiglu, (x,))
    assert torch.autograd.gradcheck(geglu, (x,))
    q, k, cos, sin, positions = rope_inputs()
    leaves = (q.requires_grad_(), k.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, k: apply_rope(q, k, cos, sin, positions), leaves)


def error(ours, exact):
    return max((a.double() - e).abs().max() for a, e in zip(ours, exact, strict=True))


def run(op, inputs, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    outs = op(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.manual_seed(3)
    weights = [torch.randn(o.shape, dtype=torch.float64).bfloat16().to(dtype) for o in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_at_most_twice_those_of_plain_torch(dtype):
    torch.manual_seed(0)
    x, w = torch.randn(33, 96).to(dtype), torch.randn(96).to(dtype)
    q, k, cos, sin, positions = rope_inputs(dtype)

    def plain_norm(x, w):
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)) * w

    def plain_swiglu(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def plain_geglu(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    def plain_rope(q, k):
        wide = torch.promote_types(q.dtype, torch.float32)
        return apply_rope_ref(q, k, cos.to(wide), sin.to(wide), positions)

    cases = [
        (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [x, w]),
        (swiglu, plain_swiglu, [x]),
        (geglu, plain_geglu, [x]),
        (lambda q, k: apply_rope(q, k, cos, sin, positions), plain_rope, [q, k]),
    ]
    for ours, plain, inputs in cases:
        exact = run(plain, inputs, torch.float64)
        assert error(run(ours, inputs, dtype), exact) <= 2 * error(run(plain, inputs, dtype), exact)


def test_references_agree_with_independent_formulas():
    torch.manual_seed(0)
    x, w = torch.randn(5, 32, dtype=torch.float64), torch.randn(32, dtype=torch.float64)
    expected = torch.nn.functional.rms_norm(x, (32,), w, 1e-6)
    assert torch.allclose(rms_norm_ref(x, w, 1e-6), expected)
    assert torch.allclose(swiglu_ref(x), torch.nn.functional.silu(x[:, :16]) * x[:, 16:])
    gate, up = x[:, :16], x[:, 16:]
    inner = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    assert torch.allclose(geglu_ref(x), 0.5 * gate * (1 + inner) * up)
    q, k, cos, sin, positions = rope_inputs()
    pairs = torch.complex(q[..., :8], q[..., 8:])
    turned = pairs * torch.complex(cos, sin)[positions].unsqueeze(1)
    rotated, _ = apply_rope_ref(q, k, cos, sin, positions)
    assert torch.allclose(rotated, torch.cat([turned.real, turned.imag], -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("width", [40, 96, 576, 1536])
def test_a_row_has_the_same_bits_in_every_batch(dtype, num_threads, width):
    before = torch.get_num_threads()
    torch.manual_seed(0)
    x, w = torch.randn(301, width).to(dtype) * 3, torch.randn(width).to(dtype)
    torch.set_num_threads(1)
    norms = [lambda x: rms_norm(x, w, 1e-5), lambda x: add_rms_norm(x, x * 2, w, 1e-5)[0]]
    ops = [swiglu, geglu, *norms]
    whole = [op(x) for op in ops]
    torch.set_num_threads(num_threads)
    try:
        for lo, hi in ((0, 1), (5, 6), (300, 301), (7, 10), (3, 20), (0, 300), (1, 301), (0, 301)):
            for op, expected in zip(ops, whole, strict=True):
                assert torch.equal(op(x[lo:hi].clone()), expected[lo:hi]), (lo, hi)
    finally:
        torch.set_num_threads(before)


def test_rope_keeps_nothing_of_q_and_k():
    q, k, cos, sin, positions = rope_inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        apply_rope(q.requires_grad_(), k.requires_grad_(), cos, sin, positions)
    assert {x.shape for x in kept} <= {cos.shape, positions.shape}


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(5)), "weight"),
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(4), 0.0), "eps"),
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(4), backend="cuda"), "backend"),
        (lambda: rms_norm(torch.zeros(2, 4), torch.zeros(4), backend="triton"), "backend"),
        (lambda: add_rms_norm(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4)), "residual"),
        (lambda: geglu(torch.zeros(2, 5)), "gate_up"),
        (lambda: swiglu(torch.zeros(2, 5)), "gate_up"),
        (lambda: apply_rope(*[torch.zeros(2, 1, 6)] * 2, *[torch.zeros(9, 2)] * 3), "cos"),
    ],
)
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
