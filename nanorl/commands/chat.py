"""`nanorl chat RUN`: a conversation in the terminal with the agent of a run, or with a model.

    nanorl chat runs/tiny-seed0
    nanorl chat runs/tiny-seed0 --say "What is 17 + 25?" /compare
    nanorl chat Qwen3-VL-2B-Instruct --image cat.png --say "What is on the mat?"

Tokens appear as they are sampled, the agent's programs really run, in the sandbox, and their output
is shown. Lines that begin with / are commands: /help. Ctrl-C stops a reply, Ctrl-D ends.
Next: chat_session.py (what happens in it).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What a chat begins with."""

    say: tuple[str, ...] = ()
    """Say these messages (or commands such as /compare), print the replies, and end."""
    image: tuple[Path, ...] = ()
    """Pictures (PNG; others with the extra vision) that the first message shows, to a model that
    sees."""


def chat(
    source: tyro.conf.Positional[str],
    /,
    first: Annotated[tyro.conf.OmitArgPrefixes[Beginning], tyro.conf.arg(name="")] = Beginning(),
    *,
    model: Literal["trained", "base"] = "trained",
    base: str | None = None,
    env: str = "",
    temperature: float = 0.0,
    max_tokens: int | None = None,
) -> None:
    """Talk to the agent of a run, its tools running, or to a model.

    Args:
        source: A run's folder, a Hugging Face folder, or a model's name.
        first: What it begins with; without messages, they are typed.
        model: Who answers at first: trained, or base, the model that the run began with.
        base: Another model to compare with, of the same tokenizer; default: the run's.
        env: The agent's environment, as --env of nanorl train, or code; default: the run's, and
            none for a model.
        temperature: 0 takes the likeliest token, as the evaluation does.
        max_tokens: The longest turn; default: the run's limit.
    """
    from nanorl.commands.chat_session import opened_session  # here: it imports torch

    with opened_session(
        source, base=base, env=env, temperature=temperature, max_tokens=max_tokens
    ) as session:
        session.choose(model)
        for file in first.image:
            session.image(str(file))
        for line in first.say or session.typed_lines():
            session.take(line, is_typed=not first.say)
