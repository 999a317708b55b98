"""The nouns of the stack. Read this file first; every other module passes these around.

    task     one problem; its hidden answer never enters the sandbox
    turn     one model output plus the observation that answers it
    rollout  one trajectory: tokens with a loss mask, log-probs and policy versions
    group    the rollouts of one task in one step, keyed by `group_id`

Tokens in, tokens out: a rollout holds the very ids that the inference engine returned, with the
log-prob (nats, fp32, of the tempered distribution) and the policy version of each sampled token.
Left out: padding, batching (nanoengine.packing) and advantages (nanorl.algorithms).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

Message = Mapping[str, Any]
"""One of a chat: `{"role": ..., "content": ...}`, and whatever else the model's template reads."""

HELDOUT_ONE_IN = 4
"""A quarter of all tasks is never trained on."""


class InfrastructureError(RuntimeError):
    """The infrastructure failed, not the program: the rollout gets status FAILED and is retried."""


class Status(StrEnum):
    """Says how a rollout ended. FAILED alone says nothing of the policy: it is dropped, retried."""

    FINISHED = "finished"
    TRUNCATED_TURN = "truncated_turn"  # one model output hit its token limit
    TRUNCATED_CONTEXT = "truncated_context"  # the whole rollout hit the context or turn limit
    FAILED = "failed"  # infrastructure, never the program's or the policy's doing


@dataclass(frozen=True)
class Task:
    """One problem. `prompt` is what the model reads, a text or a chat; all else stays on the host.

    `files` (name -> text) are laid into the working directory of every execution; they are visible
    to the program, so they must not hold the answer itself. `data` is whatever else the environment
    or the reward needs; `answer` and `data` are JSON. `agent` names the loop that plays the task,
    empty: the environment's own.
    Without `task_id` and `split` both follow from a hash of the content: equal tasks have equal ids
    on every machine, and one task in four is held out. ValueError names a field that is not JSON.

        Task("What is 17 + 25?", answer="42")
        Task("First guess?", answer=7, data={"most": 20}, split="heldout")
    """

    prompt: str | list[Message]
    answer: Any = None
    _: KW_ONLY
    kind: str = "task"
    files: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    agent: str = ""
    task_id: str = ""
    split: str = ""

    def __post_init__(self) -> None:
        if not (self.task_id and self.split):
            own = content_id(self.kind, self.prompt, self.answer, self.files, self._extras())
            # The dataclass is frozen for everybody else.
            object.__setattr__(self, "task_id", self.task_id or own)
            object.__setattr__(self, "split", self.split or split_of(own))

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict of what every task has; `from_json` makes a plain task of it."""
        return {one.name: getattr(self, one.name) for one in fields(Task)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Task:
        return Task(**data)

    def messages(self) -> list[Message]:
        """The prompt as a chat: a text is what the user says."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt

    @property
    def prompt_text(self) -> str:
        """The prompt as one text, for people: a chat has a line for each message."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{m.get('role', '?')}: {m.get('content') or ''}" for m in self.prompt)

    @property
    def answer_text(self) -> str:
        """The answer as a text: empty where there is none, JSON where it is no text."""
        return "" if self.answer is None else json_text(self.answer, "answer")

    def _extras(self) -> dict[str, Any]:
        given = {"data": self.data, "agent": self.agent}
        return {name: value for name, value in given.items() if value}


def content_id(
    kind: str,
    prompt: str | list[Message],
    answer: Any,
    files: Mapping[str, str],
    extras: Mapping[str, Any] | None = None,
) -> str:
    """A stable id: equal content, equal id, on every machine and in every process."""
    parts = [kind, json_text(prompt, "prompt"), json_text(answer, "answer")]
    for name in sorted(files):
        parts += [name, files[name]]
    if extras:
        parts.append(json_text(dict(extras), "data"))  # an odd one: never taken for a file
    text = "".join(f"{len(part)}:{part}" for part in parts)  # lengths: no two lists collide
    content = text.encode(errors="surrogatepass")  # half a character is content too
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"


def split_of(text: str) -> str:
    """`train` or `heldout`, by the text alone: the same text never falls into both."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


def kind_of(task_id: str) -> str:
    """The task type, with which every id that `Task` makes begins."""
    return task_id.rpartition("-")[0]


def json_text(value: Any, name: str) -> str:
    """A text as it is, anything else as JSON with sorted keys. ValueError names the field `name`.

    So 7 and "7" are one answer.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Task: field {name!r} is {value!r:.200}, which is not JSON ({error}); use texts, "
            "numbers, lists and objects of them"
        ) from None


@dataclass(frozen=True, kw_only=True)
class TurnSpan:
    """Half-open token ranges of one turn inside `Rollout.tokens`; the observation may be empty."""

    action_start: int
    action_end: int
    observation_end: int


@dataclass(kw_only=True)
class Branch:
    """One token sequence, prompt included, with lists as in `Rollout`: what the policy read and
    wrote in one unbroken context.

    A sequence that goes on from the middle of another repeats its tokens, with a loss mask of 0
    where they are trained there already. `turn_rewards` and `turn_metrics` are as in `Rollout`.
    """

    tokens: list[int]
    loss_mask: list[int]
    logps: list[float]
    versions: list[int]
    turn_spans: list[TurnSpan] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    is_history: bool = False
    """The rollout went on from it in a sequence that begins anew; False: one beside, such as a
    sub-agent's. Histories come first, in their order."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.loss_mask), len(self.logps), len(self.versions)}
        assert len(lengths) == 1, f"per-token lists differ in length: {sorted(lengths)}"

    @property
    def num_action_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def title(self) -> str:
        """Its relation to the rollout's own sequence, in words; the conversations beside are those
        of sub-agents and forks."""
        return "before the history was compacted" if self.is_history else "a conversation beside"

    @property
    def version(self) -> int:
        """The policy version of its first sampled token; -1 without any."""
        return next((version for version in self.versions if version >= 0), -1)


