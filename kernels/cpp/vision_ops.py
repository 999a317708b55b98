"""The C++ kernels of a vision tower: layer norm, GELU, attention in which all see all.

The conventions are those of ops.py. Rows are in `cpp/vision_rows.h`; attention is that of
`cpp/attention.h` with a step of 0.

Legend: T tokens, H query heads, K key heads, D head_dim.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kernels.cpp.ops import QueryTiles, SpanTrees, dense_rows, function

_TILE_ROWS = 128  # queries x heads of a group, for which keys and values are laid out once


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean and 1 / deviation of each row in fp32 [..., 1])."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    size = x.shape[-1]
    y = torch.empty_like(x)
    mean, rstd = (torch.empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    function("layer_norm", x.dtype)(
        y.data_ptr(), mean.data_ptr(), rstd.data_ptr(), x.data_ptr(), weight.data_ptr(),
        bias.data_ptr(), x.numel() // size if size else 0, size, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y, mean, rstd


def layer_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias) from what `layer_norm` was given and returned."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    size = x.shape[-1]
    dx, dweight, dbias = (torch.empty_like(one) for one in (x, weight, weight))
    function("differentiate_layer_norm", x.dtype)(
        *(one.data_ptr() for one in (dx, dweight, dbias, dy, x, weight, mean, rstd)),
        x.numel() // size if size else 0, size, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight, dbias


def gelu(x: Tensor, is_tanh: bool) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    function("gelu", x.dtype)(
        y.data_ptr(), x.data_ptr(), x.numel(), is_tanh, torch.get_num_threads()
    )
    return y


def gelu_gradient(dy: Tensor, x: Tensor, is_tanh: bool) -> Tensor:
    """The gradient by `gelu`'s argument."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    function("differentiate_gelu", x.dtype)(
        dx.data_ptr(), dy.data_ptr(), x.data_ptr(), x.numel(), is_tanh, torch.get_num_threads()
    )
    return dx


def whole_tiles(bounds: Sequence[int], group: int) -> QueryTiles:
    """The queries of packed sequences in tiles that each see all keys of their sequence; `group` is
    the number of heads that share a key head."""
    step = max(1, _TILE_ROWS // group)
    tiles = [
        (first, min(step, end - first), end - begin, begin, 1, 0)
        for begin, end in pairwise(bounds)
        for first in range(begin, end, step)
    ]
    shaped = torch.tensor(tiles, dtype=torch.int32).view(-1, 6)
    return QueryTiles(bounds[-1], shaped, torch.arange(bounds[-1], dtype=torch.int32))


def whole_spans(bounds: Sequence[int]) -> SpanTrees:
    """The same sequences for the gradient: each is a tree of one span."""
    rows = [(begin, end - begin, end - begin, begin, 1, 0) for begin, end in pairwise(bounds)]
    return SpanTrees(
        torch.tensor(rows, dtype=torch.int32).view(-1, 6),
        torch.arange(len(rows) + 1, dtype=torch.int32),
        torch.arange(bounds[-1], dtype=torch.int32),
    )


def attend_whole(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, tiles: QueryTiles, scale: float
) -> Tensor:
    """o [T, H, D]; `tiles` are `whole_tiles`."""
    q, k, v = (dense_rows(x) for x in (q_THD, k_TKD, v_TKD))
    o = torch.empty(q.shape, dtype=q.dtype)
    function("attend_whole", q.dtype)(
        *(x.data_ptr() for x in (o, q, k, v, tiles.key_rows, tiles.tiles)), len(tiles.tiles),
        *_heads(q, k), *(x.stride(0) for x in (q, k, v)), scale, torch.get_num_threads(),
    )  # fmt: skip
    return o


def attend_whole_gradient(
    do_THD: Tensor,
    qkvo: tuple[Tensor, Tensor, Tensor, Tensor],
    spans: SpanTrees,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient (dq, dk, dv) of `attend_whole`'s result `o` by its arguments, given that by
    `o`; `spans` are `whole_spans`."""
    do, q, k, v = (dense_rows(x) for x in (do_THD, *qkvo[:3]))
    o = qkvo[3].contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    tensors = (dq, dk, dv, q, k, v, o, do, spans.key_rows, spans.spans, spans.trees)
    function("differentiate_whole", q.dtype)(
        *(x.data_ptr() for x in tensors), len(spans.trees) - 1, len(q), *_heads(q, k),
        *(x.stride(0) for x in (q, k, v, do)), scale, torch.get_num_threads(),
    )  # fmt: skip
    return dq, dk, dv


def _heads(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    """(key heads, query heads that share one, head_dim)."""
    return k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
