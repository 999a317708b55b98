"""The loop `feedback`: a wrong answer is told so, and the policy tries again, for less reward.

    --agent feedback --agent-args tries=3 discount=0.5 message="That is not right. Try again."

A try ends where the environment says that the episode is done; its score is then asked for, and
below 1 the policy reads `message` and goes on in the same context. Try n (from 0) earns
`discount ** n` of its score, and the best try counts, so trying again never costs anything. A
success is a reward of 1, and so one of the first try; the metric `solved` counts those of all.
Left out: environments that cannot be asked for another step once they were done. Those in the short
form can, unless their own code forbids it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nanorl.agents.episode import Episode
from nanorl.bounds import check_number
from nanorl.envs.rewards.base import Score


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """The loop with its options."""

    tries: int = 3
    message: str = "That is not right. Try again."
    discount: float = 0.5

    def __post_init__(self) -> None:
        check_number("--agent-args tries=", self.tries, 1, 100)
        check_number("--agent-args discount=", self.discount, 0, 1)

    async def __call__(self, episode: Episode) -> None:
        await episode.start()
        message = [{"role": "user", "content": str(self.message)}]
        for number in range(int(self.tries)):
            if not await play_try(episode):
                return
            judged = await episode.judge()
            self._keep(episode, judged, number)
            # At the last turn nobody would read the message.
            if judged.total >= 1.0 or number + 1 == self.tries or not episode.context.turns_left:
                return
            episode.answer = None  # another one is awaited
            if not episode.context.observe([], message):
                return

    def _keep(self, episode: Episode, judged: Score, number: int) -> None:
        """Let the best try count. What turns earned is as the last score says."""
        metrics = episode.context.builder.metrics
        metrics["tries"] = number + 1.0
        metrics["solved"] = float(judged.total >= 1.0)
        total = judged.total * self.discount**number
        before = episode.score
        if before is not None and before.total >= total:
            judged, total = replace(judged, parts=before.parts), before.total
        episode.score = replace(judged, total=total)


async def play_try(episode: Episode) -> bool:
    """Take turns until the environment is done; False where the policy was cut off before."""
    while (text := await episode.turn()) is not None:
        step = await episode.step(text)
        if step.is_done:
            return True
        if not episode.observe(step):
            return False
    return False
