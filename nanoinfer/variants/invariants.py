"""Debug: what must be true of an engine's queues and blocks between two steps."""

from __future__ import annotations

from collections.abc import Iterable

from nanoinfer.block_manager import BlockManager
from nanoinfer.scheduler import BatchScheduler
from nanoinfer.sequence import Sequence
from nanoinfer.variants.speculative import DraftingScheduler


def check(queues: BatchScheduler) -> None:
    """Assert every invariant of queues and blocks."""
    check_blocks(queues.blocks, [*queues.running, *queues.waiting])
    assert all(seq.row >= 0 for seq in queues.running), "a running sequence has no row"
    assert all(s.row < 0 and not s.block_table for s in queues.waiting), "a waiting one holds some"
    rows = [seq.row for seq in queues.running] + queues._free_rows
    assert len(rows) == len(set(rows)), "a row was given out twice"
    for queue in (queues.waiting, queues.running):
        ranks = [seq.rank for seq in queue]
        assert ranks == sorted(ranks), "a queue is not in the order of rank"
    owners = {seq.handle for seq in queues.running if seq.pending_keys}
    assert queues._prefilling == owners, "prefilling sequences"
    assert set(queues._pending.values()) <= owners, "a block is computed by nobody"
    if isinstance(queues, DraftingScheduler):
        queues.drafter.check(queues.running)


def check_blocks(pool: BlockManager, sequences: Iterable[Sequence]) -> None:
    """Assert every invariant, given all sequences that hold blocks."""
    counts = [0] * pool.num_blocks
    for seq in sequences:
        for block_id in seq.block_table:
            counts[block_id] += 1
        held = len(seq.block_table) * pool.block_size
        is_ordered = seq.num_committed_tokens <= seq.num_computed_tokens <= held
        assert is_ordered, f"request {seq.handle}: tokens and blocks"
    refs = [block.ref_count for block in pool._blocks]
    assert counts == refs, "reference counts differ from the sequences' blocks"
    free = {block_id for block_id in range(pool.num_blocks) if counts[block_id] == 0}
    assert free == set(pool._free), "the free list is not the blocks without a reference"
    full = {b.digest: b.block_id for b in pool._blocks if b.digest is not None}
    assert full == pool._by_digest, "digests and blocks"
    known = [(b.sibling_key, b.block_id) for b in pool._blocks if b.is_known]
    listed = [(key, block_id) for key, ids in pool._siblings.items() for block_id in ids]
    assert set(known) == set(listed), "siblings and their keys"
    assert len(known) == len(listed), "a block is listed under two keys"
    assert all(b.is_known for b in pool._blocks if b.digest), "a full block is not a sibling"
