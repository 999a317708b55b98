"""Which block of the KV cache holds what: reference counts, prefix cache, eviction.

A block holds the keys and values of `block_size` consecutive tokens. Every full block that has
been computed is known by a digest chained over all tokens before it, so requests that start alike
(the members of a group, the next turn of a rollout) share blocks. What they share of a block that
is not full, or not all theirs, they get as a copy: only full blocks are ever shared, and a full
block is never written again, so no write can reach a neighbour (copy on write, at admission).

A block nobody refers to keeps its content and its digest until it is needed: blocks without
reusable content go first, then the one released longest ago. The chain starts from a salt, the
policy version: after a weight update no old block can match, and `flush` forgets them all.

Left out: moving blocks to other memory, sharing between engines.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from nanoinfer.sequence import Sequence

_MAX_SIBLINGS = 64  # candidates for a partial match that are compared, newest first


@dataclass(frozen=True)
class Match:
    """A cached prefix: whole blocks to share, then `num_copied` tokens of block `copy_from`."""

    block_ids: list[int] = field(default_factory=list)
    copy_from: int | None = None
    num_copied: int = 0

    def num_tokens(self, block_size: int) -> int:
        return len(self.block_ids) * block_size + self.num_copied


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
        self._refs = [0] * num_blocks
        # Blocks with no reference, in the order in which they will be reused.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_digest: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}  # inverse of `_by_digest`
        # (digest of all blocks before, first token) -> blocks that continue there, with the tokens
        # known to be in them: the candidates for a copy.
        self._siblings: defaultdict[tuple[bytes, int], dict[int, tuple[int, ...]]]
        self._siblings = defaultdict(dict)
        self._sibling_key: dict[int, tuple[bytes, int]] = {}
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
        self._digest.clear()
        self._siblings.clear()
        self._sibling_key.clear()

    # Digests

    def digests(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Chained digests of the first `num_blocks` blocks of `seq.ids`, all of them full."""
        if seq.salt != self._salt:
            seq.salt, seq.digests = self._salt, []
        for i in range(len(seq.digests), num_blocks):
            lo = i * self.block_size
            parent = seq.digests[-1] if seq.digests else self._salt
            seq.digests.append(_digest(parent, seq.ids[lo : lo + self.block_size]))
        return seq.digests[:num_blocks]

    def prompt_keys(self, seq: Sequence) -> list[bytes]:
        """What a prefill of all of `seq.ids` will compute: full blocks, then the rest as one."""
        num_full, rest = divmod(len(seq.ids), self.block_size)
        keys = self.digests(seq, num_full)
        if rest:
            parent = keys[-1] if keys else self._salt
            keys = [*keys, _digest(parent, seq.ids[-rest:])]
        return keys

    # Prefix cache

    def match(self, seq: Sequence) -> Match:
        """The longest cached prefix of `seq.ids` within `seq.cache_limit`."""
        if not self.prefix_caching:
            return Match()
        limit = seq.cache_limit
        block_ids: list[int] = []
        digests = self.digests(seq, limit // self.block_size)
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            block_ids.append(block)
        start = len(block_ids) * self.block_size
        parent = digests[len(block_ids) - 1] if block_ids else self._salt
        rest = tuple(seq.ids[start : min(start + self.block_size, limit)])
        block, num_copied = self._best_sibling(parent, rest)
        return Match(block_ids, block, num_copied)

    def _best_sibling(self, parent: bytes, rest: tuple[int, ...]) -> tuple[int | None, int]:
        best: tuple[int | None, int] = (None, 0)
        siblings = self._siblings.get((parent, rest[0])) if rest else None
        if siblings is None:
            return best
        for block, tokens in islice(reversed(siblings.items()), _MAX_SIBLINGS):
            common = _common_prefix(tokens, rest)
            if common > best[1]:
                best = (block, common)
            if common == len(rest):
                break
        return best

    def commit(self, seq: Sequence) -> None:
        """Tell the prefix cache of the tokens of `seq` that have been computed."""
        if not self.prefix_caching or seq.num_computed == seq.num_committed:
            return
        size = self.block_size
        digests = self.digests(seq, seq.num_computed // size)
        for i in range(seq.num_committed // size, self.blocks_for(seq.num_computed)):
            tokens = tuple(seq.ids[i * size : min((i + 1) * size, seq.num_computed)])
            parent = digests[i - 1] if i else self._salt
            self._register(seq.block_ids[i], parent, tokens, digests[i : i + 1])
        seq.num_committed = seq.num_computed

    def _register(
        self, block: int, parent: bytes, tokens: tuple[int, ...], digest: list[bytes]
    ) -> None:
        if digest and self._by_digest.setdefault(digest[0], block) != block:
            self._forget(block)  # a twin was there first; this one is not worth keeping
            return
        if digest:
            self._digest[block] = digest[0]
        key = (parent, tokens[0])
        self._siblings[key][block] = tokens
        self._sibling_key[block] = key

    def _forget(self, block: int) -> None:
        """Drop what is known of a block's content."""
        digest = self._digest.pop(block, None)
        if digest is not None:
            del self._by_digest[digest]
        key = self._sibling_key.pop(block, None)
        if key is not None:
            del self._siblings[key][block]
            if not self._siblings[key]:
                del self._siblings[key]

    # Blocks

    def can_allocate(self, match: Match, num_tokens: int, reserve: int = 0) -> bool:
        """Whether `match` can be taken and extended to `num_tokens`, with `reserve` to spare."""
        idle = sum(self._refs[block] == 0 for block in match.block_ids)
        needed = self.blocks_for(num_tokens) - len(match.block_ids)
        return len(self._free) - idle >= needed + reserve

    def take_match(self, seq: Sequence, match: Match) -> tuple[int, int] | None:
        """Give `seq` a cached prefix. Returns the copy (from, to) to make before the next forward
        pass, if there is one."""
        assert not seq.block_ids, f"request {seq.handle} holds blocks already"
        for block in match.block_ids:
            self._share(block)
        seq.block_ids = list(match.block_ids)
        seq.num_computed = seq.num_committed = match.num_tokens(self.block_size)
        if match.copy_from is None:
            return None
        if match.copy_from in self._free:
            self._free.move_to_end(match.copy_from)  # used: the last to be reused
        copy_to = self._take()
        seq.block_ids.append(copy_to)
        return (match.copy_from, copy_to)

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` blocks for its first `num_tokens` tokens; False, and nothing, if they are not
        free."""
        needed = self.blocks_for(num_tokens) - len(seq.block_ids)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            seq.block_ids.append(self._take())
        return True

    def release(self, seq: Sequence) -> None:
        """Drop the references of `seq`. What was committed can be found until it is reused, the
        end of a sequence sooner than its start."""
        for block in reversed(seq.block_ids):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} was released twice"
            if self._refs[block] == 0:
                self._free[block] = None
                if block not in self._sibling_key:
                    self._free.move_to_end(block, last=False)
        seq.forget_cache()

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if block in self._sibling_key:
            self.num_evictions += 1
            self._forget(block)
        self._refs[block] = 1
        return block

    def _share(self, block: int) -> None:
        self._free.pop(block, None)
        self._refs[block] += 1

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Debug: assert every invariant, given all sequences that hold blocks."""
        counts = [0] * self.num_blocks
        for seq in sequences:
            for block in seq.block_ids:
                counts[block] += 1
            held = len(seq.block_ids) * self.block_size
            assert seq.num_committed <= seq.num_computed <= held, f"request {seq.handle}: blocks"
        assert counts == self._refs, "reference counts differ from the sequences' blocks"
        free = {block for block in range(self.num_blocks) if counts[block] == 0}
        assert free == set(self._free), "the free list is not the blocks without a reference"
        assert {d: b for b, d in self._digest.items()} == self._by_digest, "digests and blocks"
        listed = [(block, key) for key, blocks in self._siblings.items() for block in blocks]
        assert dict(listed) == self._sibling_key, "siblings and their keys"
        assert len(listed) == len(self._sibling_key), "a block is listed under two keys"
        assert self._digest.keys() <= self._sibling_key.keys(), "a full block is not a sibling"


def _digest(parent: bytes, tokens: list[int]) -> bytes:
    data = parent + np.asarray(tokens, dtype=np.int64).tobytes()
    return hashlib.blake2b(data, digest_size=16).digest()


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
