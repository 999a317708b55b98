"""Between two turns of a chat: the tokens that a template puts behind what the assistant said.

A turn is never encoded again: what was sampled stays as it is, and what follows is appended. What
follows is cut out of the real conversation, rendered with a mark in the place of the turn's text:
behind the mark stand what ends the turn and then the new messages. Turns between the opening and
this one are left out: rendering them all again each time would cost more than a small model does.
Three facts of real templates make that more than a search for an end-of-turn token:

    a call is printed behind the content        so the mark also stands in the call's arguments
    GLM-4 ends a turn with the next role's token     so one of another role is replaced
    gpt-oss samples `<|return|>`, reads `<|end|>`    so the end is replaced by one that is no eos id

Messages that the template does not print, and ends that cannot be told, are errors: nothing that
was said to a model is left out without a word.
Left out: a template that rewrites what lies further back, such as one that drops old reasoning; one
sequence cannot follow it (nanorl/agents/tokens.py).
"""

from __future__ import annotations

import copy
import marshal
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.call_ids import SPEAKERS, with_ids

_MOST_CONVERSATIONS = 256  # that a tokenizer remembers


class AfterTurn(NamedTuple):
    """The ids that follow what the assistant sampled."""

    ids: list[int]
    replaces_end: bool = False
    """They begin with another end than the sampled one, which has to go."""


def answered_turn(
    history: Sequence[Message], new: Sequence[Message]
) -> tuple[Message, list[Message]]:
    """The assistant's turn to which `new` messages answer, without its text: as many calls as they
    bring results, so that a template finds the call of each; and `new` with the calls' ids."""
    told = with_ids(new, history)
    results = [message for message in told if message["role"] not in SPEAKERS]
    turn: dict[str, Any] = {"role": "assistant", "content": "ok"}
    if results:
        turn["tool_calls"] = [
            {
                "id": result["tool_call_id"],
                "type": "function",
                "function": {"name": result.get("name") or "tool", "arguments": {}},
            }
            for result in results
        ]
    return turn, told


