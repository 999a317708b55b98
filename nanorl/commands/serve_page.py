"""What the server's page tells of a run's agent: its instructions, an example task, its tools.

All of it is read from held-out rollouts that the run has stored, so that no code of the environment
has to play. Left out: running the tools, which `nanorl chat` does.
"""

from __future__ import annotations

from pathlib import Path

from nanoengine.text.chat_template import Message
from nanoinfer.server.page import PageAbout, PageTool
from nanorl.observability.store import open_for_reading
from nanorl.observability.trajectories.base import Trajectory, TrajectoryReader
from nanorl.observability.trajectories.run_parsers import find_parsers
from nanorl.options.run_kind import run_tokenizer
from nanorl.run.saved_models import SavedModels

LOOKED_AT = 16
"""Rollouts, the best: one that calls no tool does not show what tools are called."""


def page_about(saved: SavedModels, folder: Path) -> PageAbout:
    """The facts of the run that `saved` is of, whose model is in `folder`; of a plain model, and
    of a run without held-out rollouts, those of any chat."""
    if saved.run is None:
        return PageAbout()
    name = saved.run.run_dir.absolute().name
    found = _trajectories(saved, folder)
    if not found:
        return PageAbout(title=f"Chat with the agent of {name}")
    shown = next((one for one in found if _called(one)), found[0])
    messages = shown.sequences[0].chat.messages
    tools = _tools(found)
    return PageAbout(
        title=f"Chat with the agent of {name}",
        system=_first(messages, "system"),
        example=_first(messages, "user") or PageAbout().example,
        tools=tools,
        note=f"This page shows calls and runs none of them: nanorl chat {saved.name} does."
        if tools
        else "",
    )


def _trajectories(saved: SavedModels, folder: Path) -> list[Trajectory]:
    assert saved.run is not None, "asked before"
    file = saved.run.run_dir / "evaluations.sqlite"
    if not file.is_file():
        return []
    tokenizer = run_tokenizer(saved.run, folder)
    reader = TrajectoryReader(tokenizer, find_parsers(saved.run, tokenizer, lambda _: None))
    with open_for_reading(file) as store:
        entries, _ = store.page(order="best", limit=LOOKED_AT)
        # First those whose question stands alone: here there are no files to look into.
        entries.sort(key=lambda one: bool(getattr(store.task(one.task_id), "files", None)))
        return [
            reader.read(store.get(entry.rollout_id), step=0, phase="after") for entry in entries
        ]


def _tools(found: list[Trajectory]) -> tuple[PageTool, ...]:
    """The tools that the prompt lists; where it lists none, those that were called."""
    listed = [tool.get("function", tool) for tool in found[0].sequences[0].chat.tools]
    if listed:
        return tuple(
            PageTool(name=str(one.get("name", "")), description=str(one.get("description") or ""))
            for one in listed
        )
    names = dict.fromkeys(name for one in found for name in _called(one))
    return tuple(PageTool(name=name) for name in names)


def _called(trajectory: Trajectory) -> list[str]:
    """The names of the tools that one rollout called, in its own sequence."""
    return [call.name for turn in trajectory.sequences[0].turns for call in turn.calls]


def _first(messages: list[Message], role: str) -> str:
    texts = (str(one.get("content") or "") for one in messages if one["role"] == role)
    return next(texts, "").strip()
