"""The prompts of teachers that know more: the opening of an episode with a solution, a success of
the same group, or what a failure was answered with, in the environment's own chat template.

The collector writes them where a group has been played (`HindsightWriter.write`), for there the
openings, the tokenizer and the task are at hand; they travel with the rollouts
(`Rollout.hindsight`), and the teacher reads them in place of the rollouts' own prompts
(algorithms/self_distillation.py). SDFT (arXiv 2601.19897) shows a demonstration, SDPO (arXiv
2601.20802) a success of the group or feedback.

A rollout has none where there is nothing to show, or where its tokens do not begin with the
episode's opening: a compacted history, an agent that writes its own prompts. Left out: feedback
that no turn has observed, such as a judge's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from nanoengine.spans import ImageSpan, content_ids
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.agents.tokens import shorten
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.envs.base import Opening
from nanorl.envs.images import with_text
from nanorl.envs.tasks.problem import Problem
from nanorl.task import Task
from nanorl.types import Rollout

Openings = dict[str, Opening]
"""What the members of a group read first, by rollout_id."""

TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "solution": "\n\nThis is a right solution:\n{}\nNow solve it yourself.",
        "success": "\n\nAn earlier attempt was right:\n{}\nNow solve it yourself.",
        "feedback": "\n\nAn earlier attempt failed, and was answered:\n{}\nNow solve it yourself.",
    }
)
"""What is appended to the last message of the user, by what is shown."""


def most_tokens(spec: AlgorithmSpec, tokenizer: ChatTokenizer) -> int:
    """The most tokens by which a prompt grows."""
    frames = (len(tokenizer.encode(text.format(""))) for text in TEXTS.values())
    return spec.hindsight_tokens + max(frames) + SEAM


SEAM = 4
"""Tokens that two texts may have more, put together, than apart."""


def demonstration_of(task: Task) -> str:
    """A demonstration of how the task is solved: `data["demonstration"]`, the programs of a
    problem's first solution and its answer, or the answer alone; empty where there is none."""
    shown = task.data.get("demonstration")
    if isinstance(shown, str) and shown:
        return shown
    programs = task.solutions[0] if isinstance(task, Problem) and task.solutions else ()
    return "\n".join(part for part in (*programs, task.answer_text) if part)


def check_demonstrations(spec: AlgorithmSpec, tasks: Sequence[Task]) -> None:
    """`ValueError` if solutions are to be shown and none of these tasks has one."""
    if spec.hindsight == "solution" and not any(map(demonstration_of, tasks)):
        raise ValueError(
            "--rl.algorithm.hindsight solution: no task of the first step has a demonstration; "
            'give tasks an answer or data["demonstration"] (a text), or choose '
            "--rl.algorithm.hindsight success_or_feedback, which needs none"
        )


class HindsightWriter:
    """Writes the prompts of a run's groups. Agents fill `openings` while a group is played."""

    def __init__(self, spec: AlgorithmSpec, tokenizer: ChatTokenizer) -> None:
        self.openings: Openings = {}
        self._kind, self._most = spec.hindsight, spec.hindsight_tokens
        self._tokenizer = tokenizer

    def write(self, task: Task, rollouts: Sequence[Rollout]) -> None:
        """Give each rollout of a group its `hindsight`, where there is any."""
        for rollout in rollouts:
            opening = self.openings.pop(rollout.rollout_id, None)
            text = self._text(task, rollout, rollouts)
            rollout.hindsight, rollout.hindsight_images = [], []
            if opening is not None and text and self._begins_with(rollout, opening):
                shown = _with_text(opening.messages, text)
                rollout.hindsight, rollout.hindsight_images = self._encode(opening, shown)

    def forget(self, group_id: str) -> None:
        """Drop the openings of attempts that failed for good."""
        for rollout_id in [one for one in self.openings if one.startswith(f"{group_id}-m")]:
            del self.openings[rollout_id]

    def _begins_with(self, rollout: Rollout, opening: Opening) -> bool:
        own = content_ids(*self._encode(opening, opening.messages))
        return bool(rollout.turn_spans) and (
            rollout.sequences[0].keys[: rollout.turn_spans[0].action_start] == own
        )

    def _encode(
        self, opening: Opening, messages: Sequence[Message]
    ) -> tuple[list[int], list[ImageSpan]]:
        ids = self._tokenizer.encode_chat(messages, add_generation_prompt=True, tools=opening.tools)
        return ids, self._tokenizer.images_in(ids, messages, 0)

    def _text(self, task: Task, rollout: Rollout, group: Sequence[Rollout]) -> str:
        if self._kind == "solution":
            return self._shown("solution", demonstration_of(task))
        success, feedback = "", ""
        if self._kind != "feedback":
            others = (one for one in group if one.rollout_id != rollout.rollout_id)
            success = next((self._said(one) for one in others if one.is_success), "")
        if self._kind != "success" and not rollout.is_success:
            feedback = self._last_observation(rollout)
        return self._shown("success", success) or self._shown("feedback", feedback)

    def _shown(self, what: str, text: str) -> str:
        return TEXTS[what].format(shorten(self._tokenizer, text, self._most)) if text else ""

    def _said(self, rollout: Rollout) -> str:
        """All that followed the prompt, turns and observations."""
        start = rollout.turn_spans[0].action_start if rollout.turn_spans else 0
        return self._tokenizer.decode(rollout.tokens[start:], skip_special=True).strip()

    def _last_observation(self, rollout: Rollout) -> str:
        for span in reversed(rollout.turn_spans):
            observed = rollout.tokens[span.action_end : span.observation_end]
            if text := self._tokenizer.decode(observed, skip_special=True).strip():
                return text
        return ""


def _with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with the text at the end of the user's last one, or as one of its own."""
    said = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if not said:
        return [*messages, {"role": "user", "content": text.strip()}]
    last = messages[said[-1]]
    changed = with_text(last, text, between="")
    return [*messages[: said[-1]], changed, *messages[said[-1] + 1 :]]
