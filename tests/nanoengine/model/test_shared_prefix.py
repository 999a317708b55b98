"""Shared prompts against the same attention over whole, unshared sequences."""

from __future__ import annotations

import pytest
import torch

from kernels import flash_attn_varlen
from nanoengine.model.attention import SharedPrefixContext

H, K, D = 6, 2, 16
TREES = [(37, (5, 64, 1)), (0, (20,)), (130, (40, 3)), (3, (2, 2, 2, 130))]


def layout() -> tuple[list[int], list[int], list[int], list[int]]:
    """(bounds and parents of the tree, bounds of the unshared sequences, their rows)."""
    bounds, parents, whole_bounds, rows = [0], [], [0], []
    for prefix, branches in TREES:
        parent, prefix_rows = -1, []
        if prefix:
            parent = len(parents)
            prefix_rows = list(range(bounds[-1], bounds[-1] + prefix))
            parents.append(-1)
            bounds.append(bounds[-1] + prefix)
        for own in branches:
            rows += prefix_rows + list(range(bounds[-1], bounds[-1] + own))
            whole_bounds.append(len(rows))
            parents.append(parent)
            bounds.append(bounds[-1] + own)
    return bounds, parents, whole_bounds, rows


def random_qkv(num_rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_rows, heads, D, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for heads in (H, K, K)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_output_has_the_bits_of_unshared_sequences(dtype: torch.dtype, threads: int) -> None:
    bounds, parents, whole_bounds, rows = layout()
    q, k, v = random_qkv(bounds[-1], dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shared = SharedPrefixContext(bounds, parents).attend(0, q, k, v)
        whole = flash_attn_varlen(q[rows], k[rows], v[rows], whole_bounds, whole_bounds, 200, 200)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(shared[rows], whole)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_gradients_are_those_of_unshared_sequences(dtype: torch.dtype, tolerance: float) -> None:
    bounds, parents, whole_bounds, rows = layout()
    weight = torch.randn(len(rows), H, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = []
    for is_shared in (True, False):
        q, k, v = random_qkv(bounds[-1], dtype)
        if is_shared:
            out = SharedPrefixContext(bounds, parents).attend(0, q, k, v)[rows]
        else:
            out = flash_attn_varlen(q[rows], k[rows], v[rows], whole_bounds, whole_bounds, 200, 200)
        (out * weight).sum().backward()
        grads.append([q.grad, k.grad, v.grad])
    for ours, theirs in zip(*grads, strict=True):
        scale = float(theirs.double().norm())
        assert float((ours - theirs).double().norm()) <= tolerance * scale


def test_fp64_gradient_passes_gradcheck() -> None:
    q, k, v = (x[:9].detach().requires_grad_() for x in random_qkv(9, torch.float64))
    context = SharedPrefixContext([0, 3, 5, 9], [-1, 0, 0])
    assert torch.autograd.gradcheck(lambda *x: context.attend(0, *x), (q, k, v))


def test_a_branch_does_not_see_its_siblings() -> None:
    bounds, parents, _, _ = layout()
    q, k, v = random_qkv(bounds[-1], torch.float32)
    context = SharedPrefixContext(bounds, parents)
    before = context.attend(0, q, k, v)
    with torch.no_grad():
        v[bounds[1] : bounds[2]] += 1  # the first branch of the first tree
    after = context.attend(0, q, k, v)
    changed = (before != after).flatten(1).any(1)
    assert changed[bounds[1] : bounds[2]].all()
    assert not changed[: bounds[1]].any() and not changed[bounds[2] :].any()


def test_a_parent_must_come_first() -> None:
    with pytest.raises(ValueError, match="must come before"):
        SharedPrefixContext([0, 1, 2], [1, -1])
