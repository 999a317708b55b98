"""What a caller asks of the engine (`SamplingParams`) and what comes back (`Output`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is decoded. `temperature=0` is greedy; logps are then of temperature 1."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    seed: int = 0  # the sampled tokens depend on (seed, position) alone, never on the batch
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature}: must be 0 (greedy) or positive, and finite"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: must be 0 (off) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be in (0, 1]")


@dataclass(kw_only=True)
class Output:
    """The completion alone, never the prompt. `ids`, `logps`, `versions` have one entry a token.

    A stop token that ended the completion is its last id (finish_reason "stop").
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)  # nats, fp32, of the tempered distribution
    versions: list[int] = field(default_factory=list)  # policy version that sampled each token
    finish_reason: FinishReason = "length"
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
