"""The loop `compact`: a history that fills the context is summarised, and the policy goes on anew.

    --agent compact --agent-args share=0.6

Once `share` of --agent.max-context-tokens is taken, the policy reads the observation and after it
`request`, and its next turn is the summary. A new context opens with the messages of the opening
and, in the last of them if it is the user's, `heading` and the summary.

Pictures of the opening stand in the new context as they do in the old one. Of those that came later
`keep_images` keeps none, the `first`, or the last so many, behind the summary: as pictures that the
policy sees there anew, not as what it once made of them.

Both token sequences are trained on. The summary was sampled in the first one and is trained there
(a cut-off one too: it is used as far as it came); in the second one it is text that was encoded
anew, and masked like every prompt. Turns are counted over all contexts, summaries among them.
Left out: the observation that led to the summary is not repeated; what of it matters, the policy
has to write down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoengine.text.chat_template import Message
from nanorl.agents.episode import Episode
from nanorl.bounds import check_number
from nanorl.envs.base import TimeStep
from nanorl.envs.images import pictures_in, with_pictures_behind, with_text


@dataclass(frozen=True, kw_only=True)
class Compact:
    """The loop with its options."""

    share: float = 0.6
    request: str = (
        "Your memory is nearly full. Summarise all that matters for going on; the rest "
        "will be forgotten."
    )
    heading: str = "Your summary of what was done so far:"
    keep_images: str | int = "none"
    """none, first, or how many of the last."""

    def __post_init__(self) -> None:
        check_number("--agent-args share=", self.share, 0.05, 0.95)
        kept = self.keep_images
        if kept not in ("none", "first") and (not isinstance(kept, int) or kept < 1):
            raise ValueError(
                f"--agent-args keep_images={kept}: must be none, first, or how many of the last"
            )

    async def __call__(self, episode: Episode) -> None:
        await episode.start()
        while (text := await episode.turn()) is not None:
            step = await episode.step(text)
            if step.is_done:
                return
            goes_on = self._compact if self._is_due(episode) else _observe
            if not await goes_on(episode, step):
                return

    def _is_due(self, episode: Episode) -> bool:
        """The context is nearly full, and a turn is left after the one that summarises."""
        context = episode.context
        is_full = context.builder.num_tokens >= self.share * episode.limits.max_context_tokens
        return is_full and context.turns_left >= 2

    async def _compact(self, episode: Episode, step: TimeStep) -> bool:
        """False where no room is left, and the episode should end."""
        context = episode.context
        request = [{"role": "user", "content": str(self.request)}]
        if not context.observe(episode.messages_of(step), request):
            return False
        num_turns = context.builder.num_turns
        await context.turn()
        if context.builder.num_turns == num_turns:
            return False
        assert episode.opening is not None, "the episode has begun"
        summary = f"{self.heading}\n{context.last_text}"
        opening = episode.opening.messages
        later = pictures_in(context.messages)[len(pictures_in(opening)) :]
        return episode.begin_anew(with_summary(opening, summary, self._kept(later)))

    def _kept(self, pictures: list[Any]) -> list[Any]:
        if isinstance(self.keep_images, str):
            return pictures[:1] if self.keep_images == "first" else []
        return pictures[-self.keep_images :]


async def _observe(episode: Episode, step: TimeStep) -> bool:
    return episode.observe(step)


def with_summary(
    opening: Sequence[Message], summary: str, pictures: Sequence[Any] = ()
) -> list[Message]:
    """The opening, and the summary with its pictures as the end of what the user says in it: many
    chat templates refuse two messages of the user in a row."""
    last = opening[-1]
    if last["role"] != "user":
        return [*opening, with_pictures_behind({"role": "user", "content": summary}, pictures)]
    return [*opening[:-1], with_pictures_behind(with_text(last, summary), pictures)]
