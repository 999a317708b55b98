"""Answers the calls of one turn: side by side, their results in the order of the calls.

A call that cannot be read, names no tool, or is wrong is answered with a line that begins with
"Error:", so the model can repair it. An `InfrastructureError` ends the others and propagates.
Left out: a limit on the number of calls (the parsers have one) and on the length of a result
(agents/tokens.py: only there is it known how many tokens a text has).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoinfer.chat.base import ToolCall, ToolCallError
from nanorl.envs.tools.base import Shown, Submitted, Tool, ToolContext, ToolError


@dataclass(frozen=True, kw_only=True)
class TurnResults:
    """The results of one turn's calls in their order, and what a tool handed in, if one did."""

    texts: list[str]
    submitted: Submitted | None = None
    num_malformed: int = 0
    """Calls that could not be read."""
    num_errors: int = 0
    """Calls that were read and ended with an error."""
    pictures: list[list[Any]] = field(default_factory=list)
    """Of each call; none at all where no call has any."""


async def answer_calls(
    calls: Sequence[ToolCall | ToolCallError], tools: Mapping[str, Tool], context: ToolContext
) -> TurnResults:
    """Run the calls of one turn at the same time. Of several submissions the first one counts."""
    tasks = [asyncio.ensure_future(_answer(call, tools, context)) for call in calls]
    try:
        # In the order of the calls, whoever was first: an observation does not depend on timing.
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # one of them failed, or the episode was cancelled
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    submitted = [answer for answer in answers if isinstance(answer, Submitted)]
    pictures = [one.pictures if isinstance(one, Shown) else [] for one in answers]
    return TurnResults(
        texts=[_text(answer) for answer in answers],
        submitted=submitted[0] if submitted else None,
        num_malformed=sum(isinstance(answer, ToolCallError) for answer in answers),
        num_errors=sum(isinstance(answer, ToolError) for answer in answers),
        pictures=pictures if any(pictures) else [],
    )


async def _answer(
    call: ToolCall | ToolCallError, tools: Mapping[str, Tool], context: ToolContext
) -> str | Shown | ToolCallError | ToolError | Submitted:
    if isinstance(call, ToolCallError):
        return call
    tool = tools.get(call.name)
    if tool is None:
        # An answer, no error of ours: the policy reads which tools there are and tries again.
        known = ", ".join(tools) or "none"
        return ToolError(f"there is no tool {call.name!r}; the tools are: {known}")
    try:
        return await tool.run(context, call.arguments)
    except (ToolError, Submitted) as end:
        return end


def _text(answer: str | Shown | ToolCallError | ToolError | Submitted) -> str:
    text = answer.answer or "" if isinstance(answer, Submitted) else str(answer)
    text = answer.text if isinstance(answer, Shown) else text
    if isinstance(answer, ToolCallError | ToolError):
        text = f"Error: {text}"
    return text.encode("utf-8", "replace").decode()  # half a surrogate pair has no tokens
