"""What an engine counts. Plain totals since the engine was made; rates are for the reader."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Metrics:
    """Totals. Tokens are counted once each time they are computed."""

    num_requests: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0  # asked for
    cached_tokens: int = 0  # of those, found in the prefix cache at first admission
    computed_tokens: int = 0  # forwarded: prefill, decode and recomputation
    sampled_tokens: int = 0
    drafted_tokens: int = 0  # guessed and computed
    accepted_tokens: int = 0  # of those, sampled too
    num_weight_updates: int = 0
    step_s: float = 0.0
    update_s: float = 0.0

    def to_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}
