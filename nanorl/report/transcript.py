"""A rollout as a few lines of plain text, for the log: what was asked, said, run and answered.

Left out: branches, numbers of single tokens and long texts in full (report.html, rollouts.sqlite).
"""

from __future__ import annotations

from nanorl.report.trace import Decode
from nanorl.types import Rollout, Status, Task

MAX_CHARS = 400  # of one text


def transcript(task: Task, rollout: Rollout, decode: Decode, *, title: str) -> str:
    """`decode` should leave special tokens out."""
    lines = [f"{title}: {verdict(rollout)}", *_part("task", task.prompt_text)]
    for span in rollout.turn_spans:
        lines += _part("agent", decode(rollout.tokens[span.action_start : span.action_end]))
        lines += _part("tool", decode(rollout.tokens[span.action_end : span.observation_end]))
    return "\n".join([*lines, *_part("wanted", task.answer_text)])


def verdict(rollout: Rollout) -> str:
    """`right`, `wrong`, or why there was no answer."""
    if rollout.status is Status.FINISHED:
        return "right" if rollout.is_success else "wrong"
    return {
        Status.TRUNCATED_TURN: "cut off, a turn was too long",
        Status.TRUNCATED_CONTEXT: "cut off, too many turns or tokens",
        Status.FAILED: "failed, the machine's doing",
    }[rollout.status]


def _part(role: str, text: str) -> list[str]:
    text = text.strip()
    if not text:
        return []
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]} ... ({len(text) - MAX_CHARS} characters more)"
    first, *rest = text.split("\n")
    return [f"    {role:<7} {first}", *(f"            {line}" for line in rest)]
