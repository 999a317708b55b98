"""Shared prompts on the GPU's path, interpreted, against the definition over unshared sequences."""

from functools import partial

import pytest
import torch

from kernels import add_rows_, gather_rows, make_row_gather
from kernels.gpu.gather_rows import gather_rows_ref
from kernels.torch.attention import flash_attn_varlen_ref
from nanoengine.model.attention import SharedPrefixContext

# two prompts with two branches each, the first branch of the second continued by two more
BOUNDS, PARENTS = [0, 20, 25, 56, 60, 61, 70, 73, 80], [-1, 0, 0, -1, 3, 3, 5, 5]


def chain(segment):
    above = [] if PARENTS[segment] < 0 else chain(PARENTS[segment])
    return above + list(range(BOUNDS[segment], BOUNDS[segment + 1]))


def unshared(q, k, v, window=None):
    """Each segment's queries over its own copy of all its keys."""
    outs = []
    for segment in range(len(PARENTS)):
        rows, own = chain(segment), range(BOUNDS[segment], BOUNDS[segment + 1])
        bounds = [0, len(own)], [0, len(rows)]
        alone = (q[own], k[rows], v[rows], *bounds)
        outs.append(flash_attn_varlen_ref(*alone, 16**-0.5, window=window)[0])
    return torch.cat(outs)


def with_gradients(op, qkv, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in qkv]
    out = op(*leaves)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape).bfloat16().to(dtype))]


@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 3), (torch.float32, 30)],
)
def test_output_and_gradients_are_those_of_unshared_sequences(dtype, window):
    torch.manual_seed(0)
    qkv = [torch.randn(80, heads, 16).to(dtype) for heads in (4, 2, 2)]

    def ours(q, k, v):
        context = SharedPrefixContext(BOUNDS, PARENTS, backend="triton")
        return context.attend(0, q, k, v, window=window)

    plain = partial(unshared, window=window)
    exact = with_gradients(plain, qkv, torch.float64)
    naive = with_gradients(plain, qkv, dtype)
    for name, a, n, e in zip("oqkv", with_gradients(ours, qkv, dtype), naive, exact, strict=True):
        assert (a - e).norm() <= 2 * (n - e).norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_and_the_sum_of_their_gradients(dtype):
    torch.manual_seed(0)
    x, index = torch.randn(6, 3, 7), torch.tensor([4, 0, 4, 5, 5, 4])  # 1, 2, 3: not gathered
    plan = make_row_gather(index, 6)
    for backend in ("triton", "torch"):
        ours = with_gradients(lambda x, b=backend: gather_rows(x, plan, backend=b), [x], dtype)
        exact = with_gradients(lambda x: gather_rows_ref(x, index), [x.to(dtype)], torch.float64)
        for a, e in zip(ours, exact, strict=True):
            assert torch.equal(a, e.to(dtype)) or dtype == torch.float32
            assert torch.allclose(a.double(), e, rtol=1e-2, atol=1e-6)


def test_an_index_out_of_range_is_refused():
    with pytest.raises(ValueError, match="index"):
        make_row_gather(torch.tensor([6]), 6)
    with pytest.raises(ValueError, match="x: 5 rows"):
        gather_rows(torch.zeros(5, 2), make_row_gather(torch.tensor([1]), 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_in_fp32_and_in_order_to_what_is_there(dtype):
    torch.manual_seed(0)
    index = torch.tensor([4, 0, 4, 5, 5, 4] + [2] * 300)
    rows, before = torch.randn(len(index), 1050).to(dtype), torch.randn(7, 1050)
    total, exact = before.clone(), before.double()
    add_rows_(total, index, rows, backend="triton")
    exact.index_add_(0, index, rows.double())
    assert (total - exact).abs().max() < 1e-4
    assert torch.equal(total[[1, 3, 6]], before[[1, 3, 6]])
    again = before.clone()
    for i, row in zip(index.tolist(), rows, strict=True):
        again[i] += row.float()
    assert torch.equal(total, again)
