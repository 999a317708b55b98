"""Blocks of the paged KV cache: who holds them, which prefixes they contain, which may be reused.

A block is free, held by `ref_counts[b]` sequences, or cached: held by nobody but still containing
a known prefix, and evicted least recently used first. A full block is known by the pair (key of
the block before it, its token ids); keys are numbers given out once, so equal keys mean equal
prefixes exactly, with no hash to collide. `flush` forgets all of them: after a weight update their
contents belong to an old policy.
Left out: copy-on-write of a partial last block; members of a group recompute at most
`block_size - 1` prompt tokens each.
"""

from __future__ import annotations

from collections import OrderedDict

Key = tuple[int, tuple[int, ...]]
ROOT = 0  # the key of the empty prefix


class BlockManager:
    """Bookkeeping only: the tensors are the model runner's."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks={num_blocks}, block_size={block_size}: need at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, known; oldest first
        self._block_of: dict[Key, tuple[int, int]] = {}  # -> (block, its own key)
        self._key_of: dict[int, Key] = {}
        self._next_key = ROOT + 1

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: free or only cached."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, tokens: list[int]) -> tuple[list[int], int]:
        """The known blocks of the longest prefix of `tokens` and the key of the last of them.

        At least one token is left over, since something must run to give the next logits. The
        blocks are not held yet: call `hold` before anything else may allocate.
        """
        blocks: list[int] = []
        key = ROOT
        size = self.block_size
        for end in range(size, len(tokens), size):
            found = self._block_of.get((key, tuple(tokens[end - size : end])))
            if found is None:
                break
            block, key = found
            blocks.append(block)
        return blocks, key

    def hold(self, blocks: list[int]) -> None:
        """One more reference on each block."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached[block]
            self.ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller checks `num_available` first."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        blocks = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self.ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: list[int]) -> None:
        """One reference less on each; the last one leaves a known block cached, others free.

        Later blocks of a prefix are released first, so that they are evicted first.
        """
        for block in reversed(blocks):
            assert self.ref_counts[block] > 0, f"block {block} was released too often"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] > 0:
                continue
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, parent: int, tokens: list[int]) -> int:
        """Make a full, computed block findable; returns its key. The first one registered wins."""
        if not self.prefix_caching:
            return ROOT
        name = (parent, tuple(tokens))
        found = self._block_of.get(name)
        if found is not None:
            return found[1]
        key = self._next_key
        self._next_key += 1
        self._block_of[name] = (block, key)
        self._key_of[block] = name
        return key

    def flush(self) -> None:
        """Forget every prefix. Blocks in use stay with their holders but are no longer shared."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def check(self, block_tables: list[list[int]]) -> None:
        """Assert every invariant, given the block tables of all sequences that hold blocks."""
        held = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                held[block] += 1
        assert held == self.ref_counts, "reference counts differ from the block tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is free and cached"
        used = {block for block, count in enumerate(held) if count}
        assert used.isdisjoint(free | cached), "a block in use is free or cached"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block leaked"
        assert set(self._key_of) <= used | cached, "a free block is known"
        assert {block for block, _ in self._block_of.values()} == set(self._key_of)
