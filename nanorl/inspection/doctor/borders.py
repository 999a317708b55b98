"""Whether a run's own turns have borders: what its environment answers reaches the model.

An opening of the environment is answered as its episodes are, by a user and by results of its
tools, one and two, twice in a row. A template that refuses that, does not print it or does not say
where a turn ends would spoil every rollout.
Left out: whether a server renders the same (template_proof.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Described, ToolCall
from nanoinfer.chat.call_ids import as_results
from nanoinfer.params import Output
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.envs.base import Opening
from nanorl.observability.alarms.finding import Finding, Severity

_ROOM = Limits(max_turns=99, max_turn_tokens=1 << 20, max_context_tokens=1 << 22)
_ASKED: Sequence[Message] = ({"role": "user", "content": "What was 8304?"},)


def border_findings(
    tokenizer: ChatTokenizer, opening: Opening, tools: Sequence[Described], loop: str = "tool"
) -> list[Finding]:
    """Answers that would not reach the model where the agent is `loop`; one finding a cause."""
    found: dict[str, str] = {}
    for name, answer in _answers(opening, tools) if loop != "single_turn" else ():
        try:
            _play(tokenizer, opening, answer, _ASKED if loop == "compact" else ())
        except ValueError as error:
            found.setdefault(str(error), name)
    return [_finding(name, seen) for seen, name in found.items()]


def _answers(opening: Opening, tools: Sequence[Described]) -> Iterator[tuple[str, list[Message]]]:
    yield "what the environment says", [{"role": "user", "content": "It is 8301."}]
    if opening.parser is None or not tools:
        return
    call = ToolCall(tools[0].name)
    for name, texts in (
        ("the result of a call", ["It is 8302."]),
        ("results of two calls of one turn", ["It is 8302.", "It is 8303."]),
    ):
        yield name, as_results(opening.parser.observation(texts), [call] * len(texts))


def _play(
    tokenizer: ChatTokenizer,
    opening: Opening,
    answer: Sequence[Message],
    request: Sequence[Message],
) -> None:
    """`ValueError` where the template refuses the answer, or leaves a part of it out."""
    builder = TurnBuilder(tokenizer, _ROOM, task_id="", group_id="", rollout_id="")
    builder.start(opening.messages, opening.tools)
    ids = tokenizer.encode("Well.")
    output = Output(ids=ids, logps=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop")
    for _ in range(2):
        builder.append_action(output)
        start = builder.num_tokens
        builder.append_observation(answer, request)
        seen = tokenizer.decode(builder.prompt_ids[start:])
        for message in (*answer, *request):
            said = message["content"].strip()
            if said not in seen and json.dumps(said, ensure_ascii=False)[1:-1] not in seen:
                raise ValueError(
                    f"the chat template does not print a message of the role {message['role']!r}"
                )


def _finding(name: str, seen: str) -> Finding:
    return Finding(
        name="no_border",
        severity=Severity.ERROR,
        seen=f"{name}: {seen}",
        why="a rollout fails, or trains on tokens without what was answered",
        remedy="nanorl check --model FOLDER shows which line of the chat template does it",
    )
