"""ATIF, the Agent Trajectory Interchange Format: a JSON file for each rollout, in one folder.

Written as ATIF-v1.7; what 1.8 adds is sound, which rollouts have none of. A history that was
compacted is a file of its own, which names the one that it goes on in: ROLLOUT.json is the first,
ROLLOUT.cont-1.json the second. Sub-agents are embedded in the file of the sequence that called
them, and named where their result stands. The reward is in `extra`, of every file of a rollout. A
picture is a part of its message that names a file in the folder `pictures` beside; one that is
missing is a line.
Source: RFC 0001 of harbor-framework/harbor, "Trajectory format".
Left out: `timestamp`, which no store of rollouts knows, and costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from nanoengine.text.chat_template import Message
from nanorl.observability.trajectories.base import (
    CallOfTurn,
    Trajectory,
    TrajectorySequence,
    TrajectoryTurn,
    number,
)
from nanorl.observability.trajectories.files import PICTURES, whole_folder
from nanorl.observability.trajectories.frames import Content, Json
from nanorl.shown_pictures import RunPictures, ShownPicture

VERSION = "ATIF-v1.7"


@dataclass(frozen=True, kw_only=True)
class AgentInfo:
    """The player of a trajectory: the agent loop, the version of this package, and the model."""

    name: str
    version: str
    model: str


def write_atif(
    trajectories: Iterable[Trajectory],
    path: Path,
    agent: AgentInfo,
    *,
    force: bool,
    pictures: RunPictures | None = None,
) -> None:
    """Write the folder, a rollout in memory at a time, with the files of the run's pictures."""
    with whole_folder(path, force=force, suffix=".json") as folder:
        copied = CopiedPictures(pictures, folder / PICTURES)
        for trajectory in trajectories:
            for name, document in documents(trajectory, agent, copied):
                text = json.dumps(document, ensure_ascii=False, allow_nan=False)
                (folder / name).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class CopiedPictures:
    """The files of pictures, each copied once into a folder beside the documents."""

    pictures: RunPictures | None
    folder: Path

    def part(self, shown: ShownPicture) -> Json:
        """The part of a message: an image, or a line for one that is not there."""
        from nanoengine.vision.picture_files import media_type  # here: few runs have pictures

        try:
            if self.pictures is None:
                raise KeyError("the run's model reads text alone")
            data = self.pictures.data(shown.sha256)
            kind = media_type(data)
        except (KeyError, ValueError):
            return {"type": "text", "text": shown.line}
        name = f"{shown.sha256}.{kind.removeprefix('image/')}"
        self.folder.mkdir(exist_ok=True)
        if not (self.folder / name).exists():
            (self.folder / name).write_bytes(data)
        return {"type": "image", "source": {"media_type": kind, "path": f"{PICTURES}/{name}"}}


def documents(
    trajectory: Trajectory, agent: AgentInfo, copied: CopiedPictures
) -> Iterator[tuple[str, Json]]:
    """The files of one rollout by their names, in the order in which they go on in each other."""
    segments = trajectory.segments
    stem = quote(trajectory.rollout.rollout_id, safe="")
    names = [f"{stem}.json", *(f"{stem}.cont-{i}.json" for i in range(1, len(segments)))]
    for place, segment in enumerate(segments):
        writer = _Writer(trajectory, agent, copied)
        written = writer.document(segment)
        written["extra"] = {
            "task_id": trajectory.rollout.task_id,
            "group_id": trajectory.rollout.group_id,
            **trajectory.outcome(),
            "segment": place,
            "num_segments": len(segments),
        }
        if place:
            before = segments[place - 1]
            _mark_copied(written["steps"], writer.contents(before, before.chat.messages))
        if place + 1 < len(segments):
            written["continued_trajectory_ref"] = names[place + 1]
        yield names[place], written


def _mark_copied(steps: Sequence[Json], before: Sequence[Content]) -> None:
    """Mark what opens a continuation just as it opened the part before."""
    for step, content in zip(steps, before, strict=False):
        if step["message"] == content:
            step["is_copied_context"] = True


