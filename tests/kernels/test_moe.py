"""Mixture of experts on a CPU: equals its definition, and a token's bits depend on it alone."""

import math

import pytest
import torch

from kernels import fused_moe, grouped_gemm, moe_align, pack_weight, topk_softmax
from kernels.moe.fused_moe import fused_moe_ref
from kernels.moe.grouped_gemm import grouped_gemm_ref
from kernels.moe.moe_routing import topk_softmax_ref

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def moe_inputs(dtype, tokens=13, experts=7, k=3, hidden=32, width=48, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(dtype)

    x = normal(tokens, hidden)
    w13, w2 = normal(experts, 2 * width, hidden, scale=0.3), normal(experts, hidden, width)
    scores = torch.rand(tokens, experts, generator=generator)
    weights, ids = topk_softmax(scores, k)
    return x, w13, w2, weights, ids


def run(op, inputs, kind):
    """Outputs and gradients of the first inputs, computed in `kind`."""
    *floats, ids = inputs
    leaves = [t.to(torch.promote_types(t.dtype, kind)) for t in floats]
    leaves = [t.detach().requires_grad_() for t in leaves]
    y = op(*leaves, ids)
    slope = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(y.shape)
    return [y, *torch.autograd.grad(y, leaves, slope.to(y.dtype))]


def assert_as_good_as_plain_torch(ours, plain, inputs, dtype):
    exact = run(plain, inputs, torch.float64)
    naive, mine = run(plain, inputs, dtype), run(ours, inputs, dtype)
    floor = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps / 8
    for i, (a, n, e) in enumerate(zip(mine, naive, exact, strict=True)):
        assert a.dtype == n.dtype, i
        error, allowed = ((t.double() - e).norm().item() for t in (a, n))
        assert error <= 2 * allowed + floor * e.norm().item(), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, k", [(13, 3), (1, 7), (40, 1)])
def test_fused_moe_is_as_good_as_its_definition(dtype, tokens, k):
    inputs = moe_inputs(dtype, tokens=tokens, k=k)
    assert_as_good_as_plain_torch(fused_moe, fused_moe_ref, inputs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("tokens, k", [(13, 3), (1, 7), (40, 1)])
def test_biases_and_both_activations_are_as_good_as_their_definition(dtype, activation, tokens, k):
    *floats, ids = moe_inputs(dtype, tokens=tokens, k=k)
    floats[1] = floats[1] * 3  # the clamps move some
    generator = torch.Generator().manual_seed(1)
    biases = [torch.randn(w.shape[:2], generator=generator).to(dtype) for w in floats[1:3]]

    def with_biases(op):
        return lambda x, w13, w2, weights, b13, b2, ids: op(
            x, w13, w2, weights, ids, biases=(b13, b2), activation=activation
        )

    inputs = (*floats, *biases, ids)
    ours, plain = with_biases(fused_moe), with_biases(fused_moe_ref)
    assert_as_good_as_plain_torch(ours, plain, inputs, dtype)


def test_a_bias_of_an_expert_is_weighted_by_its_choice():
    """By hand: experts of zero matrices give their second bias times the router's weight."""
    x, weights = torch.ones(1, 4), torch.tensor([[0.75, 0.25]])
    w13, w2, b2 = torch.zeros(3, 6, 4), torch.zeros(3, 4, 3), torch.eye(3, 4) * 8
    ids = torch.tensor([[2, 0]], dtype=torch.int32)
    y = fused_moe(x, w13, w2, weights, ids, biases=(torch.zeros(3, 6), b2))
    assert y.tolist() == [[2.0, 0.0, 6.0, 0.0]]


def test_the_clamped_activation_by_hand():
    """(gate, up) of: nothing clamped, gate above, up above, up below; gate has no lower clamp."""
    h = torch.tensor([1.0, 2.0, 9.0, 0.0, 0.5, 8.0, -9.0, -8.0], dtype=torch.float64)
    b13 = h.expand(1, 8)
    w2, one = torch.eye(4, dtype=torch.float64)[None], torch.ones(1, 1, dtype=torch.float64)
    w13 = torch.zeros(1, 8, 4, dtype=torch.float64)
    x = torch.zeros(1, 4, dtype=torch.float64)
    biases = (b13, torch.zeros(1, 4, dtype=torch.float64))
    ids = torch.zeros(1, 1, dtype=torch.int32)
    y = fused_moe(x, w13, w2, one, ids, biases=biases, activation="clamped_swiglu")
    gates, ups = (1.0, 7.0, 0.5, -9.0), (2.0, 0.0, 7.0, -7.0)
    expected = [
        (up + 1) * gate / (1 + math.exp(-1.702 * gate)) for gate, up in zip(gates, ups, strict=True)
    ]
    assert y[0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_token_has_the_same_bits_in_every_batch_with_biases_too(dtype):
    x, w13, w2, weights, ids = moe_inputs(dtype, tokens=40, width=37)
    biases = tuple(torch.randn(w.shape[:2]).to(dtype) for w in (w13, w2))
    options = {"biases": biases, "activation": "clamped_swiglu"}
    together = fused_moe(x, w13, w2, weights, ids, **options)
    for i in range(40):
        rows = slice(i, i + 1)
        alone = fused_moe(x[rows], w13, w2, weights[rows], ids[rows], **options)
        assert torch.equal(alone[0], together[i]), i


def test_biases_of_another_shape_are_refused():
    x, w13, w2, weights, ids = moe_inputs(torch.float32)
    with pytest.raises(ValueError, match=r"biases: b2 is torch.float32 \(7, 3\)"):
        fused_moe(x, w13, w2, weights, ids, biases=(torch.zeros(7, 96), torch.zeros(7, 3)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_gemm_is_as_good_as_its_definition_with_empty_experts(dtype):
    torch.manual_seed(0)
    offsets = torch.tensor([0, 0, 5, 6, 6, 17, 17], dtype=torch.int32)
    inputs = (torch.randn(17, 24).to(dtype), torch.randn(6, 40, 24).to(dtype), offsets)
    assert_as_good_as_plain_torch(grouped_gemm, grouped_gemm_ref, inputs, dtype)


def test_moe_gradients_pass_gradcheck():
    x, w13, w2, weights, ids = moe_inputs(torch.float64, 5, 4, 2, 6, 4)
    leaves = [t.double().requires_grad_() for t in (x, w13, w2, weights)]
    assert torch.autograd.gradcheck(lambda *t: fused_moe(*t, ids), leaves)
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    for renormalize in (True, False):
        assert torch.autograd.gradcheck(
            lambda z, r=renormalize: topk_softmax(z, 3, renormalize=r)[0], (logits,)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden, width", [(64, 48), (96, 33), (576, 768)])
def test_a_token_has_the_same_bits_in_every_batch(dtype, hidden, width):
    x, w13, w2, weights, ids = moe_inputs(dtype, 70, 6, 2, hidden, width)
    packed = tuple([pack_weight(w) for w in stack] for stack in (w13, w2))
    whole = fused_moe(x, w13, w2, weights, ids, packed=packed)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 5), slice(10, 27), slice(0, 69)):
        part = fused_moe(x[rows], w13, w2, weights[rows], ids[rows], packed=packed)
        assert torch.equal(part, whole[rows]), rows
        assert torch.equal(fused_moe(x[rows], w13, w2, weights[rows], ids[rows]), part)


@pytest.mark.parametrize("num_experts", [8, 60, 128])
def test_routing_of_a_token_has_the_same_bits_in_every_batch(num_experts):
    torch.manual_seed(0)
    logits = torch.randn(50, num_experts)
    weights, ids = topk_softmax(logits, 4)
    for rows in (slice(0, 1), slice(7, 9), slice(20, 50)):
        part = topk_softmax(logits[rows], 4)
        assert torch.equal(part[0], weights[rows]) and torch.equal(part[1], ids[rows])


@pytest.mark.parametrize("renormalize", [True, False])
def test_topk_softmax_gradient_equals_autograd(renormalize):
    torch.manual_seed(0)
    logits = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    slope = torch.randn(9, 5, dtype=torch.float64)
    grads = [
        torch.autograd.grad(op(logits, 5, renormalize)[0], logits, slope)[0]
        for op in (topk_softmax_ref, lambda z, k, r: topk_softmax(z, k, renormalize=r))
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


def test_equal_probabilities_go_to_the_lower_expert():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    weights, ids = topk_softmax(logits, 4, renormalize=False)
    assert ids.tolist() == [[1, 3, 2, 4]] and ids.dtype == torch.int32
    expected = torch.softmax(logits, -1)[0, [1, 3, 2, 4]]
    assert torch.allclose(weights[0], expected)


def test_moe_align_by_hand():
    ids = torch.tensor([[3, 0], [3, 1], [3, 0]], dtype=torch.int32)
    a = moe_align(ids, 5, 2)
    assert a.slots.tolist() == [1, 5, 3, 0, 2, 4]
    assert a.offsets.tolist() == [0, 2, 3, 3, 6, 6]
    assert a.tile_experts.tolist() == [0, 1, 3, 3, -1, -1, -1, -1]
    assert a.tile_starts.tolist()[:4] == [0, 2, 3, 5]


def test_main_grad_takes_the_experts_gradients():
    x, w13, w2, weights, ids = moe_inputs(torch.bfloat16)
    plain = run(fused_moe, (x, w13, w2, weights, ids), torch.bfloat16)
    for w in (w13, w2):
        w.requires_grad_()
        w.main_grad = torch.ones(w.shape)
    y = fused_moe(x, w13, w2, weights, ids)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
    for w, expected in zip((w13, w2), plain[2:4], strict=True):
        assert w.grad is None
        assert torch.allclose(w.main_grad - 1, expected.float(), rtol=1e-2, atol=1e-2)


def test_strides_do_not_matter():
    inputs = moe_inputs(torch.float32)
    strided = [t.transpose(0, -1).contiguous().transpose(0, -1) for t in inputs]
    plain, other = run(fused_moe, inputs, torch.float32), run(fused_moe, strided, torch.float32)
    for a, b in zip(plain, other, strict=True):
        assert (a - b).norm() < 1e-5 * a.norm()


def test_no_tokens_is_no_error():
    x, w13, w2, weights, ids = moe_inputs(torch.float32)
    x.requires_grad_()
    y = fused_moe(x[:0], w13, w2, weights[:0], ids[:0])
    assert y.shape == (0, 32)
    y.sum().backward()
    assert topk_softmax(torch.zeros(0, 4), 2)[0].shape == (0, 2)
    assert moe_align(torch.zeros(0, 2, dtype=torch.int32), 4, 16).tile_experts.shape == (0,)


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda x, a, b, t, i: fused_moe(x[:, :5], a, b, t, i), "x: shape"),
        (lambda x, a, b, t, i: fused_moe(x, a[:, :3], b, t, i), "w13"),
        (lambda x, a, b, t, i: fused_moe(x.double(), a, b, t, i), "x: dtype"),
        (lambda x, a, b, t, i: fused_moe(x, a, b, t[:, :1], i), "topk_weights"),
        (lambda x, a, b, t, i: fused_moe(x, a, b, t, i + 5), "topk_ids: expert"),
        (lambda x, a, b, t, i: grouped_gemm(x, a, torch.tensor([0, 13])), "expert_offsets"),
        (lambda x, a, b, t, i: grouped_gemm(x, a, torch.arange(8)), "expert_offsets"),
        (lambda x, a, b, t, i: topk_softmax(x, 33), "k=33"),
        (lambda x, a, b, t, i: moe_align(i, 7, 0), "block_m"),
    ],
)
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call(*moe_inputs(torch.float32))
