"""The blocks of the KV cache: who holds each, what is in it, and which is taken next.

A block holds the keys and values of `block_size` consecutive tokens. Every full block that has
been computed is known by a digest chained over all tokens before it, so requests that start alike
(the members of a group, the next turn of a rollout) share blocks. What they share of a block that
is not full, or not all theirs, they get as a copy: only full blocks are ever shared, and a full
block is never written again, so no write can reach a neighbour (copy on write, at admission).

A block nobody refers to keeps its content and its digest until it is needed: blocks without
reusable content go first, then the one released longest ago. The chain starts from a salt, the
policy version: after a weight update no old block can match, and `flush` forgets them all. A
request with an adapter starts from a salt of its own (`Sequence.cache_key`).

Left out: moving blocks to other memory, sharing between engines.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from nanoinfer.sequence import Sequence

_MAX_SIBLINGS = 64  # candidates for a partial match that are compared, newest first


@dataclass(frozen=True)
class Match:
    """A cached prefix: whole blocks to share, then `num_copied` tokens of block `copy_from`.

    With blocks of 4, `Match([7, 2], copy_from=5, num_copied=3)` are 11 tokens: the 8 of blocks 7
    and 2, and the first 3 of block 5."""

    block_table: list[int] = field(default_factory=list)
    copy_from: int | None = None
    num_copied: int = 0

    def num_tokens(self, block_size: int) -> int:
        return len(self.block_table) * block_size + self.num_copied


class Block:
    """One page of the cache: how many sequences hold it, and what is known of its content."""

    __slots__ = ("block_id", "digest", "keys", "parent", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.forget_content()

    def forget_content(self) -> None:
        self.parent = b""  # digest of all blocks before it
        self.keys: tuple[int, ...] = ()  # content ids, computed and committed; none: unknown
        self.digest: bytes | None = None  # of a full block that others can share

    @property
    def is_known(self) -> bool:
        """True if others can find it by its content."""
        return bool(self.keys)

    @property
    def sibling_key(self) -> tuple[bytes, int]:
        """Blocks with the same one continue the same text with the same token."""
        return (self.parent, self.keys[0])


class BlockManager:
    """The block pool of one engine. Holds no tensors: model_runner.py does."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks={num_blocks}, block_size={block_size}: both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        # Blocks with no reference, in the order in which they will be reused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_digest: dict[bytes, int] = {}
        # Candidates for a copy, by their `sibling_key`; the dict inside is a set that keeps order.
        self._siblings: defaultdict[tuple[bytes, int], dict[int, None]] = defaultdict(dict)
        self.num_evictions = 0
        self.flush(0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def flush(self, version: int) -> None:
        """Forget all content; from now on digests are those of policy `version`. Blocks still
        referred to stay allocated, but nobody else will find them."""
        self._salt = hashlib.blake2b(version.to_bytes(8, "little", signed=True)).digest()[:16]
        self._by_digest.clear()
        self._siblings.clear()
        for block in self._blocks:
            block.forget_content()

    # Digests

    def digests(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Chained digests of the first `num_blocks` blocks of `seq.keys`, all of them full."""
        root = self._root(seq)
        if seq.salt != root:
            seq.salt, seq.digests = root, []
        for i in range(len(seq.digests), num_blocks):
            lo = i * self.block_size
            parent = seq.digests[-1] if seq.digests else root
            seq.digests.append(_digest(parent, seq.keys[lo : lo + self.block_size]))
        return seq.digests[:num_blocks]

    def _root(self, seq: Sequence) -> bytes:
        """The start of the chain: one for each policy version, and each adapter beside it."""
        if not seq.cache_key:
            return self._salt
        return hashlib.blake2b(self._salt + seq.cache_key, digest_size=16).digest()

    def prompt_keys(self, seq: Sequence) -> list[bytes]:
        """Digests of all blocks that a prefill of `seq` computes, the last of them not full."""
        num_full, rest = divmod(len(seq.ids), self.block_size)
        keys = self.digests(seq, num_full)
        if rest:
            parent = keys[-1] if keys else self._root(seq)
            keys = [*keys, _digest(parent, seq.keys[-rest:])]
        return keys

    # Prefix cache

    def match(self, seq: Sequence) -> Match:
        """The longest cached prefix of `seq.keys` within `seq.cache_limit`."""
        if not self.prefix_caching:
            return Match()
        limit = seq.cache_limit
        table: list[int] = []
        digests = self.digests(seq, limit // self.block_size)
        for digest in digests:
            block_id = self._by_digest.get(digest)
            if block_id is None:
                break
            table.append(block_id)
        start = len(table) * self.block_size
        parent = digests[len(table) - 1] if table else self._root(seq)
        rest = tuple(seq.keys[start : min(start + self.block_size, limit)])
        copy_from, num_copied = self._best_sibling(parent, rest)
        return Match(table, copy_from, num_copied)

    def _best_sibling(self, parent: bytes, rest: tuple[int, ...]) -> tuple[int | None, int]:
        best: tuple[int | None, int] = (None, 0)
        siblings = self._siblings.get((parent, rest[0])) if rest else None
        if siblings is None:
            return best
        for block_id in islice(reversed(siblings), _MAX_SIBLINGS):
            common = _common_prefix(self._blocks[block_id].keys, rest)
            if common > best[1]:
                best = (block_id, common)
            if common == len(rest):
                break
        return best

    def commit(self, seq: Sequence) -> None:
        """Tell the prefix cache of the tokens of `seq` that have been computed."""
        if not self.prefix_caching or seq.num_computed_tokens == seq.num_committed_tokens:
            return
        if seq.keeps_old_cache:
            return
        size = self.block_size
        digests = self.digests(seq, seq.num_computed_tokens // size)
        for i in range(seq.num_committed_tokens // size, self.blocks_for(seq.num_computed_tokens)):
            keys = tuple(seq.keys[i * size : min((i + 1) * size, seq.num_computed_tokens)])
            parent = digests[i - 1] if i else self._root(seq)
            digest = digests[i] if i < len(digests) else None
            self._register(self._blocks[seq.block_table[i]], parent, keys, digest)
        seq.num_committed_tokens = seq.num_computed_tokens

    def _register(
        self, block: Block, parent: bytes, keys: tuple[int, ...], digest: bytes | None
    ) -> None:
        """Let a block be found by its content. It has a digest if it is full."""
        block_id = block.block_id
        if digest is not None and self._by_digest.setdefault(digest, block_id) != block_id:
            self._forget(block)  # a twin was there first; this one is not worth keeping
            return
        block.parent, block.keys, block.digest = parent, keys, digest
        self._siblings[block.sibling_key][block_id] = None

    def _forget(self, block: Block) -> None:
        """Let a block not be found any more."""
        if not block.is_known:
            return
        if block.digest is not None:
            del self._by_digest[block.digest]
        siblings = self._siblings[block.sibling_key]
        del siblings[block.block_id]
        if not siblings:
            del self._siblings[block.sibling_key]
        block.forget_content()

    # Blocks

    def can_allocate(self, match: Match, num_tokens: int, num_spare: int = 0) -> bool:
        """True if `match` can be taken and extended to `num_tokens`, and `num_spare` blocks are
        free afterwards."""
        idle = sum(self._blocks[block_id].ref_count == 0 for block_id in match.block_table)
        needed = self.blocks_for(num_tokens) - len(match.block_table)
        return len(self._free) - idle >= needed + num_spare

    def take_match(self, seq: Sequence, match: Match) -> tuple[int, int] | None:
        """Give `seq` a cached prefix. Returns the copy (from, to) to make before the next forward
        pass, if there is one."""
        assert not seq.block_table, f"request {seq.handle} holds blocks already"
        for block_id in match.block_table:
            self._share(block_id)
        seq.block_table = list(match.block_table)
        seq.num_computed_tokens = seq.num_committed_tokens = match.num_tokens(self.block_size)
        if match.copy_from is None:
            return None
        if match.copy_from in self._free:
            self._free.move_to_end(match.copy_from)  # used: the last to be reused
        copy_to = self._take()
        seq.block_table.append(copy_to)
        return (match.copy_from, copy_to)

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens; False, and nothing, if they are not
        free."""
        needed = self.blocks_for(num_tokens) - len(seq.block_table)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            seq.block_table.append(self._take())
        return True

    def release(self, seq: Sequence) -> None:
        """Drop the references of `seq`. What was committed can be found until it is reused, the
        end of a sequence sooner than its start."""
        for block_id in reversed(seq.block_table):
            block = self._blocks[block_id]
            block.ref_count -= 1
            assert block.ref_count >= 0, f"block {block_id} was released twice"
            if block.ref_count == 0:
                self._free[block_id] = None
                if not block.is_known:
                    self._free.move_to_end(block_id, last=False)  # nothing is lost with it
        seq.forget_cache()

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        if block.is_known:
            self.num_evictions += 1
            self._forget(block)
        block.ref_count = 1
        return block_id

    def _share(self, block_id: int) -> None:
        self._free.pop(block_id, None)
        self._blocks[block_id].ref_count += 1


def _digest(parent: bytes, keys: list[int]) -> bytes:
    data = parent + np.asarray(keys, dtype=np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
