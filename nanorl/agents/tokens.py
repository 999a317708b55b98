"""`TurnBuilder`: the tokens of one rollout, from the ids that the engine sampled.

Tokens in, tokens out. Assistant text is never encoded again: the sampled ids are appended as they
are, with their log-probs and policy versions. Only observations are encoded, as what the template
puts behind a turn (nanoinfer/chat/turns.py). Everything is append-only: the prompt of every
turn extends the ids already held, so the engine's prefix cache and the trainer's replay both agree.

Reasoning: a template such as Qwen3's shows a model its `<think>` blocks while it calls tools, and
strips them from all turns before the last message of a user. One sequence cannot do that and stay
append-only, so what was sampled stays in the context in which the rest was sampled and is trained.
Left out: a loop that wants history rewritten, which begins a second builder (episode.py).

    tokens      prompt | action | (EOS) template observation template | action | ...
    loss_mask   0      | 1      | 0                                   | 1      | ...
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Literal

from nanoengine.spans import ImageSpan
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.reasoning import TAIL, opened_reasoning
from nanoinfer.chat.turns import AfterTurn, answered_turn, ids_after_turn
from nanoinfer.params import Output
from nanorl.agents.limits import Limits
from nanorl.types import Branch, Rollout, Status, TurnSpan

Truncation = Literal["turn", "context", "response"]

OPENING: tuple[Message, ...] = ({"role": "user", "content": "a"},)

WITH_TEXT = "nanorl.envs.images:with_text"
BROKEN_BY = "nanorl.agents.picture_limits:broken_by"
CUT_MARK = "\n...\n"
CHARS_PER_TOKEN = 16
"""More than a token has on average in whatever a program prints, runs of blanks aside."""


class PromptTooLongError(ValueError):
    """The opening of a context leaves no room for a single token."""


class TurnBuilder:
    """Grows one token sequence: `start`, then `append_action` and `append_observation` in turn."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        limits: Limits,
        *,
        task_id: str,
        group_id: str,
        rollout_id: str,
    ) -> None:
        self.limits = limits
        self.truncation: Truncation | None = None
        self.spans: list[TurnSpan] = []
        self.metrics: defaultdict[str, float] = defaultdict(float)
        self._ids = (task_id, group_id, rollout_id)
        self._tokenizer = tokenizer
        self._messages: list[Message] = []  # a turn's text is not in them: its tokens are
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._logps: list[float] = []
        self._versions: list[int] = []
        self.images: list[ImageSpan] = []
        self._is_aborted = False
        self._turn_rewards: list[float] = []
        self._turn_metrics: list[dict[str, float]] = []

    @property
    def prompt_ids(self) -> list[int]:
        """The ids that the engine is given for the next turn: everything so far (a copy)."""
        return list(self._tokens)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    @property
    def num_turns(self) -> int:
        return len(self.spans)

    @property
    def num_action_tokens(self) -> int:
        return sum(self._mask)

    def start(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Encode the opening chat, with the schemas of the `tools` that the template lists.

        `PromptTooLongError` where it leaves no room for a single token.
        """
        assert not self._tokens, "start() is called once"
        self._messages, self._tools = list(messages), tools
        ids = self._tokenizer.encode_chat(messages, add_generation_prompt=True, tools=tools)
        if len(ids) >= self.limits.max_context_tokens:
            raise PromptTooLongError(
                f"task {self._ids[0]!r}: its prompt has {len(ids)} tokens, max_context_tokens is "
                f"{self.limits.max_context_tokens}: raise the limit or drop the task"
            )
        images = self._tokenizer.images_in(ids, messages, 0)
        if broken := self._broken_by(images):
            raise PromptTooLongError(
                f"task {self._ids[0]!r}: its prompt shows {broken}: raise it or drop the task"
            )
        self.images += images
        # With mask 0: nobody sampled the prompt, so nothing is learnt of it.
        self._append_fixed(ids)

    def room(self) -> tuple[int, Truncation]:
        """Tokens that the next output may have, and which limit it would hit first."""
        rooms: list[tuple[int, Truncation]] = [(self._turn_room(), "turn")]
        if self.limits.max_response_tokens is not None:
            rooms.append((self.limits.max_response_tokens - self.num_action_tokens, "response"))
        rooms.append((self.limits.max_context_tokens - len(self._tokens), "context"))
        # The first of equal rooms is named, so a turn's own limit wins over the context's.
        size, kind = min(rooms, key=lambda room: room[0])
        return max(size, 0), kind

    def append_action(self, output: Output) -> None:
        """Append what the engine sampled; after an aborted output, to that output's turn."""
        ids = output.ids
        assert len(ids) == len(output.logps) == len(output.versions), (
            f"an output of {len(ids)} ids has {len(output.logps)} logps and "
            f"{len(output.versions)} versions"
        )
        _, limit = self.room()
        # An aborted output is the first piece of a turn, so the next one belongs to its span.
        start = self.spans.pop().action_start if self._is_aborted else len(self._tokens)
        self._tokens += ids
        self._mask += [1] * len(ids)
        self._logps += output.logps
        self._versions += output.versions
        num_old = sum(a != b for a, b in zip(output.cache_versions, output.versions, strict=False))
        if num_old:  # of in_flight=keep: sampled over keys and values of an older version
            self.metrics["old_cache_tokens"] += num_old
        end = len(self._tokens)
        self.spans.append(TurnSpan(action_start=start, action_end=end, observation_end=end))
        self._is_aborted = output.finish_reason == "abort"
        self.truncation = limit if output.finish_reason == "length" else None

    def action_ids(self) -> list[int]:
        """The last action without its end-of-turn token: what a parser reads."""
        span = self.spans[-1]
        ids = self._tokens[span.action_start : span.action_end]
        return ids[:-1] if ids and ids[-1] in self._tokenizer.eos_ids else ids

    def action_text(self) -> str:
        """The last action, behind the mark of reasoning that its prompt has opened, if it has: what
        was only thought is told from what was said."""
        start = self.spans[-1].action_start
        opened = opened_reasoning(self._tokenizer, self._tokens[max(0, start - TAIL) : start])
        return opened + self._tokenizer.decode(self.action_ids())

    @property
    def is_parseable(self) -> bool:
        """True if the last action ended by itself: cut-off text is never parsed for tool calls."""
        return bool(self.spans) and self.truncation is None and not self._is_aborted

    def append_observation(
        self, messages: Sequence[Message], request: Sequence[Message] = ()
    ) -> bool:
        """Append the answer to the last action; False (nothing appended) where it does not fit.

        `messages` are shortened to the limit of an observation, what follows as `request` is not.
        An action without an end-of-turn token gets one with mask 0: the policy did not sample it.
        """
        assert self.spans and not self._is_aborted, "an observation answers a finished action"
        said = [self._shorten(one) for one in messages]
        history, after = self._answered(said, request)
        delta = after.ids
        new = history[len(self._messages) + 1 :]  # behind the turn
        images = self._tokenizer.images_in(delta, new, len(self._tokens) - after.replaces_end)
        # All or nothing: a policy that read half an observation would learn to answer it.
        is_long = len(self._tokens) + len(delta) >= self.limits.max_context_tokens
        if is_long or self._broken_by(images):
            self.truncation = "context"
            return False
        if after.replaces_end:
            self._take_end_back()
        self.images += images
        self._append_fixed(delta)
        self._messages = history
        last = self.spans[-1]
        self.spans[-1] = TurnSpan(
            action_start=last.action_start,
            action_end=last.action_end,
            observation_end=len(self._tokens),
        )
        return True

    def note(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Record the environment's reward for the last action; metrics of the turns add up."""
        # Turns that nobody rewarded have no entry yet: fill up, then add this one.
        self._turn_rewards += [0.0] * (len(self.spans) - 1 - len(self._turn_rewards)) + [reward]
        self._turn_metrics += [{} for _ in range(len(self.spans) - 1 - len(self._turn_metrics))]
        self._turn_metrics.append(dict(metrics))
        for name, value in metrics.items():
            self.metrics[name] += value

    def status(self) -> Status:
        """The way in which the rollout ended, as far as its tokens tell."""
        if self.truncation is None:
            return Status.FINISHED
        is_turn = self.truncation == "turn"
        return Status.TRUNCATED_TURN if is_turn else Status.TRUNCATED_CONTEXT

    def close(self, reward: float, status: Status | None = None) -> Rollout:
        """The finished rollout; by default with the status that the tokens tell.

        Its `turn_rewards` are empty where the environment rewarded no turn of its own, and its
        `turn_metrics` where it counted nothing.
        """
        task_id, group_id, rollout_id = self._ids
        cut = {f"truncated_{self.truncation}": 1.0} if self.truncation else {}
        return Rollout(
            task_id=task_id,
            group_id=group_id,
            rollout_id=rollout_id,
            tokens=list(self._tokens),
            loss_mask=list(self._mask),
            logps=list(self._logps),
            versions=list(self._versions),
            images=list(self.images),
            turn_spans=list(self.spans),
            reward=reward,
            turn_rewards=self._rewards_of_turns(),
            turn_metrics=self._metrics_of_turns(),
            status=self.status() if status is None else status,
            metrics={**self.metrics, "num_turns": float(len(self.spans)), **cut},
        )

    def branch(self, *, is_history: bool = False) -> Branch:
        """The same tokens as a further sequence of a rollout."""
        return Branch(
            tokens=list(self._tokens),
            loss_mask=list(self._mask),
            logps=list(self._logps),
            versions=list(self._versions),
            images=list(self.images),
            turn_spans=list(self.spans),
            turn_rewards=self._rewards_of_turns(),
            turn_metrics=self._metrics_of_turns(),
            is_history=is_history,
        )

    def _rewards_of_turns(self) -> list[float]:
        rewards = self._turn_rewards + [0.0] * (len(self.spans) - len(self._turn_rewards))
        return rewards if any(rewards) else []

    def _metrics_of_turns(self) -> list[dict[str, float]]:
        metrics = [dict(one) for one in self._turn_metrics[: len(self.spans)]]
        metrics += [{} for _ in range(len(self.spans) - len(metrics))]
        return metrics if any(metrics) else []

    def _turn_room(self) -> int:
        if not self._is_aborted:
            return self.limits.max_turn_tokens
        span = self.spans[-1]
        return self.limits.max_turn_tokens - (span.action_end - span.action_start)

    def _broken_by(self, new: Sequence[ImageSpan]) -> str:
        """The limit of pictures that further ones would break, in words; empty: none."""
        return str(resolve_name(BROKEN_BY)(self.limits, [*self.images, *new])) if new else ""

    def _append_fixed(self, ids: list[int]) -> None:
        self._tokens += ids
        self._mask += [0] * len(ids)
        self._logps += [0.0] * len(ids)
        self._versions += [-1] * len(ids)

    def _answered(
        self, said: Sequence[Message], request: Sequence[Message]
    ) -> tuple[list[Message], AfterTurn]:
        """The conversation with the answer to the last action, and the answer's ids."""
        span = self.spans[-1]
        last_id = self._tokens[-1] if span.action_end > span.action_start else None
        turn, new = answered_turn(self._messages, [*said, *request])
        history = [*self._messages, turn]
        try:
            after = ids_after_turn(self._tokenizer, last_id, history, new, tools=self._tools)
        except ValueError:
            if not (said and request):
                raise
            # Mistral's template takes no user behind a result: the request ends the last message.
            asked = "\n\n".join(one["content"] for one in request)
            return self._answered([*said[:-1], resolve_name(WITH_TEXT)(said[-1], asked)], ())
        return [*history, *new], after

    def _take_end_back(self) -> None:
        """The policy ended its turn for another speaker than the one who answers: the end that it
        sampled is in no prompt, and is not trained."""
        for of_each in (self._tokens, self._mask, self._logps, self._versions):
            of_each.pop()
        last = self.spans[-1]
        end = last.action_end - 1
        self.spans[-1] = replace(last, action_end=end, observation_end=end)

    def _shorten(self, message: Message) -> Message:
        content = message["content"]
        if isinstance(content, list):  # of texts and pictures, which stay whole
            parts = [{**one, "text": self._short(one["text"])} if "text" in one else one
                     for one in content]  # fmt: skip
            return {**message, "content": parts}
        return {**message, "content": self._short(content)}

    def _short(self, text: str) -> str:
        short = shorten(self._tokenizer, text, self.limits.max_observation_tokens)
        if short != text:
            self.metrics["num_cut_observations"] += 1
        return short


def delta_ids(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> tuple[int, list[int]]:
    """The template's end-of-turn id, and all ids after it up to the next assistant turn, for
    `messages` that answer the first turn of a short chat."""
    turn, new = answered_turn(OPENING, messages)
    end_id, *ids = ids_after_turn(tokenizer, None, [*OPENING, turn], new).ids
    return end_id, ids


def shorten(tokenizer: ChatTokenizer, text: str, max_tokens: int) -> str:
    """`text` of at most `max_tokens` tokens: both ends with a mark between, or the head alone.

    The end matters as much as the start: the last line of a traceback says what went wrong.
    """
    # A program may print 64 KiB, and encoding all of it would keep the other rollouts waiting. Each
    # end keeps more characters than its half of the tokens can stand for.
    end = max(1000, CHARS_PER_TOKEN * max_tokens // 2)
    if len(text) > 2 * end:
        text = text[:end] + CUT_MARK + text[-end:]
    ids = tokenizer.encode(text)
    if len(ids) <= max_tokens:
        return text
    # Cutting inside a character or re-joining words can add tokens, so shrink until it fits.
    for keep in range(max_tokens - len(tokenizer.encode(CUT_MARK)), 0, -1):
        head, tail = ids[: (keep + 1) // 2], ids[len(ids) - keep // 2 :]
        short = _clean(tokenizer.decode(head)) + CUT_MARK + _clean(tokenizer.decode(tail))
        if len(tokenizer.encode(short)) <= max_tokens:
            return short
    for keep in range(max_tokens, 0, -1):
        short = _clean(tokenizer.decode(ids[:keep]))
        if len(tokenizer.encode(short)) <= max_tokens:
            return short
    return ""


def _clean(text: str) -> str:
    return text.strip("\ufffd")
