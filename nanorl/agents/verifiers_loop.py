"""The loop in which `verifiers` plays: its code drives the episode, and calls the policy by HTTP.

What its client calls is recorded (nanorl/agents/endpoint/); its rubric gives the reward, of which
the weighted rewards are the parts, and its metrics are the rollout's. An episode that verifiers
could not finish has failed, and is played again, unless a limit of ours ended it: that is scored as
unanswered. Only for the environment "verifiers".
"""

from __future__ import annotations

from nanorl.agents.episode import Episode
from nanorl.envs.rewards.base import Score, as_score
from nanorl.envs.verifiers import MODEL, Verifiers
from nanorl.types import InfrastructureError


async def verifiers(episode: Episode) -> None:
    """Have one episode played. ValueError in another environment."""
    env = episode.env.subject
    if not isinstance(env, Verifiers):
        raise ValueError("--agent verifiers: plays --env verifiers alone")
    async with episode.record() as session:
        ask = {
            "client": env.shared.client(session.openai_url, episode.tokenizer),
            "key": session.key,
            "model": MODEL,
        }
        said = await env.shared.process.play(episode.task.data["row"], ask, env.timeout_s)
        recording = session.recording
        if "failed" in said:
            if recording.truncation is None:
                raise InfrastructureError(f"verifiers: {said['failed']}")
            episode.score = Score(0.0)
            return
        if recording.num_answers == 0:
            raise InfrastructureError("verifiers ended the episode without a call of the policy")
    episode.score = as_score(
        Score(float(said["reward"]), parts={k: float(v) for k, v in said["rewards"].items()}),
        "verifiers",
    )
    episode.metrics.update({name: float(value) for name, value in said["metrics"].items()})
    episode.answer = recording.transcript(None).text
