"""A back end that is named runs, or says why it cannot; it never gives way to another."""

import pytest
import torch

import kernels
from kernels.cpp import ops

T, H, K, D = 5, 4, 2, 16


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def norm(dtype, backend):
    return kernels.rms_norm(rows(T, D, dtype=dtype), rows(D, dtype=dtype), backend=backend)


def add_norm(dtype, backend):
    x = rows(T, D, dtype=dtype)
    return kernels.add_rms_norm(x, x, rows(D, dtype=dtype), backend=backend)[0]


def gated(dtype, backend):
    return kernels.swiglu(rows(T, 2 * D, dtype=dtype), backend=backend)


def rotated(dtype, backend):
    q, k, angle = rows(T, H, D, dtype=dtype), rows(T, K, D, dtype=dtype), rows(T, D // 2)
    return kernels.apply_rope(q, k, angle.cos(), angle.sin(), None, backend=backend)[0]


def normed_and_rotated(dtype, backend):
    q, k, angle = rows(T, H, D, dtype=dtype), rows(T, K, D, dtype=dtype), rows(T, D // 2)
    weight, table = rows(D, dtype=dtype), (angle.cos(), angle.sin(), None)
    return kernels.qk_norm_rope(q, k, weight, weight, *table, backend=backend)[0]


def scored(dtype, backend):
    weight = rows(40, D, dtype=dtype)
    return kernels.linear_logprob(rows(T, D, dtype=dtype), weight, torch.arange(T), backend=backend)


def logits_scored(dtype, backend):
    return kernels.logits_logprob(rows(T, 40, dtype=dtype), torch.arange(T), backend=backend)


def packed(dtype, backend):
    q, k = rows(T, H, D, dtype=dtype), rows(T, K, D, dtype=dtype)
    return kernels.flash_attn_varlen(q, k, k, [0, 2, T], [0, 2, T], 3, 3, backend=backend)


def tree(dtype, backend):
    q, k = rows(T, H, D, dtype=dtype), rows(T, K, D, dtype=dtype)
    plan = kernels.make_varlen_plan([0, 2, 3, T], [-1, 0, 0])
    return kernels.tree_attention(q, k, k, plan, backend=backend)


def paged(dtype, backend):
    cache = kernels.make_kv_cache((2, 16, K, D), dtype, "cpu")
    k = rows(T, K, D, dtype=dtype)
    kernels.reshape_and_cache(k, k, cache, cache, torch.arange(T), backend=backend)
    q, table = rows(T, H, D, dtype=dtype), torch.tensor([[0, 1]])
    limits = {"max_query_len": T, "max_seq_len": T}
    return kernels.paged_attention(q, cache, cache, [0, T], [T], table, **limits, backend=backend)


def decoded(dtype, backend):
    cache, table = rows(2, 16, K, D, dtype=dtype), torch.tensor([[0, 1]])
    q = rows(1, H, D, dtype=dtype)
    return kernels.paged_attention_decode(
        q, cache, cache, table, [T], max_seq_len=T, backend=backend
    )


OPS = [
    norm, add_norm, gated, rotated, normed_and_rotated, scored, logits_scored, packed, tree, paged,
    decoded,
]  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """The names of the C++ functions that are called."""
    names, function = [], ops.function
    monkeypatch.setattr(
        "kernels.cpp.ops.function", lambda name, dtype: names.append(name) or function(name, dtype)
    )
    return names


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpp_is_what_runs_by_default_on_a_cpu_and_torch_is_not(op, dtype, calls):
    named = op(dtype, "cpp")
    found = list(calls)
    assert set(found) - {"pack", "panel", "linear"}
    assert torch.equal(named, op(dtype, "auto")) and calls == found * 2
    calls.clear()
    near = op(dtype, "torch")
    assert not set(calls) - {"pack", "panel", "linear"}  # the head's matrix product
    torch.testing.assert_close(near, named, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("op", OPS)
def test_cpp_refuses_what_it_has_no_kernel_for(op):
    with pytest.raises(ValueError, match=r"backend='cpp': .*float64"):
        op(torch.float64, "cpp")


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("op", OPS)
def test_cpp_refuses_where_there_is_no_compiler(op):
    with pytest.raises(ValueError, match="backend='cpp': the C\\+\\+ kernels are not available"):
        op(torch.float32, "cpp")


def test_an_op_without_a_cpp_kernel_says_so():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="backend='cpp': this op has no C\\+\\+ kernel"):
        kernels.gae(x, x, torch.tensor([0, 4]), 1.0, 0.95, backend="cpp")


@pytest.mark.usefixtures("native")
def test_cpp_refuses_the_arguments_that_its_kernel_cannot_take():
    q, meta = rows(T, H, D), torch.zeros(2, 4, device="meta")
    bounds = ([0, T], [0, T], T, T)
    with pytest.raises(ValueError, match="backend='cpp': only for return_lse=False"):
        kernels.flash_attn_varlen(q, q, q, *bounds, return_lse=True, backend="cpp")
    with pytest.raises(ValueError, match="backend='cpp': cos, sin: dtypes"):
        angle = rows(T, D // 2).double()
        kernels.apply_rope(q, q, angle, angle, None, backend="cpp")
    with pytest.raises(ValueError, match=r"backend='cpp': logits_dtype torch\.float64"):
        ids = torch.arange(T)
        kernels.linear_logprob(q[:, 0], rows(9, D), ids, logits_dtype=torch.float64, backend="cpp")
    with pytest.raises(ValueError, match="backend='cpp': a tensor is on meta"):
        kernels.swiglu(meta, backend="cpp")
    low = rows(2, 16, K, D).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"backend='cpp': the cache is torch\.float8_e4m3fn"):
        kernels.make_paged_plan(
            [0, 1], [T], torch.tensor([[0]]), cache=low, num_heads=H, dtype=q.dtype, backend="cpp"
        )


@pytest.mark.usefixtures("native")
def test_a_plan_serves_the_back_end_that_it_was_made_for():
    cache, table = rows(2, 16, K, D), torch.tensor([[0]])
    step = ([0, 1], [T], table)
    for made_for, other in (("cpp", "torch"), ("torch", "cpp")):
        plan = kernels.make_paged_plan(
            *step, cache=cache, num_heads=H, dtype=cache.dtype, backend=made_for
        )
        with pytest.raises(ValueError, match=f"plan: made for '{made_for}'"):
            kernels.paged_attention(
                rows(1, H, D), cache, cache, *step, max_query_len=1, max_seq_len=T, plan=plan,
                backend=other,
            )  # fmt: skip
