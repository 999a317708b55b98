"""The C++ kernels on tensors: allocate, pass addresses and strides. `native/*.cpp` says what they
compute; the callers have checked shapes. All tensors of a call share one dtype, fp32 or bf16,
unless named otherwise.

Legend: T tokens, H query heads, K key heads, D head_dim, R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels._native import function

_ROWS_A_THREAD = 1 << 15  # elements below which one thread is done before a second has started
_TILE_ROWS = 24  # queries x heads of a group that meet the same keys


def _threads(num_elements: int) -> int:
    return torch.get_num_threads() if num_elements >= _ROWS_A_THREAD else 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, 1 / rms of each row in fp32 [..., 1]). x [..., D], or [T, H, D] with a stride of T."""
    if not (x.is_contiguous() or (x.dim() == 3 and x[0].is_contiguous())):
        x = x.contiguous()
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // size if size else 0
    stride = x.stride(0) if x.dim() == 3 else size
    y = torch.empty(x.shape, dtype=x.dtype)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    function("rms_norm", x.dtype)(
        y.data_ptr(), rstd.data_ptr(), x.data_ptr(), weight.contiguous().data_ptr(),
        num_rows // heads if heads else 0, heads, size, stride, eps, _threads(x.numel()),
    )  # fmt: skip
    return y, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, residual + x, 1 / rms of each of its rows)."""
    x, residual = x.contiguous(), residual.contiguous()
    size = x.shape[-1]
    y, total = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    function("add_rms_norm", x.dtype)(
        y.data_ptr(), total.data_ptr(), rstd.data_ptr(), x.data_ptr(), residual.data_ptr(),
        weight.contiguous().data_ptr(), x.numel() // size if size else 0, size, eps,
        _threads(x.numel()),
    )  # fmt: skip
    return y, total, rstd


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], size)
    num_rows = y.numel() // size if size else 0
    function("swiglu", y.dtype)(
        y.data_ptr(), gate_up.data_ptr(), num_rows, size, _threads(4 * y.numel())
    )
    return y


def rope(q_THD: Tensor, k_TKD: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys. cos and sin are fp32."""
    q, k = dense_rows(q_THD), dense_rows(k_TKD)
    cos, sin = cos_TD2.contiguous(), sin_TD2.contiguous()
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k))
    function("rope", q.dtype)(
        q_out.data_ptr(), k_out.data_ptr(), q.data_ptr(), k.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), len(q), q.shape[1], k.shape[1], q.shape[2] // 2, q.stride(0), k.stride(0),
        _threads(q.numel() + k.numel()),
    )  # fmt: skip
    return q_out, k_out


def store_rows(cache: Tensor, x_TKD: Tensor, rows_T: Tensor, head_rows: int) -> None:
    """Head h of token t to row rows[t] + h · head_rows of a cache seen as rows of D. int64 rows."""
    x = dense_rows(x_TKD)
    function("store_rows", x.dtype)(
        cache.data_ptr(), x.data_ptr(), rows_T.data_ptr(), *x.shape, x.stride(0), head_rows
    )


def score(
    logits_RV: Tensor, ids_R: Tensor, temperature: float, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 (log-prob of each row's id, log-sum-exp, entropy or nothing) of logits / temperature."""
    logits, ids = _dense_last(logits_RV), ids_R.contiguous()
    num_rows, vocab = logits.shape
    logp, lse = (torch.empty(num_rows, dtype=torch.float32) for _ in range(2))
    entropy = torch.empty(num_rows if wants_entropy else 0, dtype=torch.float32)
    function("score", logits.dtype)(
        logits.data_ptr(), num_rows, vocab, logits.stride(0), temperature, ids.data_ptr(),
        logp.data_ptr(), lse.data_ptr(), entropy.data_ptr() if wants_entropy else None,
        _threads(logits.numel()),
    )  # fmt: skip
    return logp, lse, entropy


def pick(logits_RV: Tensor, temperature: float, u_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """(token, its log-prob under softmax(logits / temperature)): where u (fp64 in [0, 1)) falls
    into the cumulative distribution, or without u the likeliest."""
    logits = _dense_last(logits_RV)
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    logp = torch.empty(num_rows, dtype=torch.float32)
    u = None if u_R is None else u_R.contiguous()
    function("pick", logits.dtype)(
        logits.data_ptr(), num_rows, vocab, logits.stride(0), temperature,
        None if u is None else u.data_ptr(), tokens.data_ptr(), logp.data_ptr(),
        _threads(logits.numel()),
    )  # fmt: skip
    return tokens, logp


@dataclass(frozen=True)
class Tiles:
    """Which queries meet which keys, for all layers of a step."""

    tiles: Tensor  # [tiles, 4] int32: first query, queries, keys the last one sees, first key row
    key_rows: Tensor  # int32: the rows of k and v, sequence by sequence


def make_tiles(
    spans: Sequence[tuple[int, int, int, int]], key_rows: Tensor, group: int
) -> Tiles:
    """`spans` of queries: (first query, how many, keys that the last one sees, first key row)."""
    step = max(1, _TILE_ROWS // group)
    tiles = []
    for query, count, keys, first in spans:
        if count == 1:
            tiles.append((query, 1, keys, first))
            continue
        for lo in range(0, count, step):
            n = min(step, count - lo)
            tiles.append((query + lo, n, keys - count + lo + n, first))
    shaped = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    return Tiles(shaped, key_rows)


def attend(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    scale: float,
    row_strides: tuple[int, int],
    head_strides: tuple[int, int],
    num_kv: int,
) -> Tensor:
    """o [T, H, D]. Strides are in elements, of k and of v; rows count as `tiles.key_rows` does."""
    q = dense_rows(q_THD)
    o = torch.empty(q.shape, dtype=q.dtype)
    _, heads, head_dim = q.shape
    work = 1 << 30 if len(tiles.tiles) > 1 else 0
    function("attend", q.dtype)(
        o.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), tiles.key_rows.data_ptr(),
        tiles.tiles.data_ptr(), len(tiles.tiles), num_kv, heads // num_kv, head_dim, q.stride(0),
        *row_strides, *head_strides, scale, _threads(work),
    )  # fmt: skip
    return o


def dense_rows(x_THD: Tensor) -> Tensor:
    """The same, with the heads of a token one after the other; tokens may lie apart."""
    if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]:
        return x_THD
    return x_THD.contiguous()


def _dense_last(x_RV: Tensor) -> Tensor:
    return x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()
