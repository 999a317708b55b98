"""Pairs of answers to the same prompt, of which somebody preferred one: the file of DPO and of
reward models.

    {"prompt": "Name a colour.", "chosen": "Blue.", "rejected": "Seven."}

A jsonl file has one such object a line. Told apart by their keys are the forms in which such files
are found:

- `prompt` is a text, or a list of messages; `messages` is another name for the latter.
- `chosen` and `rejected` are each a text, a message, or a list of messages that may go on with more
  turns. Where both begin alike and no prompt is given, the prompt is what they share (TRL's
  "implicit prompt").
- OpenAI's `input`, `preferred_output`, `non_preferred_output`, and ms-swift's `messages` that end
  with the chosen answer beside a `rejected_response`.
- `tools` may stand beside each.

A prompt that is a text is what the user says, and a text that answers it is the assistant's turn.
TRL reads such lines without a chat template; here every model is one that chats.
Left out: answers that are rated instead of compared, more than two of them, ShareGPT's "from".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.text.chat_template import Message

MOST_NAMED = 5
"""So many bad lines are named in an error."""


@dataclass(frozen=True)
class Preference:
    """A prompt and two answers, as messages; `chosen` is the better of the two."""

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None = None


def read_preferences(path: Path | str) -> Iterator[tuple[int, Preference | ValueError]]:
    """The number of each line that is not empty, with its pair, or what is wrong with it.
    `ValueError` if there is no such file."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"preferences={str(path)!r}: no such file; give a jsonl file of pairs")
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, preference_of(json.loads(line))
                except ValueError as error:
                    yield number, error


def bad_lines(file: Path, problems: Mapping[int, ValueError]) -> ValueError:
    """An error with a line for each of the bad lines, if they are few."""
    named = [f"{file}, line {number}: {why}" for number, why in problems.items()]
    rest = len(named) - MOST_NAMED
    return ValueError("\n".join(named[:MOST_NAMED] + [f"and {rest} more lines"] * (rest > 0)))


def preference_of(fields: object) -> Preference:
    """Read what a line says. `ValueError` names the key and the rule."""
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, not a {type(fields).__name__}")
    fields = _usual_keys(fields)
    for name in ("chosen", "rejected"):
        if name not in fields:
            raise ValueError(f'no "{name}": expected "prompt", "chosen" and "rejected"')
    prompt, chosen, rejected = _parted(fields)
    if not prompt:
        raise ValueError('no "prompt", and "chosen" and "rejected" do not begin alike')
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise ValueError(f"{name}: no message of role 'assistant' after the prompt")
    if chosen == rejected:
        raise ValueError("chosen and rejected are the same, so neither is preferred")
    return Preference(prompt, chosen, rejected, _tools(fields.get("tools")))


def _usual_keys(fields: dict[str, Any]) -> dict[str, Any]:
    """The same under "prompt", "chosen" and "rejected"."""
    if isinstance(given := fields.get("input"), dict) and "preferred_output" in fields:
        return {
            "prompt": given.get("messages"),
            "tools": given.get("tools"),
            "chosen": fields["preferred_output"],
            "rejected": fields.get("non_preferred_output"),
        }
    said = fields.get("messages")
    if "rejected_response" in fields and isinstance(said, list):
        both = {"chosen": said[-1:], "rejected": fields["rejected_response"]}
        return fields | {"prompt": said[:-1]} | both
    if "prompt" not in fields and "chosen" in fields and said is not None:
        return fields | {"prompt": said}
    return fields


def _parted(fields: Mapping[str, Any]) -> tuple[list[Message], list[Message], list[Message]]:
    """The prompt and what answers it."""
    prompt, chosen, rejected = fields.get("prompt"), fields["chosen"], fields["rejected"]
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        size = _shared_text(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
    first = _messages("prompt", prompt, "user") if prompt else []
    answers = _messages("chosen", chosen), _messages("rejected", rejected)
    if isinstance(prompt, str) and answers[0][0]["role"] != "assistant":  # whole chats, beside it
        size = _num_shared(*answers)
        if not any(message.get("content") == prompt for message in answers[0][:size]):
            raise ValueError("prompt: is not what the user says in both chosen and rejected")
        first = answers[0][:size]
    elif not first:
        first = answers[0][: _num_shared(*answers)]
    if all(answer[: len(first)] == first for answer in answers):
        answers = answers[0][len(first) :], answers[1][len(first) :]
    return first, *answers


def _messages(name: str, value: Any, role: str = "assistant") -> list[Message]:
    """A text, a message or a list of them as a list."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"{name}: is empty")
        return [{"role": role, "content": value}]
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not found:
        raise ValueError(f"{name}: expected a text or messages, found {json.dumps(value)[:40]}")
    for message in found:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str)):
            raise ValueError(f'{name}: a message is an object with a "role" and a "content"')
    return found


def _num_shared(a: Sequence[Message], b: Sequence[Message]) -> int:
    """The number of leading messages that both have."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _shared_text(a: str, b: str) -> int:
    """The length of what both texts begin with; a blank before they part is the answers', as in
    TRL."""
    shorter = min(len(a), len(b))
    size = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    return size - 1 if size and a[size - 1] == " " else size


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools, which some files have as JSON inside of JSON."""
    if isinstance(value, str):
        value = json.loads(value)
    if value is not None and not isinstance(value, list):
        raise ValueError("tools: expected a list of tools")
    return value or None
