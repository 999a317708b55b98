"""history.jsonl: how a run came to be, one line for each time it was begun, resumed or forked.

    {"event": "resumed", "at": "2026-11-22T17:00:00+00:00", "phase": "rl", "step": 7,
     "changes": {"rl.lr": [2e-05, 1e-05]}, "origin": "", "command": "nanorl train --resume ...",
     "reason": ""}

A run that failed and began again by itself (restarts.py) has an event "restarted" with the reason.
`step` counts the RL steps done by then: the changes hold from the next one on. A line torn by
`kill -9` is dropped by the reader. Left out: what the steps gave (metrics.jsonl).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

EventKind = Literal["begun", "resumed", "forked", "restarted"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """A start of the run.

    Event(event="forked", at="2026-11-22T17:00:00+00:00", phase="rl", step=7,
          changes={"seed": (0, 1)}, origin="runs/tiny-seed0@7", command="nanorl train --fork ...")
    """

    event: EventKind
    at: str  # ISO 8601
    phase: str
    step: int
    changes: dict[str, tuple[Any, Any]]  # option -> before, after
    origin: str  # of a fork: RUN@STEP
    command: str
    reason: str = ""  # of a restart: what the run had failed of


class RunHistory:
    """The file of one run's folder."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "history.jsonl"

    def append(self, event: Event) -> None:
        """Add it and sync it to the disk. Whoever begins a run starts the file anew: what a process
        left that died before is no run's."""
        mode = "a" if event.event in ("resumed", "restarted") else "w"
        text = json.dumps(asdict(event)) + "\n"
        if mode == "a" and self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
            text = "\n" + text  # after a torn line
        with open(self.path, mode, encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """The events in order, as JSON; [] of a run of 0.1.0, which kept none."""
        if not self.path.exists():
            return []
        found = []
        for line in self.path.read_text("utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:  # torn
                continue
        return found

    def chosen(self) -> list[dict[str, Any]]:
        """The events that somebody chose: all but restarts, whose process goes on with the same
        options."""
        return [event for event in self.read() if event["event"] != "restarted"]

    @property
    def is_fork(self) -> bool:
        """Say whether the run began as a fork."""
        events = self.read()
        return bool(events) and events[0]["event"] == "forked"

    @property
    def first_step(self) -> int:
        """The RL step that the run began with: a fork's is not 0."""
        return self.read()[0]["step"] if self.is_fork else 0

    def original(self, option: str, now: Any) -> Any:
        """The value that an option, which is `now`, had before the first recorded change of it."""
        changes = (event["changes"] for event in self.read())
        return next((change[option][0] for change in changes if option in change), now)