@dataclass(kw_only=True)
class Rollout:
    """One trajectory. All per-token lists have the length of `tokens` (prompt included).

    loss_mask  1 where the policy sampled the token, 0 for prompt, tool output and template text
    logps      nats, fp32; 0.0 where loss_mask is 0
    versions   optimizer step of the weights that sampled the token; -1 where loss_mask is 0

    `reward` is the score of the answer; `turn_rewards`, one for each of `turn_spans` or none, are
    what single turns earned beside it: part of the outcome, or rewarded turn by turn
    (`AlgorithmSpec.reward_level`). `turn_metrics`, one for each of `turn_spans` or none, are what
    the environment counted in single turns; `metrics` are of them all. `branches` are further token
    sequences of the same rollout: a history before it was compacted, a sub-agent's conversation.
    They share its reward and advantage.
    A prompt of two tokens, a program of two, its output of one, an answer of one:

        Rollout(
            task_id="train-7", group_id="s0-g0", rollout_id="s0-g0-m3",
            tokens=[5, 6, 20, 21, 9, 22],
            loss_mask=[0, 0, 1, 1, 0, 1],
            logps=[0.0, 0.0, -0.3, -1.1, 0.0, -0.2],
            versions=[-1, -1, 4, 4, -1, 4],
            turn_spans=[
                TurnSpan(action_start=2, action_end=4, observation_end=5),
                TurnSpan(action_start=5, action_end=6, observation_end=6),
            ],
            reward=1.0,
            turn_rewards=[0.1, 0.0],
        )
    """

    task_id: str
    group_id: str
    rollout_id: str
    tokens: list[int]
    loss_mask: list[int]
    logps: list[float]
    versions: list[int]
    turn_spans: list[TurnSpan] = field(default_factory=list)
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)
    status: Status = Status.FINISHED
    metrics: dict[str, float] = field(default_factory=dict)
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    hindsight: list[int] = field(default_factory=list)
    """The prompt that a teacher reads in place of its own (hindsight.py); empty: none."""
    error: str = ""
    """Why it FAILED, or why an agent of the user's broke down in it."""

    def __post_init__(self) -> None:
        assert self.sequences, "each has checked its lists"

    @property
    def sequences(self) -> list[Branch]:
        """All token sequences: its own, then those of the branches. The lists are not copied."""
        own = Branch(
            tokens=self.tokens,
            loss_mask=self.loss_mask,
            logps=self.logps,
            versions=self.versions,
            turn_spans=self.turn_spans,
            turn_rewards=self.turn_rewards,
            turn_metrics=self.turn_metrics,
        )
        return [own, *self.branches]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all sequences."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def total_reward(self) -> float:
        """The score of the answer and what the turns of all sequences earned beside it."""
        return self.reward + sum(sum(sequence.turn_rewards) for sequence in self.sequences)

    @property
    def is_success(self) -> bool:
        return self.reward >= 1.0

    @property
    def num_action_tokens(self) -> int:
        """The number of sampled tokens in all sequences."""
        return sum(sequence.num_action_tokens for sequence in self.sequences)

    @property
    def num_turns(self) -> int:
        """The number of turns in all sequences."""
        return sum(len(sequence.turn_spans) for sequence in self.sequences)

    @property
    def version(self) -> int:
        """The policy version that began it, of its first sampled token; -1 without any. Later
        tokens may be of newer versions, never of older ones."""
        begun = [sequence.version for sequence in self.sequences if sequence.version >= 0]
        return min(begun, default=-1)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rollout:
        given = _with_spans(data)
        given["branches"] = [Branch(**_with_spans(b)) for b in data.get("branches", [])]
        given["status"] = Status(given["status"])
        return cls(**given)


@dataclass(kw_only=True)
class TokenStats:
    """Numbers about the tokens of one rollout, by name: a list for each of `rollout.sequences`,
    aligned with its tokens; NaN where there is none.

        advantage     what the update weighed the token's log-prob with
        trained_logp  the training engine's log-prob before the update, nats; what it differs by
                      from `logps` is the gap between the engines
        entropy       of the policy at that token, nats, where the step computed it
        value         the critic's, where there is one
        ref_logp      the reference policy's, where there is one
        teacher_logp  that of a teacher that reads hindsight, where there is one

        TokenStats(values={"advantage": [[0.0, 0.0, 0.7, 0.7]]})
    """

    values: dict[str, list[list[float]]] = field(default_factory=dict)


def _with_spans(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "turn_spans": [TurnSpan(**span) for span in data["turn_spans"]]}


def derive_seed(*names: object) -> int:
    """A 63-bit seed from a path of names, e.g. `derive_seed(run_seed, "rollout", step, member)`.

    So any part of a run can be repeated alone, and resuming needs no state of a generator.
    """
    text = "/".join(str(name) for name in names).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def derive_turn_seed(seed: int, turn: int) -> int:
    """The engine seed of one turn: 63 bits, a function of the rollout's seed and the turn alone."""
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