def ids_after_turn(
    tokenizer: ChatTokenizer,
    last_id: int | None,
    history: Sequence[Message],
    new: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> AfterTurn:
    """The tokens to append to a turn: its end, where it has none of its own, then the `new`
    messages and all else up to the next turn of the assistant.

    `history` ends with the assistant's message; `last_id` is the last token of that turn, None for
    an empty one. `tools` and `variables` are those that the conversation opened with. `ValueError`
    if the template refuses the conversation, does not print all of it, or does not say where a turn
    ends.
    """
    opening = takewhile(lambda message: message["role"] != "assistant", history)
    shapes = [{**message, "content": ""} for message in new]
    marked = _marked(tokenizer, ([*opening, history[-1]], shapes, tools, variables))
    end, ids = marked.end, marked.ids(new)
    if ids[: end + 1] != marked.between[: end + 1]:
        raise ValueError(
            f"the chat template does not print an empty message of the role {new[0]['role']!r}"
        )
    if last_id == ids[end]:
        return AfterTurn(ids[end + 1 :])
    if last_id not in tokenizer.eos_ids:
        return AfterTurn(ids[end:])
    # Another end was sampled. Where the template writes a history with another token than the one
    # that is sampled, or one that opens the next message and says who speaks there, it is that one;
    # any other, such as `<|endoftext|>`, ends a turn as well.
    is_own = ids[end] in tokenizer.eos_ids and ids[end] in marked.closed
    return AfterTurn(ids[end + 1 :]) if is_own else AfterTurn(ids[end:], True)


def _renamed_end(tokenizer: ChatTokenizer, between: list[int], closed: list[int]) -> int:
    """The place of a turn's end that is not among the eos ids: what stands where the last turn of
    a finished chat has one of them."""
    place = _first(closed, tokenizer.eos_ids)
    is_alike = place is not None and between[:place] == closed[:place] and place < len(between)
    if place is not None and is_alike and between[place] in tokenizer.control_ids:
        return place
    raise ValueError(
        "the chat template ends an assistant's turn with none of the eos ids "
        f"{sorted(tokenizer.eos_ids)}: add its end-of-turn token to generation_config.json"
    )


def _first(ids: Sequence[int], wanted: frozenset[int]) -> int | None:
    return next((place for place, token in enumerate(ids) if token in wanted), None)


def _marked(tokenizer: ChatTokenizer, asked: Any) -> _Marked:
    """The conversation, made once for all that differ in what they are answered alone: the rollouts
    of a group, and their turns. `asked` is what `_Marked` takes."""
    known = tokenizer.conversations
    try:
        key = marshal.dumps(asked, 2)  # equal for equal values of equal types
        marked: _Marked = known.get(key) or _Marked(tokenizer, *copy.deepcopy(asked))
    except (ValueError, RecursionError):  # somebody's own class, deeply nested, or refused
        return _Marked(tokenizer, *asked)
    if key not in known:
        if len(known) >= _MOST_CONVERSATIONS:
            known.clear()
        known[key] = marked
    return marked


class _Marked:
    """A conversation with a mark in the place of what the assistant said last. `shapes` are the
    messages that answer it, without their contents."""

    def __init__(
        self, tokenizer: ChatTokenizer, history: Any, shapes: Any, tools: Any, variables: Any
    ) -> None:
        self._tokenizer, self._shapes = tokenizer, shapes
        self._tools, self._variables = tools, variables
        self._secret = secrets.token_hex(8)  # nobody can have written it
        self._mark = f"x{self._secret}x"
        *opening, turn = history
        self._history = [*opening, _with_mark(turn, self._mark)]
        if turn.get("tool_calls") and self._mark not in self._rendered([])[0]:
            # The template prints no calls.
            self._history[-1] = {**self._history[-1], "content": self._mark}

    @cached_property
    def between(self) -> list[int]:
        """The tokens between the mark and the content of the first message that answers."""
        marks = [f"x{self._secret}{place}x" for place in range(len(self._shapes))]
        told = [{**one, "content": mark} for one, mark in zip(self._shapes, marks, strict=True)]
        text, masks = self._rendered(told)
        for message in told:
            if message["content"] not in text:
                raise ValueError(
                    f"the chat template does not print a message of the role {message['role']!r} "
                    "that follows an assistant's turn"
                )
        return self._tokenizer.encode_rendered(self._behind(text.partition(marks[0])[0]), masks)

    @cached_property
    def closed(self) -> list[int]:
        """The tokens behind the mark in a chat that is finished."""
        return self.ids([])

    @cached_property
    def end(self) -> int:
        """The place of the turn's end in `between`."""
        end = _first(self.between, self._tokenizer.eos_ids)
        return _renamed_end(self._tokenizer, self.between, self.closed) if end is None else end

    def ids(self, new: Sequence[Message]) -> list[int]:
        """The tokens behind the mark: up to the next turn, or without `new` messages to the end of
        the finished chat."""
        text, masks = self._rendered(new)
        return self._tokenizer.encode_rendered(self._behind(text), masks)

    def _rendered(self, new: Sequence[Message]) -> tuple[str, dict[str, str]]:
        try:
            return self._render(new)
        except ValueError:  # Llama's template takes one call a turn, and any number of results
            if all(len(one.get("tool_calls") or ()) < 2 for one in self._history):
                raise
            self._history = [_with_last_call(message) for message in self._history]
            return self._render(new)

    def _render(self, new: Sequence[Message]) -> tuple[str, dict[str, str]]:
        return self._tokenizer.render_masked(
            [*self._history, *new],
            add_generation_prompt=bool(new),
            tools=self._tools,
            variables=self._variables,
        )

    def _behind(self, text: str) -> str:
        _, mark, rest = text.rpartition(self._mark)
        if not mark:
            raise ValueError("the chat template does not print what the assistant says")
        return rest


def _with_last_call(message: Message) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": calls[-1:]} if calls else message


def _with_mark(turn: Message, mark: str) -> Message:
    calls = turn.get("tool_calls")
    if not calls:
        return {**turn, "content": mark}
    *others, last = calls
    function = last["function"]
    given = function.get("arguments")
    names = list(given) if isinstance(given, Mapping) and given else ["x"]
    function = {**function, "arguments": dict.fromkeys(names, mark)}
    return {**turn, "tool_calls": [*others, {**last, "function": function}]}
