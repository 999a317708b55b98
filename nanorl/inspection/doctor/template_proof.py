"""The proof of a model folder: what is sampled is what is trained is what is served.

Each of conversations.py is played through a rollout's own `TurnBuilder`, the policy saying what the
template writes in its place (or what our parsers write, where it writes nothing of the kind). After
every turn the rollout's tokens must be those that a server encodes for the same conversation, sent
by a client, and those of `transformers`, where it is installed. The mask must hold what was said,
calls must be read back, and every message must be in the tokens. Where it is not so, the line of
the template is named.
Left out: weights, and what a model makes of its tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from nanoengine.text.chat_template import Message, line_of, with_json_arguments
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.call_ids import SPEAKERS, as_results
from nanoinfer.chat.choose import client_tool_chat
from nanoinfer.chat.form import ChatForm
from nanoinfer.chat.turns import ids_after_turn
from nanoinfer.params import Output
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.inspection.doctor.conversations import TOOL, ProofChat, conversations
from nanorl.inspection.doctor.template_trace import shown_line, trace
from nanorl.observability.alarms.finding import Finding, Severity

Outcome = Literal["exact", "differs", "unserved", "refused", "wrong"]
"""`differs`: the rollout is as it was sampled, and the server renders the conversation in another
way. `unserved`: only the server's is refused by the template, or the parser has no form for such a
turn. `refused`: the rollout's is, too. `wrong`: a rollout would lack or spoil something."""

