"""`EngineOptions`: the sizes of an engine, which every kind of it has. The rest is config.py.

A size that is 0 is chosen for the model's device when the engine is made: by `sized` on a CPU,
gpu/sizes.py on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

InFlight = Literal["recompute", "keep", "wait"]
"""What becomes of requests in flight when new weights come."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """How much one step of the engine may hold. 0 is chosen for the model's device: 512 tokens and
    64 sequences on a CPU, 8192 and 256 on a GPU."""

    max_batch_tokens: int = 0
    """Tokens of one engine step, decodes and prefill chunks together; 0: chosen for the device."""
    max_num_seqs: int = 0
    """Sequences that are decoded together; 0: chosen for the device."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdates:
    """How an engine takes new weights."""

    in_flight: InFlight = "recompute"
    """What becomes of requests in flight when new weights come. recompute: what they had cached is
    computed again by the new weights. keep: it stays, and their next tokens are sampled by the new
    weights after keys and values of the old. wait (AsyncEngine): the weights wait until all are
    answered, and new requests until the weights are there."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(StepSizes, WeightUpdates):
    """The options of a dense model on a CPU, each with its help under it."""

    num_blocks: int | None = None
    """Blocks of KV cache; None: as many as `cache_bytes` holds."""
    cache_bytes: int = 0
    """Memory of the KV cache where `num_blocks` is not given; on a CPU used only as it fills. 0,
    here and below: chosen for the model's device (gpu/sizes.py), 1 GiB on a CPU."""
    populate_cache: bool = False
    """On a CPU take the cache's memory at the start, not as it fills: no token waits for a page."""
    block_size: int = 16
    """Tokens a block."""
    prefix_caching: bool = True
    """Reuse the cache of earlier requests that started alike."""
    eos_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; None: the model's own."""

    def __post_init__(self) -> None:
        if self.in_flight not in get_args(InFlight):
            raise ValueError(
                f"in_flight={self.in_flight!r}: choose one of {', '.join(get_args(InFlight))}"
            )

    def sized(
        self, num_seqs: int = 64, batch_tokens: int = 512, cache_bytes: int = 1 << 30
    ) -> Self:
        """This config with these sizes where it has 0; the defaults are a CPU's."""
        most_seqs = self.max_num_seqs or min(num_seqs, self.max_batch_tokens or num_seqs)
        return replace(
            self,
            max_num_seqs=most_seqs,
            max_batch_tokens=self.max_batch_tokens or max(batch_tokens, most_seqs),
            cache_bytes=self.cache_bytes or (cache_bytes if self.num_blocks is None else 0),
        )

    @property
    def is_plain(self) -> bool:
        """True where it asks for nothing of nanoinfer/variants/."""
        return True
