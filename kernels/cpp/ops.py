"""The C++ kernels on tensors: find one, allocate, pass addresses and strides. `cpp/*.h` says what
they compute; the callers have checked shapes. All tensors of a call share one dtype, fp32 or bf16,
unless named otherwise.

`build.py` compiles them when the first is asked for. Left out: what a dense model does not call, in
`int8_ops.py`, `low_rank_ops.py`, `logits_ops.py`; half precision and fp64, which are PyTorch's.

Legend: T tokens, H query heads, K key heads, D head_dim, R rows, V vocabulary.
"""

import ctypes
import functools
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Kernels = dict[tuple[str, torch.dtype], Callable[..., Any]]
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_BUILD = "kernels.cpp.build:open_kernels"


def has_native(*tensors: Tensor) -> bool:
    """True if there is a C++ kernel for these: on a CPU, all of one dtype that it has."""
    dtype = tensors[0].dtype
    if dtype not in NATIVE_DTYPES:
        return False
    for x in tensors:
        if x.dtype != dtype or not x.is_cpu:
            return False
    return library() is not None


def function(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """The kernel of that name for tensors of that dtype. Only where `has_native` said yes."""
    found = library()
    assert found is not None, "has_native was asked before"
    return found[name, dtype]


@functools.cache
def library() -> Kernels | None:
    """The compiled kernels; None, with a warning, where they cannot be compiled or loaded."""
    return pkgutil.resolve_name(_BUILD)()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, 1 / rms of each row in fp32 [..., 1]). x [..., D], or [T, H, D] with a stride of T."""
    if not (x.is_contiguous() or (x.dim() == 3 and x[0].is_contiguous())):
        x = x.contiguous()
    weight = weight.contiguous()
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // size if size else 0
    stride = x.stride(0) if x.dim() == 3 else size
    y = torch.empty(x.shape, dtype=x.dtype)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    function("rms_norm", x.dtype)(
        y.data_ptr(), rstd.data_ptr(), x.data_ptr(), weight.data_ptr(),
        num_rows // heads if heads else 0, heads, size, stride, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, residual + x, 1 / rms of each of its rows)."""
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    size = x.shape[-1]
    y, total = torch.empty_like(x), torch.empty_like(x)
    rstd = torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    function("add_rms_norm", x.dtype)(
        y.data_ptr(), total.data_ptr(), rstd.data_ptr(), x.data_ptr(), residual.data_ptr(),
        weight.data_ptr(), x.numel() // size if size else 0, size, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return y, total, rstd


def rms_norm_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, dtotal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dx, dweight) from what `rms_norm` was given and returned, or `add_rms_norm`: x is then the
    sum, and `dtotal` the gradient by it."""
    if not (x.is_contiguous() or (x.dim() == 3 and x[0].is_contiguous())):
        x = x.contiguous()
    dy, weight = dy.contiguous(), weight.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    size = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // size if size else 0
    stride = x.stride(0) if x.dim() == 3 else size
    dx, dweight = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(weight)
    function("differentiate_rms_norm", x.dtype)(
        dx.data_ptr(), dweight.data_ptr(), dy.data_ptr(), x.data_ptr(), weight.data_ptr(),
        rstd.data_ptr(), None if dtotal is None else dtotal.data_ptr(),
        num_rows // heads if heads else 0, heads, size, stride, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight


def swiglu(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], size)
    num_rows = y.numel() // size if size else 0
    function("swiglu", y.dtype)(
        y.data_ptr(), gate_up.data_ptr(), num_rows, size, torch.get_num_threads()
    )
    return y


def swiglu_gradient(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient by `swiglu`'s argument."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    size = dy.shape[-1]
    grad = torch.empty_like(gate_up)
    num_rows = dy.numel() // size if size else 0
    function("differentiate_swiglu", dy.dtype)(
        grad.data_ptr(), dy.data_ptr(), gate_up.data_ptr(), num_rows, size, torch.get_num_threads()
    )
    return grad


def rope(q_THD: Tensor, k_TKD: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated queries and keys. cos and sin are fp32."""
    q, k = dense_rows(q_THD), dense_rows(k_TKD)
    cos, sin = cos_TD2.contiguous(), sin_TD2.contiguous()
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k))
    function("rope", q.dtype)(
        q_out.data_ptr(), k_out.data_ptr(), q.data_ptr(), k.data_ptr(), cos.data_ptr(),
        sin.data_ptr(), len(q), q.shape[1], k.shape[1], q.shape[2] // 2, q.stride(0), k.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    return q_out, k_out


def pack(weight_OI: Tensor, out: Tensor | None = None) -> Tensor:
    """A copy in the order in which `linear` reads it: panels of outputs; in the memory of `out`,
    an earlier one, where that has its shape and dtype."""
    weight = weight_OI.contiguous()
    num_out, num_in = weight.shape
    shape = _packed_shape(num_out, num_in, weight.dtype)
    is_fitting = out is not None and out.shape == shape and out.dtype == weight.dtype
    packed = out if out is not None and is_fitting else torch.empty(shape, dtype=weight.dtype)
    function("pack", weight.dtype)(
        packed.data_ptr(), weight.data_ptr(), num_in, num_out, torch.get_num_threads()
    )
    return packed


def _packed_shape(num_out: int, num_in: int, dtype: torch.dtype) -> tuple[int, int, int]:
    panel, per_word = function("panel", dtype)(), 4 // dtype.itemsize  # outputs, inputs
    return -(-num_out // panel), -(-num_in // per_word), panel * per_word


def linear(x_TI: Tensor, packed: Tensor, bias_O: Tensor | None, num_out: int) -> Tensor:
    """x · weightᵀ + bias from `pack(weight)`."""
    expected = _packed_shape(num_out, x_TI.shape[1], x_TI.dtype)
    if packed.shape != expected or packed.dtype != x_TI.dtype:
        raise ValueError(
            f"packed: {packed.dtype} {tuple(packed.shape)} is not pack_weight of a {x_TI.dtype} "
            f"weight [{num_out}, {x_TI.shape[1]}]"
        )
    return _multiply("linear", x_TI, packed, bias_O, num_out)


def linear_unpacked(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The same from the weight itself, for many rows; its rows are whole words of 4 bytes."""
    if weight_OI.shape[1] * weight_OI.itemsize % 4:
        raise ValueError(
            f"weight: rows of {weight_OI.shape[1]} {weight_OI.dtype} must be whole words of 4 bytes"
        )
    return _multiply("linear_unpacked", x_TI, weight_OI.contiguous(), bias_O, len(weight_OI))


def _multiply(
    name: str, x_TI: Tensor, weight: Tensor, bias_O: Tensor | None, num_out: int
) -> Tensor:
    if x_TI.shape[1] * x_TI.itemsize % 4:  # the kernel reads whole words
        x_TI = F.pad(x_TI, (0, 1))
    x = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    bias = None if bias_O is None else bias_O.contiguous()
    num_rows, num_in = x.shape
    y = torch.empty((num_rows, num_out), dtype=x.dtype)
    function(name, x.dtype)(
        y.data_ptr(), x.data_ptr(), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), num_rows, num_in, num_out, x.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def pack_columns(weight_OI: Tensor) -> Tensor:
    """A copy over which `linear` multiplies by the weight from the other side, x [T, O] · weight
    (`num_out` is I): what gives the gradient of the input from that of the output."""
    weight = weight_OI if weight_OI.stride(1) == 1 else weight_OI.contiguous()
    num_rows, num_columns = weight.shape
    packed = torch.empty(_packed_shape(num_columns, num_rows, weight.dtype), dtype=weight.dtype)
    function("pack_columns", weight.dtype)(
        packed.data_ptr(), weight.data_ptr(), num_rows, num_columns, weight.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    return packed


def add_product(total_MN: Tensor, a_TM: Tensor, b_TN: Tensor) -> None:
    """total += aᵀ · b, in place; `total` is fp32, whose rows are in one piece."""
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a_TM, b_TN))
    function("add_product", a.dtype)(
        total_MN.data_ptr(), a.data_ptr(), b.data_ptr(), len(a), *total_MN.shape, a.stride(0),
        b.stride(0), total_MN.stride(0), torch.get_num_threads(),
    )  # fmt: skip


def score(
    logits_RV: Tensor, ids_R: Tensor, temperature: float, wants_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 (log-prob of each row's id, log-sum-exp, entropy or nothing) of logits / temperature."""
    logits, ids = dense_last(logits_RV), ids_R.contiguous()
    num_rows, vocab = logits.shape
    logp, lse = (torch.empty(num_rows, dtype=torch.float32) for _ in range(2))
    entropy = torch.empty(num_rows if wants_entropy else 0, dtype=torch.float32)
    function("score", logits.dtype)(
        logits.data_ptr(), num_rows, vocab, logits.stride(0), temperature, ids.data_ptr(),
        logp.data_ptr(), lse.data_ptr(), entropy.data_ptr() if wants_entropy else None,
        torch.get_num_threads(),
    )  # fmt: skip
    return logp, lse, entropy


def differentiate_scores_(
    logits_RV: Tensor,
    ids_RM: Tensor,
    temperature: float,
    lse_R: Tensor,
    entropy_R: Tensor | None,
    dlogp_RM: Tensor | None,
    dentropy_R: Tensor | None,
) -> None:
    """Rewrites logits, of one row after the other, to the gradient by them of log-probs of their
    ids and of entropies; `lse` and `entropy` are `score`'s. All but logits and ids are fp32;
    `entropy` is needed for `dentropy` alone."""
    ids = ids_RM.contiguous()
    rest = [None if x is None else x.contiguous() for x in (lse_R, entropy_R, dlogp_RM, dentropy_R)]
    num_rows, vocab = logits_RV.shape
    function("differentiate_scores", logits_RV.dtype)(
        logits_RV.data_ptr(), num_rows, vocab, logits_RV.stride(0), temperature, ids.data_ptr(),
        ids.shape[1], *(None if x is None else x.data_ptr() for x in rest),
        torch.get_num_threads(),
    )  # fmt: skip


def pick(logits_RV: Tensor, temperature: float, u_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """(token, its log-prob under softmax(logits / temperature)): where u (fp64 in [0, 1)) falls
    into the cumulative distribution, or without u the likeliest."""
    logits = dense_last(logits_RV)
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    logp = torch.empty(num_rows, dtype=torch.float32)
    u = None if u_R is None else u_R.contiguous()
    function("pick", logits.dtype)(
        logits.data_ptr(), num_rows, vocab, logits.stride(0), temperature,
        None if u is None else u.data_ptr(), tokens.data_ptr(), logp.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return tokens, logp


def dense_rows(x_THD: Tensor) -> Tensor:
    """The same, with the heads of a token one after the other; tokens may lie apart."""
    if x_THD.stride(2) == 1 and x_THD.stride(1) == x_THD.shape[2]:
        return x_THD
    return x_THD.contiguous()


def dense_last(x_RV: Tensor) -> Tensor:
    return x_RV if x_RV.stride(1) == 1 else x_RV.contiguous()


_TILE_ROWS = 24  # queries x heads of a group that meet the same keys
_TEAM_ROWS = 48  # of tiles that begin with the same keys: their scores stay in a core's cache
_WHOLE_LANES = 16  # keys that fill the vectors of any processor
_WORTH_SHARING = 2 * _WHOLE_LANES  # keys


@dataclass(frozen=True)
class QuerySpan:
    """Consecutive queries of one sequence, and where a table of keys lists what they see."""

    query: int  # the first
    num_queries: int
    num_keys: int  # that the last one sees; the one before it sees one less
    first_key: int  # the entry of the table at which the sequence's keys begin

    def cut(self, most: int) -> Iterator["QuerySpan"]:
        """The same queries in spans of at most `most`."""
        for lo in range(0, self.num_queries, most):
            hi = min(lo + most, self.num_queries)
            num_keys = self.num_keys - self.num_queries + hi
            yield QuerySpan(self.query + lo, hi - lo, num_keys, self.first_key)


@dataclass(frozen=True)
class QueryTiles:
    """The queries of a step, cut into tiles; made once a step, serves all layers. Keys are found
    through a table of rows, so one kernel (`cpp/attention.h`) serves packed sequences and trees
    (training) and the blocks of a paged cache (inference), with the same bits for a query in each
    of them."""

    num_tokens: int
    tiles: Tensor  # [tiles, 6] int32: first query, queries, keys the last one sees, first key row;
    # tiles of the team that it leads (0: it follows), keys that they have in common
    key_rows: Tensor  # int32, the rows of k and v, sequence by sequence


def make_tiles(
    spans: Sequence[QuerySpan],
    key_rows: Tensor,
    group: int,
    teams: Sequence[tuple[int, int]] | None = None,
) -> QueryTiles:
    """`group` is the number of heads that share a key head; `teams` says of each span of one query
    how many it leads, itself included, and how many keys these have in common."""
    step = max(1, _TILE_ROWS // group)
    teams = [(1, 0)] * len(spans) if teams is None else teams
    tiles = [
        (piece.query, piece.num_queries, piece.num_keys, piece.first_key, *team)
        for span, team in zip(spans, teams, strict=True)
        for piece in span.cut(step)
    ]
    shaped = torch.tensor(tiles, dtype=torch.int32).view(-1, 6)
    return QueryTiles(sum(span.num_queries for span in spans), shaped, key_rows)


def paged_tiles(
    starts: Sequence[int], lens: Sequence[int], block_tables: Tensor, cache: Tensor, group: int
) -> QueryTiles:
    """The last `starts[i + 1] - starts[i]` of the `lens[i]` tokens of each sequence, whose values
    lie in blocks of a cache [blocks, block_size, K, D], and keys in one alike or in runs. Entries
    past a sequence's end are not read. `ValueError` for a block that the cache does not have."""
    block_size = cache.shape[1]
    num_blocks = -(-max(lens, default=0) // block_size)
    blocks_BN = block_tables[:, :num_blocks].to(torch.int64)
    _check_blocks(blocks_BN, lens, cache)
    rows_a_block = block_size * (1 if cache.is_contiguous() else cache.shape[2])
    rows = (blocks_BN * rows_a_block).unsqueeze(2) + torch.arange(block_size)
    length = num_blocks * block_size
    spans = [
        QuerySpan(lo, hi - lo, lens[i], i * length) for i, (lo, hi) in enumerate(pairwise(starts))
    ]
    # every thread has several teams to choose from, so that none is left with the last
    tasks = len(spans) * cache.shape[2]
    largest = min(_TEAM_ROWS // group, tasks // (4 * torch.get_num_threads()))
    teams = _find_teams(spans, blocks_BN, block_size, largest)
    return make_tiles(spans, rows.to(torch.int32).flatten(), group, teams)


def _find_teams(
    spans: Sequence[QuerySpan], blocks_BN: Tensor, block_size: int, largest: int
) -> list[tuple[int, int]]:
    """Teams of neighbours that decode and whose block tables begin alike, of at most `largest`. One
    that would halve what the others have in common begins its own."""
    teams = [(1, 0)] * len(spans)
    if largest < 2 or len(spans) < 2:
        return teams
    alike = (blocks_BN[1:] == blocks_BN[:-1]).to(torch.int64).cumprod(1).sum(1) * block_size
    leader = 0
    for i, num_alike in enumerate(alike.tolist(), 1):
        size, before = teams[leader]
        common = min(num_alike, spans[i - 1].num_keys, spans[i].num_keys)
        common = (common if size == 1 else min(common, before)) // _WHOLE_LANES * _WHOLE_LANES
        is_decode = spans[leader].num_queries == spans[i].num_queries == 1
        if is_decode and size < largest and common >= _WORTH_SHARING and 2 * common >= before:
            teams[leader], teams[i] = (size + 1, common), (0, 0)
        else:
            leader = i
    return teams


def _check_blocks(blocks_BN: Tensor, lens: Sequence[int], cache: Tensor) -> None:
    used_B1 = -(-torch.tensor(lens, dtype=torch.int64).unsqueeze(1) // cache.shape[1])
    is_bad = ((blocks_BN < 0) | (blocks_BN >= cache.shape[0])) & (
        torch.arange(blocks_BN.shape[1]) < used_B1
    )
    if is_bad.any():
        i, j = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{i}, {j}]={int(blocks_BN[i, j])}: must be in [0, {cache.shape[0]})"
        )


@dataclass(frozen=True)
class SpanTrees:
    """Whole segments, tree by tree: those of one tree share keys. A sequence is a tree of one."""

    spans: Tensor  # [S, 6] int32: as `QueryTiles.tiles`
    trees: Tensor  # [trees + 1] int32: bounds of each tree's spans
    key_rows: Tensor


def make_span_trees(
    spans: Sequence[QuerySpan], prefix_of_S: Sequence[int], key_rows: Tensor
) -> SpanTrees:
    """The trees of segments that each continue the one named in `prefix_of_S` (-1: none)."""
    root_of: list[int] = []
    for segment, parent in enumerate(prefix_of_S):
        root_of.append(segment if parent < 0 else root_of[parent])
    order = sorted(range(len(root_of)), key=root_of.__getitem__)  # stable: parents stay first
    ordered = (spans[i] for i in order)
    rows = [(s.query, s.num_queries, s.num_keys, s.first_key, 1, 0) for s in ordered]
    bounds = [i for i, segment in enumerate(order) if root_of[segment] == segment]
    return SpanTrees(
        torch.tensor(rows, dtype=torch.int32).view(-1, 6),
        torch.tensor([*bounds, len(order)], dtype=torch.int32),
        key_rows,
    )


class AttendOptions(NamedTuple):
    """What may differ between the layers of a step."""

    scale: float  # of the scores
    window: int | None = None  # keys that a query sees, the last one its own; None: all up to it
    sinks: Tensor | None = None  # [H] fp32 (fp64): scores that have no value; None: none


def attend_paged(
    q_THD: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: QueryTiles, options: AttendOptions
) -> Tensor:
    """o [T, H, D] over caches as `paged_tiles` was given one; keys may lie in runs."""
    row, head = cache_strides(v_cache)
    order = _Order(row, row, head, head, has_key_runs(k_cache))
    return _attend(q_THD, k_cache, v_cache, tiles, options, order)


def run_shape(dtype: torch.dtype) -> tuple[int, int]:
    """(keys of a run, elements of a word) of caches of this dtype whose keys lie in runs
    (`kv_cache.keys_in_runs`), which depend on the processor. Ask only where `has_native`."""
    return function("run_keys", dtype)(), function("run_word", dtype)()


def has_key_runs(k_cache: Tensor) -> bool:
    """True if its keys lie in runs, not in rows: [blocks, K, runs, words, keys of a run, elements
    of a word], where rows are [blocks, block_size, K, D]."""
    return k_cache.dim() == 6


def cache_strides(cache: Tensor) -> tuple[int, int]:
    """From row to row (as `paged_tiles` counts them) and from head to head, in elements."""
    _, block_size, num_kv, head_dim = cache.shape
    if cache.is_contiguous():
        return num_kv * head_dim, head_dim
    return head_dim, block_size * head_dim


def attend_packed(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, tiles: QueryTiles, options: AttendOptions
) -> Tensor:
    """o [T, H, D]; rows are tokens."""
    k, v = dense_rows(k_TKD), dense_rows(v_TKD)
    head_dim = k.shape[2]
    order = _Order(k.stride(0), v.stride(0), head_dim, head_dim, False)
    return _attend(q_THD, k, v, tiles, options, order)


class _Order(NamedTuple):
    """How keys and values lie: elements from row to row and from head to head. Keys in runs take
    the place of rows, and have their strides."""

    k_row: int
    v_row: int
    k_head: int
    v_head: int
    has_key_runs: bool


def _attend(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: QueryTiles,
    options: AttendOptions,
    order: _Order,
) -> Tensor:
    """v is [..., K, D], and k but for its runs."""
    q = dense_rows(q_THD)
    sinks = None if options.sinks is None else options.sinks.contiguous()
    o = torch.empty(q.shape, dtype=q.dtype)
    _, num_heads, head_dim = q.shape
    num_kv = v.shape[-2]
    *strides, runs = order
    function("attend", q.dtype)(
        o.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), tiles.key_rows.data_ptr(),
        tiles.tiles.data_ptr(), len(tiles.tiles), num_kv, num_heads // num_kv, head_dim,
        q.stride(0), *strides, options.scale, options.window or 0, runs,
        None if sinks is None else sinks.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return o


def attend_packed_gradient(
    do_THD: Tensor,
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    o_THD: Tensor,
    trees: SpanTrees,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradient (dq, dk, dv, dsinks) of `attend_packed`'s result `o` by its arguments, given
    that by `o`; dsinks is fp32, None where there are no sinks."""
    do, q, k, v = (dense_rows(x) for x in (do_THD, q_THD, k_TKD, v_TKD))
    o = o_THD.contiguous()
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v)]
    num_tokens, num_heads, head_dim = q.shape
    num_kv = k.shape[1]
    sinks = None if options.sinks is None else options.sinks.contiguous()
    dsinks = None if sinks is None else torch.empty_like(sinks)
    function("differentiate_attention", q.dtype)(
        *(x.data_ptr() for x in (*grads, q, k, v, o, do, trees.key_rows, trees.spans, trees.trees)),
        len(trees.trees) - 1, num_tokens, num_kv, num_heads // num_kv, head_dim,
        *(x.stride(0) for x in (q, k, v, do)), options.scale, options.window or 0,
        *(None if x is None else x.data_ptr() for x in (sinks, dsinks)), torch.get_num_threads(),
    )  # fmt: skip
    return grads[0], grads[1], grads[2], dsinks


def for_ranges(
    xs: Sequence[Tensor],
    outs: Sequence[Tensor] | None = None,
    *,
    has_sums: bool = False,
    has_finite: bool = False,
) -> tuple[list[int], list[bool]]:
    """In one pass over contiguous tensors: their bytes are copied to `outs`, and their checksums
    (checksum.h) and whether they are finite are returned where that is asked for, else []. Tensors
    of any dtype; fp32 or bf16 to be looked at for NaN and infinity."""
    num = len(xs)
    if not num:
        return [], []
    counts, pointers = ctypes.c_int64 * num, ctypes.c_void_p * num
    sums, is_finite = counts(), counts()
    to = None if outs is None else pointers(*(out.data_ptr() for out in outs))
    function("for_ranges", torch.uint8)(
        num,
        to,
        pointers(*(x.data_ptr() for x in xs)),
        counts(*(x.nbytes for x in xs)),
        counts(*(x.element_size() for x in xs)),
        sums if has_sums else None,
        is_finite if has_finite else None,
        torch.get_num_threads(),
    )
    return list(sums) if has_sums else [], [bool(one) for one in is_finite] if has_finite else []


class AdamWFactors(ctypes.Structure):
    """The numbers of one step of AdamW, computed in fp64 and rounded once."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "scale", "decay", "rest1", "beta2", "rest2", "root_scale", "eps", "step_size",
        )
    ]  # fmt: skip


def adamw_(
    weight: Tensor,
    remainder: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factors: AdamWFactors,
) -> None:
    """One step in place of contiguous tensors of one size: `weight` is bf16 with the int16 that
    completes its master, or an fp32 master itself; the others are fp32."""
    rest = None if remainder is None else remainder.data_ptr()
    function("adamw", weight.dtype)(
        weight.data_ptr(), rest, grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
        weight.numel(), ctypes.byref(factors), torch.get_num_threads(),
    )  # fmt: skip