Encode = Callable[[Sequence[Message], Sequence[dict[str, Any]] | None], list[int]]
_ROOM = Limits(max_turns=99, max_turn_tokens=1 << 20, max_context_tokens=1 << 22)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The outcome of one conversation."""

    name: str
    outcome: Outcome
    where: str = ""
    """What was seen, and the line of the template."""
    is_needed: bool = True
    has_peer: bool = False
    """`transformers` encoded the same prompts; what it made of them is part of the outcome."""

    @property
    def severity(self) -> Severity | None:
        """None: all is well."""
        if self.outcome == "exact":
            return None
        is_broken = self.outcome == "wrong" or (self.outcome == "refused" and self.is_needed)
        return Severity.ERROR if is_broken else Severity.WARNING


class _BrokenTurnError(Exception):
    """The conversation ends here; its outcome and what was seen."""

    def __init__(self, outcome: Outcome, where: str) -> None:
        super().__init__(where)
        self.outcome = outcome


def prove(tokenizer: ChatTokenizer) -> list[Proof]:
    """Play each conversation with this tokenizer and its chat templates; returns the outcomes."""
    peer = _peer(tokenizer)
    return [prove_one(tokenizer, one, peer) for one in conversations()]


def prove_one(
    tokenizer: ChatTokenizer, conversation: ProofChat, peer: Encode | None = None
) -> Proof:
    """Play one conversation and return what came of it; `peer` encodes a prompt in another
    implementation."""
    outcome: Outcome = "exact"
    where = ""
    try:
        _Play(tokenizer, conversation, peer).run()
    except _BrokenTurnError as broken:
        outcome, where = broken.outcome, str(broken)
    return Proof(
        name=conversation.name,
        outcome=outcome,
        where=where,
        is_needed=conversation.is_needed,
        has_peer=peer is not None,
    )


def proof_findings(proofs: Sequence[Proof]) -> list[Finding]:
    """One finding for each line of the template that breaks something."""
    found: dict[tuple[Severity, str], list[Proof]] = {}
    for proof in proofs:
        if proof.severity is not None:
            found.setdefault((proof.severity, proof.where), []).append(proof)
    return [_finding(severity, some) for (severity, _), some in found.items()]


def _finding(severity: Severity, proofs: Sequence[Proof]) -> Finding:
    names = ", ".join(repr(one.name) for one in proofs)
    is_error = severity is Severity.ERROR
    return Finding(
        name="template_breaks_turns" if is_error else "template_rewrites",
        severity=severity,
        seen=f"{names}: {proofs[0].where}",
        why="an agent cannot be trained on such turns"
        if is_error
        else "there the served prompt is not the one that was trained on",
        remedy="mend that line in the folder's chat template, or take the model's newer files"
        if is_error
        else "nothing, where your agent has no such conversations; else mend that line",
    )


class _Play:
    """One conversation on its way through a rollout and a server."""

    def __init__(
        self, tokenizer: ChatTokenizer, conversation: ProofChat, peer: Encode | None
    ) -> None:
        self.tokenizer, self.messages, self._peer = tokenizer, conversation.messages, peer
        specs = [TOOL] if conversation.has_tools else []
        self.form = ChatForm.of(tokenizer, specs)
        self.chat = client_tool_chat(tokenizer, specs) if specs else None
        self.builder = TurnBuilder(tokenizer, _ROOM, task_id="", group_id="", rollout_id="")
        self._is_ours = False
        """The last turn is said as our parser writes it, not as the template does."""

    def run(self) -> None:
        turns = [n for n, one in enumerate(self.messages) if one["role"] == "assistant"]
        opening = self.messages[: turns[0]]
        try:
            self.builder.start(self._opened(opening), self.chat.schemas if self.chat else None)
        except ValueError as error:
            raise _BrokenTurnError("refused", _refusal(self.tokenizer, error)) from None
        self._compare(opening, self.served(opening))
        for turn, end in zip(turns, [*turns[1:], len(self.messages)], strict=True):
            self._turn(turn, end)

    def served(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a server."""
        try:
            ids = self.tokenizer.encode_chat(
                self.form.opening(messages), add_generation_prompt=True, tools=self.form.schemas
            )
        except ValueError as error:
            raise _BrokenTurnError("unserved", _refusal(self.tokenizer, error)) from None
        if self._peer is not None and ids != self._peer(
            self.form.opening(messages), self.form.schemas
        ):
            raise _BrokenTurnError(
                "wrong", "transformers encodes the same conversation in another way"
            )
        return ids

    def _opened(self, messages: Sequence[Message]) -> list[Message]:
        """As an environment opens with them (nanorl/envs/env_episode.py)."""
        first, *rest = messages
        own = first["content"] if first["role"] == "system" else ""
        system = self.chat.system(own) if self.chat else own
        rest = rest if first["role"] == "system" else [first, *rest]
        return [{"role": "system", "content": system}, *rest] if system else rest

    def _turn(self, place: int, end: int) -> None:
        """The assistant's turn at `place`, and what answers it up to `end`."""
        turn, answer = self.messages[place], self.messages[place + 1 : end]
        calls = [_read(one) for one in turn.get("tool_calls", ())]
        before = self.builder.prompt_ids
        said = self._said(place, end)
        self.builder.append_action(_output(said))
        if self.chat is not None:
            calls = self._read_back(calls)
        try:
            self.builder.append_observation(self._brought(answer, calls))
        except ValueError as error:
            raise _BrokenTurnError("refused", _refusal(self.tokenizer, error)) from None
        self._check_mask(before, said)
        self._check_contents(answer, len(before) + len(said))
        self._compare(self.messages[:end], self.served(self.messages[:end]))

    def _said(self, place: int, end: int) -> list[int]:
        """The ids that the policy says: what stands in the place of the turn in the served prompt,
        if that is how the rollout goes on; else the turn in words, and its end."""
        turn = self.messages[place]
        self._is_ours = True
        try:
            after, whole = self._after(place, end), self.served(self.messages[:end])
        except (ValueError, _BrokenTurnError):  # the server's; said when the rollout has gone on
            return [*self._words(turn), min(self.tokenizer.eos_ids)]
        before = self.builder.prompt_ids
        middle = whole[len(before) : len(whole) - len(after)]
        is_grown = whole[: len(before)] == before and whole[len(whole) - len(after) :] == after
        text = self.tokenizer.decode(middle)
        if is_grown and all(one in text for one in (turn["content"], _thought(turn))):
            self._is_ours = False
            return [*middle, after[0]]
        return [*self._words(turn), after[0]]

    def _after(self, place: int, end: int) -> list[int]:
        """The ids that stand behind the turn at `place` in the served prompt, its end first."""
        whole = self.form.opening(self.messages[:end])
        answer = len(self.form.written(self.messages[place + 1 : end]))
        split = len(whole) - answer
        return ids_after_turn(
            self.tokenizer, None, whole[:split], whole[split:], tools=self.form.schemas
        ).ids

    def _words(self, turn: Message) -> list[int]:
        """The turn as our parser writes it."""
        thought = turn.get("reasoning_content")
        opened = self.tokenizer.decode(self.builder.prompt_ids).rstrip().endswith("<think>")
        opening = "" if opened else "<think>\n"
        head = "" if thought is None else f"{opening}{thought}\n</think>\n\n"
        parser = self.form.parser
        calls = [parser.write(_read(one)) for one in turn.get("tool_calls", ())]
        said = head + "\n".join(part for part in (turn["content"], *calls) if part)
        return self.tokenizer.encode(said, allow_special=True)

    def _brought(self, answer: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
        """As an environment brings results (nanorl/envs/env_episode.py)."""
        results = [one["content"] for one in answer if one["role"] not in SPEAKERS]
        others = [one for one in answer if one["role"] in SPEAKERS]
        if not results:
            return others
        return [*as_results(self.form.parser.observation(results), calls), *others]

    def _read_back(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """The calls of the last turn as the parser reads them, with ids that the model wrote."""
        parser, text = self.form.parser, self.builder.action_text()
        found = parser.read(text)
        if found == list(calls):
            return [one for one in found if isinstance(one, ToolCall)]
        if self._is_ours:
            raise _BrokenTurnError(
                "unserved",
                f"the parser {parser.name!r} does not read back what it writes, {text!r}",
            )
        errors = [str(one) for one in found if isinstance(one, ToolCallError)]
        raise _BrokenTurnError(
            "wrong",
            f"the parser {parser.name!r} reads {errors or found} in what the template writes, "
            f"{text!r}",
        )

    def _check_mask(self, before: Sequence[int], said: Sequence[int]) -> None:
        """The last action and nothing else of this turn is trained."""
        rollout = self.builder.close(0.0)
        start, end = len(before), len(before) + len(said)
        span, mask = rollout.turn_spans[-1], rollout.loss_mask[start:]
        is_right = rollout.tokens[start : span.action_end] == list(said)[: span.action_end - start]
        if not is_right or sum(mask) != span.action_end - start or end - span.action_end > 1:
            raise _BrokenTurnError("wrong", "the mask does not hold what was said")

    def _check_contents(self, answer: Sequence[Message], start: int) -> None:
        text = self.tokenizer.decode(self.builder.prompt_ids[start:])
        for message in answer:
            content = message["content"].strip()
            if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
                raise _BrokenTurnError(
                    "wrong", f"a message of the role {message['role']!r} is not in the tokens"
                )

    def _compare(self, messages: Sequence[Message], served: Sequence[int]) -> None:
        trained = self.builder.prompt_ids
        if trained == list(served):
            return
        same = next(
            (n for n, pair in enumerate(zip(trained, served, strict=False)) if pair[0] != pair[1]),
            min(len(trained), len(served)),
        )
        traced = trace(
            self.tokenizer,
            self.form.opening(messages),
            add_generation_prompt=True,
            tools=self.form.schemas,
        )
        place = _place_of(self.tokenizer, traced.text, same)
        ours = self.tokenizer.decode(trained[same : same + 24])[:24]
        theirs = traced.text[place : place + 24]
        seen = f"prints {theirs!r} where the rollout has {ours!r}"
        if self.tokenizer.decode(trained) == traced.text:
            seen = f"joins what was said to {theirs!r}: the same text, in other tokens"
        raise _BrokenTurnError("differs", f"{traced.at(place)} {seen}")


def _read(call: Message) -> ToolCall:
    return ToolCall(call["function"]["name"], call["function"]["arguments"])


def _output(ids: list[int]) -> Output:
    return Output(ids=ids, logps=[0.0] * len(ids), versions=[0] * len(ids), finish_reason="stop")


def _thought(turn: Message) -> str:
    return turn.get("reasoning_content") or ""


def _place_of(tokenizer: ChatTokenizer, text: str, num_tokens: int) -> int:
    """The place in `text` behind that many tokens. A control token is cut nowhere."""
    controls = sorted((tokenizer.decode([one]) for one in tokenizer.control_ids), key=len)
    pattern = re.compile("|".join(re.escape(one) for one in reversed(controls)) or "(?!)")
    inside = {n for one in pattern.finditer(text) for n in range(one.start() + 1, one.end())}
    ends = [n for n in range(len(text) + 1) if n not in inside]
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if len(tokenizer.encode(text[: ends[middle]], allow_special=True)) > num_tokens:
            high = middle
        else:
            low = middle + 1
    return ends[max(low - 1, 0)]


def _refusal(tokenizer: ChatTokenizer, error: ValueError) -> str:
    """Say what was refused, with the text of the template's line."""
    number = None if error.__cause__ is None else line_of(error.__cause__)
    if number is None or tokenizer.templates is None:
        return str(error)
    reason = re.sub(r" \(line \d+ of the template\)$", "", str(error))
    sources = tokenizer.templates.sources.values()
    shown = {shown_line(source.splitlines(), number) for source in sources} - {""}
    return f"{reason}; line {number}: {' or '.join(sorted(shown))}"


def _peer(tokenizer: ChatTokenizer) -> Encode | None:
    """`apply_chat_template` of transformers over the same files; None where it is not installed."""
    if find_spec("transformers") is None or tokenizer.templates is None:
        return None
    from tokenizers import Tokenizer  # here: only a comparison with transformers needs it
    from transformers import PreTrainedTokenizerFast  # here: may be missing

    templates = tokenizer.templates
    sources = templates.sources
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_json()),
        chat_template=next(iter(sources.values())) if len(sources) == 1 else sources,
        **templates.variables,
    )

    def rendered(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> str:
        text = theirs.apply_chat_template(
            [dict(one) for one in messages],
            tools=list(tools) if tools is not None else None,
            add_generation_prompt=True,
            tokenize=False,
            **tokenizer.variables,
        )
        assert isinstance(text, str), "tokenize=False"
        return text

    def encode(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[int]:
        try:
            text = rendered(messages, tools)
        except TypeError:  # DeepSeek's: clients of transformers give arguments as text
            text = rendered([with_json_arguments(one) for one in messages], tools)
        ids: list[int] = theirs(text, add_special_tokens=False)["input_ids"]
        return ids

    return encode
