"""A rollout as a few lines of plain text, for the log: what was asked, said, run and answered.

Left out: branches, numbers of single tokens and long texts in full (report.html, rollouts.sqlite).
"""

from __future__ import annotations

from nanorl.observability.report.trace import Decode
from nanorl.shown_pictures import known_pictures, shown_pictures, told
from nanorl.task import Task
from nanorl.types import Branch, Rollout, Status

MAX_CHARS = 400  # of one text


def transcript(task: Task, rollout: Rollout, decode: Decode, *, title: str) -> str:
    """`decode` should leave special tokens out."""
    lines = [f"{title}: {verdict(rollout)}", *_part("task", task.prompt_text)]
    lines += _part("sees", _opening_pictures(rollout.sequences[0], decode))
    histories = [branch for branch in rollout.branches if branch.is_history]
    beside = [branch for branch in rollout.branches if not branch.is_history]
    for branch in histories:
        lines += [f"    ({branch.title})", *_turns(branch, decode)]
    if histories:
        lines.append("    (after it)")
    lines += _turns(rollout.sequences[0], decode)
    for branch in beside:
        start = branch.turn_spans[0].action_start if branch.turn_spans else len(branch.tokens)
        asked = told(branch, 0, start, decode)[-MAX_CHARS:]  # the task stands at the end
        lines += [f"    ({branch.title})", *_part("asked", asked)]
        lines += _turns(branch, decode)
    return "\n".join([*lines, *_part("wanted", task.answer_text)])


def _turns(sequence: Branch, decode: Decode) -> list[str]:
    lines = []
    for span in sequence.turn_spans:
        lines += _part("agent", told(sequence, span.action_start, span.action_end, decode))
        lines += _part("tool", told(sequence, span.action_end, span.observation_end, decode))
    return lines


def _opening_pictures(sequence: Branch, decode: Decode) -> str:
    """A line for each picture that stands before the first turn."""
    spans = sequence.turn_spans
    end = spans[0].action_start if spans else len(sequence.tokens)
    shown = shown_pictures(sequence.images, known_pictures(decode))
    return "\n".join(one.line for one in shown if one.span.start < end)


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
