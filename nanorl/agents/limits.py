"""`Limits`: the size that one rollout may grow to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The size that one rollout may grow to, in tokens unless the name says otherwise."""

    max_turns: int = 4
    """Model outputs in a rollout."""
    max_turn_tokens: int = 256
    """Sampled tokens in one turn."""
    max_response_tokens: int | None = None
    """Sampled tokens in the whole rollout; None leaves that to the context limit."""
    max_context_tokens: int = 2048
    """Everything: prompt, actions and observations."""
    max_observation_tokens: int = 256
    """The text of one observation; longer ones lose their middle, and pictures nothing."""
    max_images: int | None = None
    """Pictures in a context; one too many ends the episode, as what does not fit does. None leaves
    that to the context limit, of which they take their tokens."""
    max_image_tokens: int | None = None
    """Tokens of all pictures in a context."""

    def __post_init__(self) -> None:
        for name in (
            "max_turns",
            "max_turn_tokens",
            "max_response_tokens",
            "max_context_tokens",
            "max_observation_tokens",
            "max_images",
            "max_image_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