@dataclass(frozen=True)
class _Writer:
    trajectory: Trajectory
    agent: AgentInfo
    copied: CopiedPictures

    def content(self, sequence: TrajectorySequence, content: Content) -> Content:
        """A content as the format has it."""
        if isinstance(content, str):
            return content
        return [
            self.copied.part(sequence.pictures[part["number"] - 1])
            if part["type"] == "image"
            else part
            for part in content
        ]

    def contents(self, sequence: TrajectorySequence, messages: Sequence[Message]) -> list[Content]:
        """Those of some of its messages."""
        return [self.content(sequence, message["content"]) for message in messages]

    def document(self, sequence: TrajectorySequence) -> Json:
        """The trajectory of one sequence, with those that it called."""
        agent: Json = {
            "name": self.agent.name,
            "version": self.agent.version,
            "model_name": self.agent.model,
        }
        if sequence.chat.tools:
            agent["tool_definitions"] = sequence.chat.tools
        called = self._called_by(sequence)
        told = zip(
            sequence.chat.messages, self.contents(sequence, sequence.chat.messages), strict=True
        )
        steps = _opening_steps([{**message, "content": content} for message, content in told])
        for turn in sequence.turns:
            steps += self._turn_steps(sequence, turn, called)
        document = {
            "schema_version": VERSION,
            "session_id": self.trajectory.rollout.rollout_id,
            "trajectory_id": self._id(sequence),
            "agent": agent,
            "steps": [{"step_id": place, **step} for place, step in enumerate(steps, 1)],
            "final_metrics": _final_metrics(sequence, len(steps)),
        }
        if called:
            document["subagent_trajectories"] = [self.document(one) for one in called]
        return document

    def _id(self, sequence: TrajectorySequence) -> str:
        return f"{self.trajectory.rollout.rollout_id}/{sequence.name}"

    def _called_by(self, sequence: TrajectorySequence) -> list[TrajectorySequence]:
        """The sub-agents of a sequence. Those whose call was not found are the main sequence's."""
        return [
            one
            for one in self.trajectory.beside
            if (one.caller[0] if one.caller else self.trajectory.main.name) == sequence.name
        ]

    def _turn_steps(
        self,
        sequence: TrajectorySequence,
        turn: TrajectoryTurn,
        called: Sequence[TrajectorySequence],
    ) -> Iterator[Json]:
        """The step of a turn, and those of a user who answered it."""
        refs = {one.caller[1]: self._id(one) for one in called if one.caller}
        results = [
            _result(call, self.content(sequence, call.result or ""), refs)
            for call in turn.calls
            if call.result or call.id in refs
        ]
        others = [message for message in turn.further if message["role"] != "user"]
        results += [{"content": one} for one in self.contents(sequence, others)]
        step: Json = {"source": "agent", "message": turn.content}
        if turn.reasoning:
            step["reasoning_content"] = turn.reasoning
        if turn.calls:
            step["tool_calls"] = [_call(one.id, one.name, one.arguments) for one in turn.calls]
        if results:
            step["observation"] = {"results": results}
        step["metrics"] = _metrics(sequence, turn)
        if turn.is_copied:
            step["is_copied_context"] = True
        yield step
        for message in turn.further:
            if message["role"] == "user":
                content = self.content(sequence, message["content"])
                yield {"source": "user", "message": content}


def _opening_steps(messages: Sequence[Message]) -> list[Json]:
    """The steps of what the policy read first."""
    steps: list[Json] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "assistant":
            steps.append({"source": "agent", "message": text, "is_copied_context": True})
            if calls := message.get("tool_calls"):
                steps[-1]["tool_calls"] = [_call(one["id"], **one["function"]) for one in calls]
        elif role in ("user", "system", "developer"):
            source = "user" if role == "user" else "system"
            steps.append({"source": source, "message": text})
        else:
            if not steps or steps[-1]["source"] != "agent":
                steps.append({"source": "system", "message": ""})
            observation = steps[-1].setdefault("observation", {"results": []})
            source_id = message.get("tool_call_id")
            known = {"source_call_id": source_id} if source_id else {}
            observation["results"].append({**known, "content": text})
    return steps


def _call(call_id: str, name: str, arguments: Json) -> Json:
    return {"tool_call_id": call_id, "function_name": name, "arguments": arguments}


def _result(call: CallOfTurn, content: Content, refs: Mapping[str, str]) -> Json:
    result: Json = {"source_call_id": call.id, "content": content}
    if call.id in refs:
        result["subagent_trajectory_ref"] = [{"trajectory_id": refs[call.id]}]
    return result


def _metrics(sequence: TrajectorySequence, turn: TrajectoryTurn) -> Json:
    branch, span = sequence.branch, turn.span
    action = slice(span.action_start, span.action_end)
    metrics: Json = {
        "prompt_tokens": span.action_start,
        "completion_tokens": span.action_end - span.action_start,
        "prompt_token_ids": branch.tokens[: span.action_start],
        "completion_token_ids": branch.tokens[action],
        "extra": {
            "finish_reason": turn.finish_reason,
            "loss_mask": branch.loss_mask[action],
            "versions": branch.versions[action],
        },
    }
    logps = branch.logps[action]
    if all(number(logp) is not None for logp in logps):
        metrics["logprobs"] = logps
    if turn.reward is not None:
        metrics["extra"]["reward"] = number(turn.reward)
    return metrics


def _final_metrics(sequence: TrajectorySequence, num_steps: int) -> Json:
    own = [turn.span for turn in sequence.turns if not turn.is_copied]
    return {
        "total_prompt_tokens": sum(span.action_start for span in own),
        "total_completion_tokens": sum(span.action_end - span.action_start for span in own),
        "total_steps": num_steps,
    }
