"""PyTorch's attention on a CPU: packed sequences, trees of segments and the paged cache.

    o = softmax(scale · q · Kᵀ + mask) · V,   where heads have sinks over them too

All three are runs of queries (`QuerySpan`) whose keys are found through one table: of rows of k
and v in training, of blocks of a cache in inference (a row is a block of one key). Runs of like
size are padded to rectangles, planned once a step for all layers; a layer gathers each rectangle's
keys side by side, in the order of the unshared sequence, and multiplies. So decoding repeats the
trainer's bits where there is no C++ (`cpp/attention.h`): a query's result does not depend on its
neighbours, on padding, on the piece it came in or on the number of threads, because

* bf16: oneDNN's batched matmul sums each output in order whatever the other sizes are (`safe_rows`
  keeps tiny products from going elsewhere). Scores are rounded to bf16, as in any unfused bf16
  attention; softmax runs in fp32. (torch's fused CPU attention was not invariant: at 200 to 300
  keys the last bit moved with the padding.)
* fp32: MKL's batched matmul is invariant given enough rows a thread (`_min_rows`) and a product
  with V cut into blocks of exactly 128 keys that are added in order.
* bf16 where the processor has no product of it is widened to fp32 before, and the result rounded.
* keys are padded to `key_multiple`, masked with −inf, so they add exact zeros; so do those before a
  query's window, of which whole blocks of 128 are left out where no query of a run sees them.

The backward pass keeps q, k, v and o (which the output projection keeps anyway) and computes the
probabilities again, a piece at a time. The gradient of a key that several branches share is summed
over them in fp32, in order.

Lse and masks that are not causal only the definition has, `flash_attn_varlen_ref`. Left out: to cut
a prefill so that a window lets its pieces skip more keys.

Legend: T tokens, H query heads, K key heads, G = H / K, D head_dim, C cells (queries of all
rectangles, padding included); of a rectangle: B runs, Q padded queries, L padded keys, M masked
keys (the last; all where a window hides any), N = B · K, R rows = G · Q.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import VarlenPlan
from kernels.backend import compute_dtype
from kernels.cpp.ops import AttendOptions, QuerySpan
from kernels.kv_cache import heads_first, index_dtype
from kernels.memory import Scratch
from kernels.torch.onednn import is_bf16_fast

KEY_BLOCK = 128
"""fp32 keys are padded to this, and P·V is summed in blocks of it."""

MIN_ROWS = 4
"""Fewer fp32 rows take another MKL kernel, with other bits, at any head_dim; a large one needs more
(`_min_rows`)."""

_SMALL_MATRIX, _SMALL_BATCH = 400, 16**3
"""Multiplications of a product, and of a batch of them, up to which torch does without oneDNN."""

_QUERY_BLOCK = 128  # queries of a packed run that meet the same keys
_TILE_PAIRS = 1 << 16  # queries x keys of a packed rectangle: its scores stay in the cache
_PIECE_SCORES = 1 << 21  # scores held at a time
_PIECE_KEYS = 1 << 14  # keys x heads gathered at a time: 2 MB at 64 elements in bf16
_WASTE_KEYS = 1024  # padded keys that take as long to read as one more rectangle takes to start
_CHEAP_QUERIES = 32  # queries a key serves for the time it takes to read it


@dataclass(frozen=True)
class KeyTable:
    """Runs of queries and the table through which their keys are found."""

    spans: list[QuerySpan]
    blocks: Tensor  # flat; a run's begin at its `first_key`
    block_size: int  # keys of an entry
    num_kv_heads: int
    dtype: torch.dtype  # of the queries
    window: int | None = None  # keys that a query sees, itself included; None: all before it

    @property
    def multiple(self) -> int:
        """The keys of a rectangle are a multiple of this: what the arithmetic wants, and whole
        blocks."""
        return math.lcm(_key_multiple(self.dtype), self.block_size)

    def without_unseen(self, span: QuerySpan) -> QuerySpan:
        """The same queries without the first blocks of `KEY_BLOCK` keys that none of them sees: the
        others keep their places in the blocks in which they are summed."""
        if self.window is None:
            return span
        first_seen = max(0, span.num_keys - span.num_queries + 1 - self.window)
        step = math.lcm(KEY_BLOCK, self.block_size)
        skipped = first_seen // step * step
        first_key = span.first_key + skipped // self.block_size
        return QuerySpan(span.query, span.num_queries, span.num_keys - skipped, first_key)

    def can_hide_first(self, members: list[QuerySpan]) -> bool:
        """True if a query of the runs does not see its run's first key, as without a window it
        would."""
        return self.window is not None and any(s.num_keys > self.window for s in members)


@dataclass(frozen=True)
class _Rectangle:
    """Runs with similar numbers of queries and keys."""

    num_seqs: int
    num_queries: int
    first: int  # of its cells
    blocks: Tensor  # [num_seqs * K * blocks each] indices of k and v seen as [blocks * K, ...]
    mask_B1QM: Tensor  # additive

    @property
    def cells(self) -> slice:
        return slice(self.first, self.first + self.num_seqs * self.num_queries)

    def heads(self, x_CHD: Tensor, num_kv: int) -> Tensor:
        """Its cells of all rectangles', [B, K, G, Q, D]."""
        shape = (self.num_seqs, self.num_queries, num_kv, -1, x_CHD.shape[2])
        return x_CHD[self.cells].view(shape).permute(0, 2, 3, 1, 4)

    def pieces(self, num_rows: int, num_keys: int) -> Iterator[tuple[slice, Tensor]]:
        """Runs of its queries whose scores are held at a time, and their mask; `num_rows` scores a
        query and key."""
        most = max(1, _PIECE_SCORES // (num_rows * num_keys))
        step = -(-self.num_queries // -(-self.num_queries // most))  # pieces of like size
        for lo in range(0, self.num_queries, step):
            queries = slice(lo, lo + step)
            yield queries, self.mask_B1QM[:, :, queries]


@dataclass(frozen=True)
class Rectangles:
    """The layout of one engine step, or of one micro-batch."""

    rectangles: list[_Rectangle]
    tokens: Tensor | None  # [C] the query of each cell, padding repeats one; None: all, in order
    cells: Tensor | None  # [T] a query's cell; None: the same
    scratch: Scratch

    def to_cells(self, name: str, x_THD: Tensor) -> Tensor:
        """[C, H, D]; padding repeats a query."""
        if self.tokens is None:
            return x_THD.contiguous()
        cells = self.scratch.take(name, (len(self.tokens), *x_THD.shape[1:]), x_THD.dtype)
        return torch.index_select(x_THD, 0, self.tokens, out=cells)

    def to_cells_or_zero(self, name: str, x_THD: Tensor) -> Tensor:
        """[C, H, D]; a padded query must not touch dk and dv."""
        if self.tokens is None or self.cells is None:
            return x_THD.contiguous()
        cells = self.scratch.take(name, (len(self.tokens), *x_THD.shape[1:]), x_THD.dtype)
        return cells.zero_().index_copy_(0, self.cells, x_THD)

    def from_cells(self, x_CHD: Tensor) -> Tensor:
        return x_CHD if self.cells is None else x_CHD.index_select(0, self.cells)


def packed_rectangles(table: KeyTable, scratch: Scratch) -> Rectangles:
    """Blocks of at most 128 queries: those with like numbers of queries and of keys share a
    rectangle, up to the tile's size."""
    pieces = [piece for span in table.spans for piece in span.cut(_QUERY_BLOCK)]
    spans = [table.without_unseen(piece) for piece in pieces]
    groups = []
    for alike in _bucket_by_length([span.num_queries for span in spans], MIN_ROWS):
        longest = max(spans[i].num_queries for i in alike)
        for nearby in _bucket_by_length([spans[i].num_keys for i in alike], table.multiple):
            members = [spans[alike[i]] for i in nearby]
            num_keys = _round_up(max(span.num_keys for span in members), table.multiple)
            step = max(1, _TILE_PAIRS // (longest * num_keys))
            groups += [members[lo : lo + step] for lo in range(0, len(members), step)]
    return _make_rectangles(table, groups, scratch)


def paged_rectangles(table: KeyTable, scratch: Scratch) -> Rectangles:
    """Decodes apart from prefills, each by length; large enough to gather few times a layer."""
    spans = [table.without_unseen(span) for span in table.spans]
    decodes = [span for span in spans if span.num_queries == 1]
    prefills = [span for span in spans if span.num_queries > 1]
    alike = [decodes] if decodes else []
    for members in _bucket_by_length([span.num_queries for span in prefills], 4):
        alike.append([prefills[i] for i in members])
    groups = [run for group in alike for run in _cut_paged(table, group)]
    return _make_rectangles(table, groups, scratch)


def _bucket_by_length(lengths: Sequence[int], multiple: int) -> list[list[int]]:
    """Splits indices into groups whose padded lengths differ by at most a third.

    Members keep their order, so a batch that fits one group keeps the batch's order.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = _round_up(lengths[i], multiple)
        if not groups or padded * 3 < longest * 2:
            groups.append([])
            longest = padded
        groups[-1].append(i)
    return [sorted(g) for g in groups]


def _cut_paged(table: KeyTable, group: list[QuerySpan]) -> Iterator[list[QuerySpan]]:
    """Runs of like length, longest first: what they gather stays in the processor's cache, and
    they are padded by less than another rectangle would cost."""
    num_queries = max(span.num_queries for span in group)
    most_waste = _WASTE_KEYS / (1 + num_queries / _CHEAP_QUERIES)
    run: list[int] = []
    longest, waste = 0, 0
    for i in sorted(range(len(group)), key=lambda i: (-group[i].num_keys, i)):
        num_keys = group[i].num_keys
        is_large = (len(run) + 1) * longest * table.num_kv_heads > _PIECE_KEYS
        if run and (is_large or waste + longest - num_keys > most_waste):
            yield [group[j] for j in sorted(run)]
            run = []
        if not run:
            longest, waste = _round_up(num_keys, table.multiple), 0
        run.append(i)
        waste += longest - num_keys
    yield [group[j] for j in sorted(run)]


def _make_rectangles(
    table: KeyTable, groups: list[list[QuerySpan]], scratch: Scratch
) -> Rectangles:
    rectangles, tokens, first = [], [], 0
    for members in groups:
        rectangle, of_cell = _rectangle(table, members, first)
        rectangles.append(rectangle)
        tokens.append(of_cell)
        first = rectangle.cells.stop
    of_cells = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    num_tokens = sum(span.num_queries for span in table.spans)
    if torch.equal(of_cells, torch.arange(num_tokens)):
        return Rectangles(rectangles, None, None, scratch)
    cells = torch.empty(num_tokens, dtype=torch.int64)
    cells[of_cells] = torch.arange(first)  # any of the cells that repeat a query
    return Rectangles(rectangles, of_cells, cells, scratch)


def _rectangle(table: KeyTable, members: list[QuerySpan], first: int) -> tuple[_Rectangle, Tensor]:
    """The rectangle whose cells begin at `first`, and the query of each of them."""
    columns = [(s.query, s.num_queries, s.num_keys, s.first_key) for s in members]
    start, count, length, first_key = torch.tensor(columns).t().unsqueeze(2)
    num_queries = max(s.num_queries for s in members)
    num_keys = _round_up(max(s.num_keys for s in members), table.multiple)
    seen_by_all = min(s.num_keys - s.num_queries for s in members) + 1
    first_masked = 0 if table.can_hide_first(members) else seen_by_all
    query = torch.minimum(torch.arange(num_queries), count - 1)  # padding repeats the last
    visible = (length - count + query + 1).unsqueeze(2)
    key = torch.arange(first_masked, num_keys)
    hidden = key >= visible
    if table.window is not None:
        hidden |= key < visible - table.window
    mask = torch.zeros(hidden.shape, dtype=compute_dtype(table.dtype))
    mask.masked_fill_(hidden, -math.inf)
    # padded with the run's own last block: any other's keys might not be finite
    column = torch.arange(num_keys // table.block_size)
    column = torch.minimum(column, (length - 1) // table.block_size)
    block_B1N = table.blocks[first_key + column].to(torch.int64).unsqueeze(1)
    heads = torch.arange(table.num_kv_heads).unsqueeze(1)
    blocks = (block_B1N * table.num_kv_heads + heads).flatten()
    rectangle = _Rectangle(len(members), num_queries, first, blocks, mask.unsqueeze(1))
    return rectangle, (start + query).flatten()


class PagedRectangles:
    """The layouts of one engine step: one for each window that its layers have, made when first
    asked for."""

    def __init__(self, table: KeyTable, scratch: Scratch) -> None:
        self._table, self._scratch = table, scratch
        self._made: dict[int | None, Rectangles] = {}

    def of(self, window: int | None) -> Rectangles:
        if window not in self._made:
            table = replace(self._table, window=window)
            self._made[window] = paged_rectangles(table, self._scratch)
        return self._made[window]


def attend(q: Tensor, k: Tensor, v: Tensor, plan: VarlenPlan, options: AttendOptions) -> Tensor:
    """o [T, H, D] of packed sequences or trees; `attend_packed` of C++ in other dtypes."""
    wide_q, wide_k, wide_v = _for_products(q, k, v)
    layout = rectangles_of(plan, k.shape[1], q.dtype, options.window)
    caches = wide_k.unsqueeze(1), wide_v.unsqueeze(1)  # blocks of one key
    found = attend_rectangles(wide_q, *caches, layout, options.scale, sinks=options.sinks)
    return found.to(q.dtype)


def differentiate(
    do: Tensor,
    qkvo: tuple[Tensor, Tensor, Tensor, Tensor],
    plan: VarlenPlan,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, dsinks) of `attend`, given the gradient by its result."""
    q, k, v, out = qkvo
    layout = rectangles_of(plan, k.shape[1], q.dtype, options.window)
    wide_q, wide_k, wide_v, wide_do = _for_products(q, k, v, do)
    *grads, dsinks = _gradients(wide_q, wide_k, wide_v, out, wide_do, layout, options)
    dq, dk, dv = (grad.to(q.dtype) for grad in grads)
    return dq, dk, dv, dsinks


def rectangles_of(
    plan: VarlenPlan, num_kv: int, dtype: torch.dtype, window: int | None
) -> Rectangles:
    """The plan's layout for `num_kv` key heads, queries of that dtype and that window, kept by the
    plan."""

    def make() -> Rectangles:
        table = KeyTable(plan.spans, plan.flat_rows, 1, num_kv, dtype, window)
        return packed_rectangles(table, plan.scratch)

    return plan.layout(("rectangles", num_kv, dtype, window), make)


def attend_rectangles(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Rectangles,
    scale: float,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    sinks: Tensor | None = None,
) -> Tensor:
    """o of the plan's queries over caches [blocks, block_size, K, D]. `scales` (of k, of v) are
    those of a cache in fp8."""
    q_CHD = plan.to_cells("q", q_THD)
    o_CHD = torch.empty_like(q_CHD)
    num_kv, scratch = k_cache.shape[2], plan.scratch
    k_rows, v_rows = _block_rows(k_cache), _block_rows(v_cache)
    k_factor, v_factor = (1.0 if s is None else float(s) for s in scales)
    for r in plan.rectangles:
        num, dtype = r.num_seqs * num_kv, q_THD.dtype
        k_NLD = _gather_blocks("k", k_rows, k_factor, r.blocks, num, dtype, scratch)
        v_NLD = _gather_blocks("v", v_rows, v_factor, r.blocks, num, dtype, scratch)
        q, k_NLD, v_NLD = _for_products(r.heads(q_CHD, num_kv), k_NLD, v_NLD)
        o = r.heads(o_CHD, num_kv)
        for queries, mask in r.pieces(num * q.shape[2], k_NLD.shape[1]):
            q_NRD, block = _rows(q, queries), o[:, :, :, queries]
            of_rows = _sinks_of_rows(sinks, r.num_seqs, num_kv, q_NRD.shape[1])
            p, _ = _probabilities(q_NRD, k_NLD, mask, scale, scratch, of_rows)
            part = _weighted_values(p, v_NLD, scratch)[:, : q_NRD.shape[1]]
            block.copy_(part.reshape(block.shape))
    return plan.from_cells(o_CHD)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    do: Tensor,
    plan: Rectangles,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dsinks; all but dq in fp32 (fp64)."""
    num_kv, scratch, wide = k.shape[1], plan.scratch, compute_dtype(q.dtype)
    scale, sinks = options.scale, options.sinks
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    delta_TH1 = (do.to(wide) * out).sum(-1, keepdim=True)
    q_CHD, do_CHD = plan.to_cells("q", q), plan.to_cells_or_zero("do", do)
    delta_CH1 = plan.to_cells_or_zero("delta", delta_TH1)
    dq_CHD = torch.empty_like(q_CHD)
    k_rows, v_rows = _block_rows(k.unsqueeze(1)), _block_rows(v.unsqueeze(1))
    dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (k, v))
    for r in plan.rectangles:
        num = r.num_seqs * num_kv
        k_NLD = _gather_blocks("k", k_rows, 1.0, r.blocks, num, k.dtype, scratch)
        v_NLD = _gather_blocks("v", v_rows, 1.0, r.blocks, num, v.dtype, scratch)
        dk_NLD, dv_NLD = (scratch.take(name, k_NLD.shape, wide).zero_() for name in ("dk", "dv"))
        cells = [r.heads(x, num_kv) for x in (q_CHD, do_CHD, delta_CH1, dq_CHD)]
        for queries, mask in r.pieces(num * cells[0].shape[2], k_NLD.shape[1]):
            q_NRD, do_NRD, delta_NR1 = (_rows(x, queries) for x in cells[:3])
            of_rows = _sinks_of_rows(sinks, r.num_seqs, num_kv, q_NRD.shape[1])
            p, of_sinks = _probabilities(q_NRD, k_NLD, mask, scale, scratch, of_rows)
            p = p[:, : q_NRD.shape[1]]
            if dsinks is not None and of_sinks is not None:  # which have no value: dp is 0
                dsink_NR = of_sinks.mul_(delta_NR1.squeeze(-1))
                dsinks -= dsink_NR.view(r.num_seqs, dsinks.numel(), -1).sum((0, 2))
            ds = _score_gradient(p, do_NRD, delta_NR1, v_NLD, dv_NLD, scratch)
            dk_NLD += torch.bmm(ds.transpose(1, 2), q_NRD)
            block = cells[3][:, :, :, queries]
            block.copy_(torch.bmm(ds, k_NLD).mul_(scale).reshape(block.shape))
        for grad, part in ((dk, dk_NLD.mul_(scale)), (dv, dv_NLD)):
            grad.flatten(0, 1).index_add_(0, r.blocks, part.flatten(0, 1))
    return plan.from_cells(dq_CHD), dk, dv, dsinks


def _score_gradient(
    p: Tensor, do: Tensor, delta: Tensor, v: Tensor, dv: Tensor, scratch: Scratch
) -> Tensor:
    """Adds Pᵀ · dO to dv and returns the scores' gradient, P · (dO · Vᵀ − delta)."""
    dp = scratch.take("scores", p.shape, v.dtype)
    torch.bmm(do, v.transpose(1, 2), out=dp)
    low = p if p.dtype == v.dtype else scratch.take("low", p.shape, v.dtype).copy_(p)
    dv += torch.bmm(low.transpose(1, 2), do)
    wide = dp if dp.dtype == p.dtype else scratch.take("wide", p.shape, p.dtype).copy_(dp)
    ds = wide.sub_(delta).mul_(p)
    return ds if ds is dp else dp.copy_(ds)


def _rows(x_BKGQD: Tensor, queries: slice) -> Tensor:
    """[N, R, D]: one matmul a run and key head, the queries of its group as rows."""
    block = x_BKGQD[:, :, :, queries]
    return block.reshape(block.shape[0] * block.shape[1], -1, block.shape[4])


def _block_rows(cache: Tensor) -> Tensor:
    """[blocks * K, block_size, D]: the keys of a block and head are in one piece, as
    `make_kv_cache` lays them; any other cache is copied whole."""
    return heads_first(cache).contiguous().flatten(0, 1)


def _gather_blocks(
    name: str,
    rows: Tensor,
    factor: float,
    index: Tensor,
    num: int,
    dtype: torch.dtype,
    scratch: Scratch,
) -> Tensor:
    """Keys or values [N, L, D] of `num` runs and heads from rows [blocks * K, block_size, D]; of
    rows in fp8 times `factor`."""
    shape = (index.shape[0], *rows.shape[1:])
    out = scratch.take(name, shape, dtype)
    if rows.dtype == dtype:
        torch.index_select(rows, 0, index, out=out)
    else:
        bits = index_dtype(rows.dtype)
        raw = scratch.take("raw", shape, bits)
        torch.index_select(rows.view(bits), 0, index, out=raw)
        widen_fp8(raw.view(rows.dtype), factor, out, scratch)
    return out.view(num, -1, rows.shape[2])


def widen_fp8(low: Tensor, factor: float, out: Tensor, scratch: Scratch) -> None:
    """out = low · factor. PyTorch converts fp8 element by element, more than ten times slower than
    this: e4m3's bits, shifted to where fp16 has sign, exponent and mantissa, are the value times
    2^-8, subnormals too, and fp16 is widened by an instruction. Its NaN, which a cache of finite
    keys and values never holds, reads as 480."""
    if low.dtype != torch.float8_e4m3fn:
        out.copy_(low).mul_(factor)
        return
    bits = scratch.take("bits", low.shape, torch.int16).copy_(low.view(torch.int8))
    bits.bitwise_left_shift_(7).bitwise_and_(-16385)  # clears the second copy of the sign
    is_wide = out.dtype == torch.float32
    wide = out if is_wide else scratch.take("widened", low.shape, torch.float32)
    wide.copy_(bits.view(torch.float16)).mul_(256.0 * factor)
    if not is_wide:
        out.copy_(wide)


def _probabilities(
    q_NRD: Tensor,
    k_NLD: Tensor,
    mask_B1QM: Tensor,
    scale: float,
    scratch: Scratch,
    sinks_NR: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """softmax(scale · q · Kᵀ + mask) in fp32 (fp64), [N, R or more, L]: see `_safe_rows`; and the
    weights of the sinks [N, R], where there are some."""
    rows, num_keys = q_NRD.shape[1], k_NLD.shape[1]
    padded = _safe_rows(rows, q_NRD.shape[0], q_NRD.shape[2], q_NRD.dtype)
    if padded > rows:
        q_NRD = F.pad(q_NRD, (0, 0, 0, padded - rows))
    shape = (q_NRD.shape[0], padded, num_keys)
    wide = raw = scratch.take("scores", shape, q_NRD.dtype)
    torch.bmm(q_NRD, k_NLD.transpose(1, 2), out=raw)
    if _is_half(raw.dtype):
        wide = scratch.take("wide", shape, torch.float32).copy_(raw)
    wide.mul_(scale)
    num_seqs, _, num_queries, num_masked = mask_B1QM.shape
    if num_masked:
        grid = wide[:, :rows, num_keys - num_masked :].unflatten(0, (num_seqs, -1))
        grid.unflatten(2, (-1, num_queries)).add_(mask_B1QM.unsqueeze(1))
    p = torch.softmax(wide, -1, out=scratch.take("p", shape, wide.dtype))
    if sinks_NR is None:
        return p, None
    # the heaviest key's weight is 1 / Σ e^(s - top), so this is e^sink / Σ e^s, and a maximum has
    # the same bits whatever keys pad the row
    real = p[:, :rows]
    ratio_NR = (sinks_NR - wide[:, :rows].amax(-1)).exp_().mul_(real.amax(-1))
    real.mul_(ratio_NR.add(1).reciprocal_().unsqueeze(-1))
    return p, ratio_NR.reciprocal_().add_(1).reciprocal_()


def _sinks_of_rows(
    sinks_H: Tensor | None, num_seqs: int, num_kv: int, num_rows: int
) -> Tensor | None:
    """The sink of each row of scores, [N, R]: a row's head is one of its key head's group."""
    if sinks_H is None:
        return None
    sinks_KG1 = sinks_H.view(num_kv, -1, 1)
    shape = (num_seqs, num_kv, sinks_KG1.shape[1], num_rows // sinks_KG1.shape[1])
    return sinks_KG1.expand(shape).reshape(num_seqs * num_kv, num_rows)


def _safe_rows(rows: int, num_matrices: int, head_dim: int, dtype: torch.dtype) -> int:
    """The rows to compute so that a product is computed as larger ones are.

    Half: torch hands a product to oneDNN only from a certain size on. fp32: MKL shares the rows
    out where there are fewer matrices than threads, and none may get fewer than `_min_rows`.
    """
    if _is_half(dtype):
        smallest = head_dim * _key_multiple(dtype)  # of one row, with the fewest keys
        at_least = _SMALL_BATCH // (num_matrices * smallest) + 1
        return max(rows, at_least, -(-_SMALL_MATRIX // smallest))
    num_threads, at_least = torch.get_num_threads(), _min_rows(head_dim)
    if num_matrices < num_threads:
        return _round_up(rows, at_least * num_threads)
    return max(rows, at_least)


def _min_rows(head_dim: int) -> int:
    """Fewer fp32 rows take another MKL kernel, with other bits. An AMD EPYC was seen to need 4; an
    Intel Xeon with AVX-512 about head_dim / 24 (5 at 96, 6 at 128, 10 at 256)."""
    return max(MIN_ROWS, -(-head_dim // 16))


def _weighted_values(p_NRL: Tensor, v_NLD: Tensor, scratch: Scratch) -> Tensor:
    """P · V in v's dtype."""
    if _is_half(v_NLD.dtype):
        return torch.bmm(scratch.take("low", p_NRL.shape, v_NLD.dtype).copy_(p_NRL), v_NLD)
    out = torch.bmm(p_NRL[:, :, :KEY_BLOCK], v_NLD[:, :KEY_BLOCK])
    part = scratch.take("part", out.shape, out.dtype)
    for lo in range(KEY_BLOCK, v_NLD.shape[1], KEY_BLOCK):
        block = slice(lo, lo + KEY_BLOCK)
        out += torch.bmm(p_NRL[:, :, block], v_NLD[:, block], out=part)
    return out


def _is_half(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which attention of this dtype is computed."""
    return torch.float32 if dtype == torch.bfloat16 and not is_bf16_fast() else dtype


def _for_products(*tensors: Tensor) -> list[Tensor]:
    return [x.to(_product_dtype(x.dtype)) for x in tensors]


def _key_multiple(dtype: torch.dtype) -> int:
    """The number of keys is padded to a multiple of this."""
    return 16 if _is_half(_product_dtype(dtype)) else KEY_BLOCK


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def attend_by_definition(
    qkv: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[Sequence[int], Sequence[int]],
    causal: bool,
    options: AttendOptions,
) -> tuple[Tensor, Tensor]:
    """(o, lse [T, H]) where no kernel on a CPU does it: masks that are not causal, keys of other
    lengths than the queries', or lse."""
    scale, window, sinks = options
    return flash_attn_varlen_ref(*qkv, *bounds, scale, causal=causal, window=window, sinks=sinks)


def flash_attn_varlen_ref(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    cu_seqlens_q: Sequence[int],
    cu_seqlens_k: Sequence[int],
    softmax_scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one sequence at a time, differentiable by autograd alone: (o, lse [T, H])."""
    group = q_THD.shape[1] // k_SKD.shape[1]
    outs, lses = [q_THD[:0]], [q_THD[:0, :, 0].to(compute_dtype(q_THD.dtype))]
    for (q_lo, q_hi), (k_lo, k_hi) in zip(
        pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True
    ):
        q = q_THD[q_lo:q_hi].transpose(0, 1)
        k = k_SKD[k_lo:k_hi].transpose(0, 1).repeat_interleave(group, 0)
        v = v_SKD[k_lo:k_hi].transpose(0, 1).repeat_interleave(group, 0)
        hidden = _hidden(q_hi - q_lo, k_hi - k_lo, causal, window, q.device)
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(hidden, -math.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(-1, q_hi - q_lo, 1)
            scores = torch.cat([scores, column], -1)
            p = torch.softmax(scores, -1)[:, :, :-1]
            outs.append((p @ v).transpose(0, 1))
            lses.append(scores.to(compute_dtype(scores.dtype)).logsumexp(-1).T)
            continue
        blind = hidden.all(-1)[:, None]
        p = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
        outs.append((p @ v).transpose(0, 1))
        wide = scores.to(compute_dtype(scores.dtype))
        lses.append(
            wide.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[:, 0], -math.inf).T
        )
    return torch.cat(outs), torch.cat(lses)


def _hidden(
    num_q: int, num_k: int, causal: bool, window: int | None, device: torch.device
) -> Tensor:
    """True where a query does not see a key."""
    key = torch.arange(num_k, device=device)
    position = torch.arange(num_k - num_q, num_k, device=device).unsqueeze(1)
    hidden = (
        key > position if causal else torch.zeros(num_q, num_k, dtype=torch.bool, device=device)
    )
    return hidden if window is None else hidden | (key <= position - window)
