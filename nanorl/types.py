"""The nouns of the stack. Read this file first; every other module passes these around.

    task     one problem (task.py); its hidden answer never enters the sandbox
    turn     one model output plus the observation that answers it
    rollout  one trajectory: tokens with a loss mask, log-probs and policy versions
    group    the rollouts of one task in one step, keyed by `group_id`

Tokens in, tokens out: a rollout holds the very ids that the inference engine returned, with the
log-prob (nats, fp32, of the tempered distribution) and the policy version of each sampled token.
One NaN spoils the advantages of a whole group, and often of a batch; masks and clips downstream
would drop it in silence. So numbers of an environment, a reward, an agent or a server are looked at
where a rollout ends (`unusable`; it FAILED then, and is played again), and once more, with those of
models, where a batch is made (`check_rollout`, `check_logps`).
Left out: padding, batching (nanoengine.packing), advantages (nanorl.algorithms) and rewards as they
are returned, which a message can name better (envs/rewards/base.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pkgutil import resolve_name
from typing import Literal

from nanoengine.spans import ImageSpan, content_ids

CHECK_SPANS = "nanoengine.vision.span_checks:check_spans"
REWARD_PART = "reward/"
"""What begins the name of a part of the reward among the metrics of a rollout."""

MOST_REWARD = 1e30
"""The largest reward, either way. Advantages are fp32, whose largest number is 3e38, and rewards of
turns are added."""


Withheld = Literal["", "tools", "pictures", "first picture"]
"""What a policy goes without, to measure what it is worth: every call of a tool is refused; grey is
shown in place of every picture, or of the first one."""


class InfrastructureError(RuntimeError):
    """The infrastructure failed, not the program: the rollout gets status FAILED and is retried."""


class Status(StrEnum):
    """Says how a rollout ended. FAILED alone says nothing of the policy: it is dropped, retried."""

    FINISHED = "finished"
    TRUNCATED_TURN = "truncated_turn"  # one model output hit its token limit
    TRUNCATED_CONTEXT = "truncated_context"  # the whole rollout hit the context or turn limit
    FAILED = "failed"  # infrastructure, never the program's or the policy's doing


def kind_of(task_id: str) -> str:
    """The task type, with which every id that `Task` makes begins (task.py)."""
    return task_id.rpartition("-")[0]


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
    where they are trained there already. The other lists are as in `Rollout`.
    """

    tokens: list[int]
    loss_mask: list[int]
    logps: list[float]
    versions: list[int]
    turn_spans: list[TurnSpan] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    turn_metrics: list[dict[str, float]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    is_history: bool = False
    """The rollout went on from it in a sequence that begins anew; False: one beside, such as a
    sub-agent's. Histories come first, in their order."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.loss_mask), len(self.logps), len(self.versions)}
        assert len(lengths) == 1, f"per-token lists differ in length: {sorted(lengths)}"
        if self.images:
            resolve_name(CHECK_SPANS)(self.tokens, self.loss_mask, self.images)

    @property
    def keys(self) -> list[int]:
        """The ids to compare with another sequence's: tokens, or what pictures they stand for."""
        return content_ids(self.tokens, self.images)

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
    kept       what truncation left when it was sampled (rl.top_p); no list at all without any

    `images` are the pictures among the tokens, in order.

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
    kept: list[list[int]] = field(default_factory=list)
    images: list[ImageSpan] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    hindsight: list[int] = field(default_factory=list)
    """The prompt that a teacher reads in place of its own (hindsight.py); empty: none."""
    hindsight_images: list[ImageSpan] = field(default_factory=list)
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
            kept=self.kept,
            images=self.images,
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


def unusable(rollout: Rollout) -> str:
    """Name the first of a rollout's rewards and metrics that cannot be trained on; empty where all
    can."""
    # The first one is enough, and a good rollout is the usual case: nothing is collected.
    return next(_faults(rollout), "")


def _faults(rollout: Rollout) -> Iterator[str]:
    rule = "a reward function must return a finite number"
    if not math.isfinite(rollout.reward):
        yield f"its reward is {rollout.reward}; {rule}"
    earned = [(turn, x) for one in rollout.sequences for turn, x in enumerate(one.turn_rewards, 1)]
    for turn, reward in earned:
        if not math.isfinite(reward):
            yield f"its reward is {reward} in turn {turn}; {rule}"
    for name, value in rollout.metrics.items():
        if not math.isfinite(value):
            yield f"its metric {name!r} is {value}; what is counted must be a finite number"
    parts = [value for name, value in rollout.metrics.items() if name.startswith(REWARD_PART)]
    for value in (rollout.reward, *(reward for _, reward in earned), *parts):
        if abs(value) > MOST_REWARD:
            bounds = f"from -{MOST_REWARD:g} to {MOST_REWARD:g}"
            yield f"its reward is {value:g}; one must be {bounds}: scale it"


def check_rollout(rollout: Rollout) -> None:
    """`ValueError` names a rollout whose rewards, metrics or log-probs cannot be trained on."""
    # A second look: rollouts also come from servers and from stores of other runs.
    if fault := unusable(rollout):
        raise ValueError(f"rollout {rollout.rollout_id}: {fault}")
    check_logps(rollout, [sequence.logps for sequence in rollout.sequences], "the rollout policy")


def check_logps(rollout: Rollout, logps: Sequence[Sequence[float]], who: str) -> None:
    """`ValueError` names the first sampled token to which `who` gives no finite value. `logps` are
    those of all its sequences."""
    for branch, (sequence, values) in enumerate(zip(rollout.sequences, logps, strict=True), -1):
        where = "" if branch < 0 else f" of branch {branch}"
        for place, (value, is_action) in enumerate(zip(values, sequence.loss_mask, strict=True)):
            if is_action and not math.isfinite(value):
                raise ValueError(
                    f"rollout {rollout.rollout_id}: {who} gives its token {place}{where} the value "
                    f"{value}; the weights of that model are damaged: resume from an earlier "
                    "checkpoint"
                )
