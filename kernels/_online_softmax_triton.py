"""One step of the online softmax, which every attention kernel here takes tile by tile.

For a row with scores s_j and values v_j, kept so far: top = max s, total = Σ 2^(s − top) and
acc = Σ 2^(s − top) · v. A tile may move the maximum; what was summed before it then shrinks by
2^(top − new_top). In the end o = acc / total, lse2 = top + log2 total. Scores are in powers of 2.
"""

import triton
import triton.language as tl


@triton.jit
def weigh_tile(total, top, scores, MAY_BE_EMPTY: tl.constexpr):
    """(p [M, N], shrink [M], total [M], top [M]) after scores [M, N]; the caller goes on with
    acc = acc · shrink + p · v. With `MAY_BE_EMPTY` a row may have seen no key yet: its top is −inf,
    and −inf − (−inf) would be NaN."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    finite_top = new_top
    if MAY_BE_EMPTY:
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(scores - finite_top[:, None])
    shrink = tl.exp2(top - finite_top)
    return p, shrink, total * shrink + tl.sum(p, 1), new_top
