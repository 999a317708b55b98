"""A loop that is a function of yours with a client of OpenAI's API, and knows nothing of tokens.

    async def agent(task, client):
        answer = await client.chat.completions.create(model="policy", messages=task.messages)
        return answer.choices[0].message.content

`--agent mine.py:agent` finds such a function by the names of its parameters. `client` is an
`openai.AsyncOpenAI`, for a plain function an `openai.OpenAI`, and the function then runs in a
thread of its own; `task.base_url` and `task.api_key` lead any other client to the same episode.
A text that it returns is read by the environment as the last turn; a number is the reward; None
leaves the score to the environment. Whose score it was is counted (`reward_from_agent`,
`reward_from_scorer`; neither: the environment's). One that raises after it has called is scored as
it stands, without an answer, and counted (`agent_failed`): the policy may have been the reason. One
that never had an answer has failed, and is played again.
Left out: programs of their own (command.py).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from nanoengine.extras import missing
from nanoengine.text.chat_template import Message
from nanorl.agents.episode import Episode
from nanorl.envs.images import with_urls, without_pictures
from nanorl.envs.rewards.base import Score, as_score
from nanorl.envs.tools.function import in_thread
from nanorl.plugins import where_raised
from nanorl.types import InfrastructureError

if TYPE_CHECKING:
    from nanorl.agents.endpoint.endpoint_server import ApiSession

LOG = logging.getLogger("nanorl.agents")
PARAMETERS = ("task", "client")


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """The task as an agent may know it: all that the policy may read, and never the answer."""

    task_id: str
    messages: list[Message]
    """What the environment opens with; its pictures are parts `image_url` with data URLs."""
    prompt: str
    """The text of the last of them."""
    files: dict[str, str] = field(default_factory=dict)
    """Name -> text."""
    base_url: str
    """Of OpenAI's clients; Anthropic's take it without the "/v1" at its end."""
    api_key: str
    keyed_url: str
    """A base URL that holds the key, without "/v1", for clients that can send none."""


def is_api_agent(value: Any) -> bool:
    """A function whose parameters are `task` and `client`."""
    return inspect.isfunction(value) and set(PARAMETERS) <= set(inspect.signature(value).parameters)


@dataclass(frozen=True)
class ApiLoop:
    """The loop around a user's function."""

    is_behind_api: ClassVar[bool] = True
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        _openai()  # imported, or found missing, before any work is done

    async def __call__(self, episode: Episode) -> None:
        async with episode.record() as session:
            try:
                said = await self._play(agent_task(episode, session), session)
            except InfrastructureError:
                raise
            except Exception as error:  # a plug-in boundary
                said = None
                told = f"the agent raised {type(error).__name__}: {error}{where_raised(error)}"
                note_failure(episode, session, told)
            await finish(episode, session, said)

    async def _play(self, task: AgentTask, session: ApiSession) -> Any:
        openai = _openai()
        options = {"base_url": session.openai_url, "api_key": session.key, "max_retries": 0}
        # No certificates: there is no TLS on the way, and to load them takes 20 ms a client.
        http = {"verify": False, "trust_env": False}
        function = self.function
        if inspect.iscoroutinefunction(getattr(function, "func", function)):
            transport = openai.DefaultAsyncHttpxClient(**http)
            async with openai.AsyncOpenAI(**options, http_client=transport) as client:
                return await function(task=task, client=client)
        with openai.OpenAI(**options, http_client=openai.DefaultHttpxClient(**http)) as client:
            return await in_thread(lambda: function(task=task, client=client))


def agent_task(episode: Episode, session: ApiSession) -> AgentTask:
    """The task of an episode that has begun, as its agent sees it."""
    assert episode.opening is not None, "the environment was reset"
    messages = with_urls(episode.opening.messages, episode.tokenizer)
    return AgentTask(
        task_id=episode.task.task_id,
        messages=messages,
        prompt=str(without_pictures(messages[-1])["content"]),
        files=dict(episode.task.files),
        base_url=session.openai_url,
        api_key=session.key,
        keyed_url=session.keyed_url,
    )


def note_failure(episode: Episode, session: ApiSession, told: str) -> None:
    """Count an agent that broke down. InfrastructureError where it never had an answer."""
    if session.recording.num_answers == 0:
        raise InfrastructureError(f"{told}; no call of it was answered before")
    episode.metrics["agent_failed"] = 1.0
    episode.trouble = told
    LOG.warning("rollout %s: %s", episode.rollout_id, told)


async def finish(episode: Episode, session: ApiSession, said: Any) -> None:
    """Take what the agent said, by its return value or HTTP, as the answer or the score."""
    report = session.report
    episode.metrics.update(report.metrics)
    if session.recording.num_answers == 0:
        raise InfrastructureError("the agent ended without an answer to any call")
    if report.reward is not None:
        episode.score = Score(report.reward)
        episode.metrics["reward_from_scorer"] = 1.0
    elif isinstance(said, Real | Score) and not isinstance(said, bool):
        episode.score = as_score(said, "agent")
        episode.metrics["reward_from_agent"] = 1.0
    elif isinstance(text := said if report.answer is None else report.answer, str):
        step = await episode.step(text)
        episode.answer = step.answer if step.is_done else text
    elif said is not None:
        raise InfrastructureError(
            f"the agent returned {said!r:.100}; return a text, a number or nothing"
        )


def _openai() -> Any:
    try:
        import openai  # here: an extra
    except ImportError:
        raise missing("an agent with a client", "openai", extra="agents") from None
    return openai
