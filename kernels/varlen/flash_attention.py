"""Attention over packed sequences whose queries and keys have bounds of their own, differentiable.

`attention.py` has the formulas. Here the last query of a sequence sits at its last key, so query i
of n sees `num_keys − n + i + 1` keys if the mask is causal; with `window=w` the last w of those,
its own included. A query that sees no key gives o = 0 and lse = −inf.

Back ends: Triton (`triton/attention.py`: tiles, online softmax, no atomics); on a CPU, for whole
sequences without lse, those of `attention.py` if they are causal and of `vision/whole_attention.py`
if they are not; and the definition, `flash_attn_varlen_ref`, which covers everything else on a CPU.
Left out: dropout, score caps.

Legend: T query tokens, S key tokens, H query heads, K key heads, D head_dim.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.attention import (
    VarlenPlan,
    attend_planned,
    check_attention,
    check_plan,
    make_varlen_plan,
)
from kernels.backend import (
    Backend,
    check_bounds,
    check_integers,
    check_sinks,
    ints,
    resolve,
    scale_of,
    use_native,
    use_triton,
)
from kernels.cpp.ops import AttendOptions

_DEFINITION = "kernels.torch.attention:attend_by_definition"
_FLASH = "kernels.gpu.attention:attend"
_WHOLE = "kernels.vision.whole_attention:attend"
_NOT_PLAIN = (
    "only for return_lse=False and keys of the queries' lengths, and for sinks with causal=True"
)

Bounds = Tensor | Sequence[int]


def flash_attn_varlen(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    cu_seqlens_q: Tensor | Sequence[int],
    cu_seqlens_k: Tensor | Sequence[int],
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    plan: VarlenPlan | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """o [T, H, D], or (o, lse [T, H] in fp32, natural logarithm) with `return_lse`.

    `cu_seqlens_*` [sequences + 1] start at 0, never decrease and end at T and S; on a GPU int32
    tensors, whose contents are not read by the host. `max_seqlen_*` bound the sequences' lengths.
    `softmax_scale` defaults to head_dim ** -0.5. `window` needs `causal`. `sinks` [H] are scores
    without a value, one a head, differentiable and not multiplied by the scale. `plan` is
    `make_varlen_plan(cu_seqlens_q)`, for a CPU and whole sequences only (equal bounds, no lse); one
    serves calls with different windows. `batch_invariant` on a GPU gives a query the bits
    that `paged_attention(batch_invariant=True)` gives it; on a CPU it always has them.
    """
    check_attention(q_THD, k_SKD, v_SKD)
    check_sinks(sinks, q_THD)
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window}: must be at least 1, with causal=True")
    check_integers(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    qkv, lengths = (q_THD, k_SKD, v_SKD), (cu_seqlens_q, cu_seqlens_k)
    options = AttendOptions(scale_of(softmax_scale, q_THD), window, sinks)
    if use_triton(backend, q_THD, has_cpp=True):
        limits = (max_seqlen_q, max_seqlen_k)
        return resolve(_FLASH)(qkv, lengths, limits, causal, return_lse, options, batch_invariant)
    is_plain = not return_lse and q_THD.device.type == "cpu" and (causal or sinks is None)
    if plan is None:
        bounds_q, bounds_k = _checked_bounds(lengths, q_THD, k_SKD)
        if not is_plain or bounds_q != bounds_k:
            use_native(backend, q_THD, refusal=_NOT_PLAIN)  # C++ is refused
            out, lse = resolve(_DEFINITION)(qkv, (bounds_q, bounds_k), causal, options)
            return (out, lse) if return_lse else out
        plan = make_varlen_plan(bounds_q)
    elif not is_plain or plan.is_tree:
        raise ValueError(
            "plan: only for return_lse=False on a CPU, for sinks with causal=True, without parents "
            "(a tree's is for tree_attention)"
        )
    check_plan(plan, q_THD, k_SKD)
    # Whole tensors, for a view would keep the fused projection that it looks into for the gradient.
    whole = q_THD.contiguous(), k_SKD.contiguous(), v_SKD.contiguous()
    if not causal:
        return resolve(_WHOLE)(whole, plan, options.scale, backend)
    return attend_planned(whole, plan, options, backend)


def _checked_bounds(
    lengths: tuple[Bounds, Bounds], q: Tensor, k: Tensor
) -> tuple[list[int], list[int]]:
    check_bounds("cu_seqlens_q", lengths[0], q.shape[0])
    check_bounds("cu_seqlens_k", lengths[1], k.shape[0])
    bounds_q, bounds_k = ints(lengths[0]), ints(lengths[1])
    if len(bounds_q) != len(bounds_k):
        raise ValueError(
            f"cu_seqlens_k: {len(bounds_k) - 1} sequences, must be cu_seqlens_q's "
            f"{len(bounds_q) - 1}"
        )
    return bounds_q, bounds_k
