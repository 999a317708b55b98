"""What a batch of rollouts says about a run that is going wrong.

A check is a function from `Evidence` to a `Finding`, or None where all is well; CHECKS are those of
rollouts, which `nanorl check` makes of a sample and a run makes of every step (`RunAlarms`). They
read statuses, rewards and counts, and decode text only where there is something to say.
Left out: numbers of a step that are not finite and a success that collapses (monitor/alerts.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.agents.tokens import CUT_MARK
from nanorl.observability.alarms.alike import action_ids, answers_alike
from nanorl.observability.alarms.finding import Finding, Severity, in_order, quoted
from nanorl.observability.alarms.silence import silence_pays
from nanorl.observability.report.observer import RunObserver
from nanorl.options.run_config import RunConfig
from nanorl.task import Task
from nanorl.types import Rollout, Status

if TYPE_CHECKING:
    from nanorl.observability.results import StepResult

MANY = 0.5
"""The share from which on something is the rule and not an accident."""
FEW_GROUPS = 0.25  # with signal, below which a step learns little
ALIKE = 0.8  # of all errors have one text
LEAST_ERRORS = 3
ROOMY = 64  # tokens in which a chat model answers a short question and ends its turn
LARGE_GAP = 0.05
"""Nats, the mean over tokens: bf16 alone gives some thousandths (docs/log.md)."""
LOW_ENTROPY, LOW_ENTROPY_SHARE = 0.01, 0.05  # nats a token, and of the first step's
GOOD_SUCCESS = 0.9
"""Then a policy may well be sure of itself, and most groups have equal rewards because it is right:
neither is a fault."""
OF_EQUAL_ROLLOUTS = ("no_signal", "identical_rollouts")
OF_ENDS = ("no_end_of_turn", "other_stop_token")
"""They are wrong from the first rollout on: a policy that could end its turns has collapsed."""
NUM_IN_A_ROW = 3
"""So many steps in a row must show the same before a run says it: one may be an accident."""
AT_ONCE = ("changed_nothing", "silence_pays")
"""A step without any effect is worth a line at once, and silence is learnt within two steps, after
which there is nothing left to compare."""
MOST_TIMES = 3
"""So often a run says the same thing, each time after twice as many steps as before."""
NO_SIGNAL = "the rollouts of each group got equal rewards, so there was nothing to learn from"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A batch of rollouts and what it takes to judge them."""

    config: RunConfig
    groups: Sequence[Sequence[Rollout]]
    """Without those that failed."""
    errors: Sequence[str] = ()
    """Why rollouts failed."""
    tokenizer: ChatTokenizer
    has_tools: bool
    is_untrained: bool = False
    """No warm start was made yet, although one may follow."""

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]

    @property
    def is_solved(self) -> bool:
        """Nearly all of it."""
        rollouts = self.rollouts
        return sum(one.is_success for one in rollouts) >= GOOD_SUCCESS * len(rollouts) > 0.0

    @property
    def is_warm_start_ahead(self) -> bool:
        return self.is_untrained and self.config.warm_start.steps > 0

    def learnable(self, worst: Severity = Severity.WARNING) -> Severity:
        """The severity of what a warm start would teach."""
        return Severity.NOTE if self.is_warm_start_ahead else worst

    def after_warm_start(self, remedy: str) -> str:
        steps = self.config.warm_start.steps
        if self.is_warm_start_ahead:
            return f"the warm start ({steps} steps) comes first and may mend it"
        return remedy

    def count(self, name: str) -> float:
        """The sum of a metric over all rollouts."""
        return sum(rollout.metrics.get(name, 0.0) for rollout in self.rollouts)

    def said(self, rollout: Rollout) -> str:
        """The first turn of a rollout, as an example."""
        if not rollout.turn_spans:
            return "nothing"
        span = rollout.turn_spans[0]
        return quoted(self.tokenizer.decode(rollout.tokens[span.action_start : span.action_end]))


Check = Callable[[Evidence], Finding | None]


def failures(evidence: Evidence) -> Finding | None:
    """The user's code, or the machine, raised."""
    errors = evidence.errors
    if not errors:
        return None
    total = len(errors) + len(evidence.rollouts)
    text, _ = Counter(errors).most_common(1)[0]
    return Finding(
        name="failures",
        severity=Severity.WARNING if evidence.rollouts else Severity.ERROR,
        seen=f"{len(errors)} of {total} rollouts failed, most often with: {text}",
        why="a failed rollout is played again and then dropped; it is never scored",
        remedy="mend the line that is named; where the machine was slow, raise --tool.timeout-s, "
        "--env-deadline-s or --agent.deadline-s",
    )


def bad_rewards(evidence: Evidence) -> Finding | None:
    """Rewards that are no numbers."""
    bad = [one for one in evidence.rollouts if not math.isfinite(one.total_reward)]
    if not bad:
        return None
    return Finding(
        name="bad_rewards",
        severity=Severity.ERROR,
        seen=f"{len(bad)} of {len(evidence.rollouts)} rewards are not finite "
        f"({bad[0].total_reward})",
        why="one of them makes every weight not a number",
        remedy="have the reward return a finite number; guard its divisions and logarithms",
    )


def cheap_silence(evidence: Evidence) -> Finding | None:
    """Being cut off earns more than playing (silence.py)."""
    return silence_pays(evidence.rollouts)


def no_end_of_turn(evidence: Evidence) -> Finding | None:
    """The model never ends a turn, or ends it with a token that does not count."""
    cut = [one for one in evidence.rollouts if one.status is Status.TRUNCATED_TURN]
    if len(cut) < MANY * len(evidence.rollouts) or not cut:
        return None
    tokenizer = evidence.tokenizer
    foreign = Counter(
        token
        for rollout in cut
        for token in set(action_ids(rollout.sequences)) & tokenizer.special_ids
        if token not in tokenizer.eos_ids
    )
    token, times = foreign.most_common(1)[0] if foreign else (-1, 0)
    ends = [tokenizer.decode([one]) for one in sorted(tokenizer.eos_ids)]
    if times >= MANY * len(cut):
        return Finding(
            name="other_stop_token",
            severity=Severity.ERROR if len(cut) == len(evidence.rollouts) else Severity.WARNING,
            seen=f"{times} of {len(cut)} turns that were cut off hold the control token "
            f"{tokenizer.decode([token])!r}, but a turn ends with {' or '.join(map(repr, ends))}",
            why="the model means to stop there and is not heard, so it never answers",
            remedy=f"add {token} to eos_token_id in the model folder's generation_config.json",
        )
    ids = {token for one in evidence.rollouts for token in action_ids(one.sequences)}
    if ids & tokenizer.eos_ids:
        return None
    return Finding(
        name="no_end_of_turn",
        severity=evidence.learnable(Severity.ERROR),
        seen=f"the model never wrote {' or '.join(map(repr, ends))}, which ends a turn; it wrote "
        f"{evidence.said(cut[0])}",
        why="every turn is cut off, and what is cut off is never read as a call or an answer",
        remedy=evidence.after_warm_start(_to_end_turns(evidence)),
    )


def _to_end_turns(evidence: Evidence) -> str:
    """The remedy for turns without an end. A model with a chat template is a chat model already."""
    teach = "show how a turn ends by a few supervised steps (Env.teacher, --warm-start.steps)"
    if evidence.tokenizer.chat_template is None:
        return f"take a chat model (an -Instruct one), or {teach}"
    limit = evidence.config.agent.max_turn_tokens
    return (
        f"give turns more room than --agent.max-turn-tokens {limit} (--agent.max-turn-tokens "
        f"{max(2 * limit, ROOMY)}, say), ask for short ones in `system`, or {teach}"
    )


def cut_turns(evidence: Evidence) -> Finding | None:
    """Turns that hit their limit of tokens."""
    limit = evidence.config.agent.max_turn_tokens
    return _cut(
        evidence,
        "cut_turns",
        f"--agent.max-turn-tokens {limit}",
        f"raise it (to {2 * limit}, say), or ask for short turns in `system`",
        lambda one: one.status is Status.TRUNCATED_TURN,
    )


def cut_contexts(evidence: Evidence) -> Finding | None:
    """Rollouts that hit the limit of the context, or of what the policy may say in all."""
    agent = evidence.config.agent
    option = f"--agent.max-context-tokens {agent.max_context_tokens}"
    if agent.max_response_tokens is not None:
        option += f" or --agent.max-response-tokens {agent.max_response_tokens}"
    return _cut(
        evidence,
        "cut_contexts",
        option,
        "raise that, or lower --agent.max-observation-tokens",
        lambda one: _is_cut_off(one) and len(one.turn_spans) < agent.max_turns,
    )


def cut_by_turns(evidence: Evidence) -> Finding | None:
    """Rollouts that had no turn left."""
    agent = evidence.config.agent
    return _cut(
        evidence,
        "cut_by_turns",
        f"--agent.max-turns {agent.max_turns}",
        "raise it, or say in `system` how many turns there are and how to end",
        lambda one: _is_cut_off(one) and len(one.turn_spans) >= agent.max_turns,
    )


def no_signal(evidence: Evidence) -> Finding | None:
    """Rewards without a difference to learn from."""
    rewards = [[one.total_reward for one in group] for group in evidence.groups if group]
    if not evidence.config.rl.algorithm.compares_members:
        rewards = [[one for group in rewards for one in group]]
    rewards = [group for group in rewards if group]
    if not rewards:
        return None
    num_signal = sum(len(set(group)) > 1 for group in rewards)
    share = num_signal / len(rewards)
    if share >= FEW_GROUPS:
        return None
    values = {one for group in rewards for one in group}
    seen = f"{num_signal} of {len(rewards)} groups have unequal rewards"
    if len(values) == 1:
        seen = f"all {sum(map(len, rewards))} rewards are {values.pop():g}"
    remedy = (
        "give harder tasks"
        if evidence.is_solved
        else "give easier tasks or partial rewards (self.reward(...), a Score), raise "
        "--rl.group-size or --rl.temperature, or teach the format first (Env.teacher, "
        "--warm-start.steps)"
    )
    return Finding(
        name="no_signal",
        severity=evidence.learnable() if not num_signal else Severity.NOTE,
        seen=seen,
        why="only a group whose rewards differ says what is better, so steps will change little "
        "or nothing",
        remedy=remedy if evidence.is_solved else evidence.after_warm_start(remedy),
    )


def never_success(evidence: Evidence) -> Finding | None:
    """Partial rewards that never reach what counts as solved, or all of them beyond it."""
    rewards = [one.reward for one in evidence.rollouts]
    if not rewards or any(not math.isfinite(one) for one in rewards):
        return None
    most, least = max(rewards), min(rewards)
    if 0.0 < most < 1.0:
        return Finding(
            name="never_success",
            severity=Severity.NOTE,
            seen=f"the highest of {len(rewards)} rewards is {most:g}",
            why="a task counts as solved from 1.0 on: if no more than that can be earned, success "
            "will read 0 % for ever",
            remedy="scale the reward so that a solved task earns 1.0",
        )
    if most > 1.0 and least >= 1.0 and most > least:
        return Finding(
            name="always_success",
            severity=Severity.NOTE,
            seen=f"all {len(rewards)} rewards lie between {least:g} and {most:g}",
            why="a task counts as solved from 1.0 on, so success will read 100 % from the start",
            remedy="scale the reward so that only a solved task earns 1.0",
        )
    return None


def unread_calls(evidence: Evidence) -> Finding | None:
    """Tools exist and nobody calls them."""
    rollouts = evidence.rollouts
    names = ("num_executions", "num_malformed_calls", "num_refused_calls")
    if not (evidence.has_tools and rollouts) or any(evidence.count(name) for name in names):
        return None
    finished = [one for one in rollouts if one.status is Status.FINISHED]
    return Finding(
        name="unread_calls",
        severity=evidence.learnable(),
        seen=f"none of {len(rollouts)} rollouts called a tool; the model wrote "
        f"{evidence.said((finished or rollouts)[0])}",
        why="if that was meant as a call, the parser does not read it",
        remedy=evidence.after_warm_start(
            "show a call in `system`, or set Env.parser to how this model writes calls (fenced, "
            "hermes, llama, pythonic)"
        ),
    )


def malformed_calls(evidence: Evidence) -> Finding | None:
    """Calls that cannot be read."""
    num_bad = evidence.count("num_malformed_calls")
    total = num_bad + evidence.count("num_executions")
    if num_bad < max(1.0, MANY * total):
        return None
    culprit = next(one for one in evidence.rollouts if one.metrics.get("num_malformed_calls"))
    return Finding(
        name="malformed_calls",
        severity=evidence.learnable(),
        seen=f"{num_bad:.0f} of {total:.0f} calls could not be read, as in "
        f"{evidence.said(culprit)}",
        why="each costs a turn, and the model only learns to repair it if it has turns left",
        remedy=evidence.after_warm_start(
            "show one well-formed call in `system`, or choose a simpler Env.parser (fenced)"
        ),
    )


def tool_errors(evidence: Evidence) -> Finding | None:
    """Tools that answer with the same error again and again."""
    num_errors, num_calls = evidence.count("num_tool_errors"), evidence.count("num_executions")
    if num_errors < max(LEAST_ERRORS, MANY * num_calls):
        return None
    texts = [
        line.strip()
        for rollout in evidence.rollouts
        if rollout.metrics.get("num_tool_errors")
        for line in _observed(evidence, rollout).splitlines()
        if line.strip().startswith("Error:")
    ]
    kinds = Counter(re.sub(r"\d+|'[^']*'", "#", text) for text in texts)
    if not kinds or kinds.most_common(1)[0][1] < ALIKE * len(texts):
        return None
    return Finding(
        name="tool_errors",
        severity=Severity.WARNING,
        seen=f"{num_errors:.0f} of {num_calls:.0f} calls ended with an error, nearly all with one "
        f"like {quoted(texts[0])}",
        why="errors that are all alike are seldom the model's doing: probably a bug in the tool",
        remedy="call the tool yourself with the arguments that the model gave; name its arguments "
        "and an example in its docstring",
    )


def agent_failures(evidence: Evidence) -> Finding | None:
    """Agents of the user's that break down after their first call."""
    broken = [one for one in evidence.rollouts if one.metrics.get("agent_failed")]
    if len(broken) < max(1.0, MANY * len(evidence.rollouts)):
        return None
    return Finding(
        name="agent_failures",
        severity=Severity.WARNING,
        seen=f"the agent broke down in {len(broken)} of {len(evidence.rollouts)} rollouts, as in "
        f"{quoted(broken[0].error)}",
        why="such a rollout is scored as unanswered, whoever is to blame",
        remedy="if that is a bug, mend it; if it is the model's answer that the agent cannot read, "
        "catch it there, and let the model try again",
    )


def cut_observations(evidence: Evidence) -> Finding | None:
    """Observations that lost their middle."""
    total = sum(
        span.observation_end > span.action_end
        for rollout in evidence.rollouts
        for span in rollout.turn_spans
    )
    num_cut = evidence.count("num_cut_observations")
    if not num_cut or num_cut < FEW_GROUPS * total:
        return None
    limit = evidence.config.agent.max_observation_tokens
    return Finding(
        name="cut_observations",
        severity=Severity.NOTE,
        seen=f"{num_cut:.0f} observations were longer than --agent.max-observation-tokens {limit}",
        why=f"their middle is replaced by {CUT_MARK.strip()!r}, and the model never sees it",
        remedy="raise --agent.max-observation-tokens (and --agent.max-context-tokens), or have "
        "the tools answer shorter",
    )


def identical_rollouts(evidence: Evidence) -> Finding | None:
    """Members of a group that are all the same."""
    groups = [group for group in evidence.groups if len(group) > 1]
    alike = sum(
        len({tuple(action_ids(one.sequences)) for one in group}) == 1
        and any(one.num_action_tokens for one in group)
        for group in groups
    )
    if not groups or alike < MANY * len(groups) or evidence.is_solved:
        return None
    return Finding(
        name="identical_rollouts",
        severity=Severity.WARNING,
        seen=f"in {alike} of {len(groups)} groups all rollouts are the same, token by token "
        f"(--rl.temperature {evidence.config.rl.temperature:g})",
        why="equal rollouts earn equal rewards, so their group teaches nothing",
        remedy="raise --rl.temperature, or ask for more than one word where there is a choice",
    )


CHECKS: tuple[Check, ...] = (
    failures,
    bad_rewards,
    cheap_silence,
    no_end_of_turn,
    cut_turns,
    cut_contexts,
    cut_by_turns,
    no_signal,
    never_success,
    unread_calls,
    malformed_calls,
    tool_errors,
    agent_failures,
    cut_observations,
    identical_rollouts,
)


def rollout_findings(evidence: Evidence) -> list[Finding]:
    """The findings of all checks of rollouts. Where no turn ever ends, that is all there is to say
    of turns that were cut off and calls that nobody made."""
    found = in_order(check(evidence) for check in CHECKS)
    if not {one.name for one in found} & set(OF_ENDS):
        return found
    return [one for one in found if one.name not in ("cut_turns", "unread_calls")]


# -- during training ---------------------------------------------------------------------------


class RunAlarms(RunObserver):
    """The same checks over every step of a run, and those of a step's numbers.

    Something is said when it was seen NUM_IN_A_ROW steps in a row, and MOST_TIMES at most.
    Left out: state in the checkpoint; a resumed run begins to count anew.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: ChatTokenizer,
        *,
        has_tools: bool,
        say: Callable[[str], None] = print,
    ) -> None:
        self._config, self._tokenizer, self._has_tools = config, tokenizer, has_tools
        self._say = say
        self._in_a_row: dict[str, int] = {}
        self._said: dict[str, list[int]] = {}  # the steps
        self._first_entropy: float | None = None
        self._could_end = False

    async def on_step_kept(self, step: StepResult) -> None:
        found = self.observe(step.step, step.metrics, step.groups, step.failed, step.tasks)
        for alarm in found:
            self._say(alarm)

    def observe(
        self,
        step: int,
        metrics: Mapping[str, Any],
        groups: Sequence[Sequence[Rollout]],
        failed: Sequence[Rollout],
        tasks: Mapping[str, Task] = MappingProxyType({}),
    ) -> list[str]:
        """Return what is to be said after a step: often nothing. `tasks` are those of the groups,
        by task_id."""
        evidence = Evidence(
            config=self._config,
            groups=groups,
            errors=[one.error for one in failed],
            tokenizer=self._tokenizer,
            has_tools=self._has_tools,
        )
        found = [
            *(one for one in rollout_findings(evidence) if one.severity < Severity.NOTE),
            *self._of_numbers(metrics, evidence),
            *in_order([answers_alike(evidence.rollouts, tasks, self._tokenizer)]),
        ]
        self._could_end |= any(one.status is Status.FINISHED for one in evidence.rollouts)
        if self._could_end:
            found = [one for one in found if one.name not in OF_ENDS]
        is_solved = metrics.get("success", 0.0) >= GOOD_SUCCESS
        if is_solved or metrics["num_trained_rollouts"] >= FEW_GROUPS * len(evidence.rollouts):
            found = [one for one in found if one.name not in OF_EQUAL_ROLLOUTS]
        elif not (metrics["num_trained_rollouts"] or metrics.get("replayed_groups")):
            found = [_changed_nothing(), *(one for one in found if one.name != "no_signal")]
        names = {one.name for one in found}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in names}
        return [self._speak(step, one) for one in found if self._is_due(step, one)]

    def _of_numbers(self, metrics: Mapping[str, Any], evidence: Evidence) -> list[Finding]:
        entropy = metrics.get("entropy", mean_surprise(evidence.rollouts))
        if self._first_entropy is None:
            self._first_entropy = entropy
        found = (
            large_gap(metrics.get("logp_gap_mean", 0.0)),
            stuck(metrics.get("success", 1.0), evidence.rollouts),
            low_entropy(entropy, self._first_entropy, metrics.get("success", 1.0)),
        )
        return in_order(found)

    def _is_due(self, step: int, finding: Finding) -> bool:
        said = self._said.get(finding.name, [])
        needed = 1 if finding.name in AT_ONCE else NUM_IN_A_ROW
        if self._in_a_row[finding.name] < needed or len(said) >= MOST_TIMES:
            return False
        return not said or step >= said[-1] + NUM_IN_A_ROW * 2 ** len(said)

    def _speak(self, step: int, finding: Finding) -> str:
        self._said.setdefault(finding.name, []).append(step)
        since = self._in_a_row[finding.name]
        when = f"step {step}" if since == 1 else f"step {step}, as in {since - 1} before it"
        silence = "" if len(self._said[finding.name]) < MOST_TIMES else " (not said again)"
        return f"{when}: {finding.seen}: {finding.why}; {finding.remedy}{silence}"


def _changed_nothing() -> Finding:
    return Finding(
        name="changed_nothing",
        severity=Severity.WARNING,
        seen="it changed nothing",
        why=NO_SIGNAL,
        remedy="if that goes on, give easier or harder tasks or partial rewards, or raise "
        "--rl.group-size or --rl.temperature",
    )


def large_gap(mean_nats: float) -> Finding | None:
    """Rollouts come from another policy than the trainer's."""
    if mean_nats <= LARGE_GAP:
        return None
    return Finding(
        name="large_gap",
        severity=Severity.WARNING,
        seen=f"rollouts' and trainer's log-probs differ by {mean_nats:.2g} nats a token",
        why="it trains on another policy than the one that played, and may diverge",
        remedy="try --dtype fp32, leave --engine.quantization out, or set "
        "--rl.algorithm.correction tis",
    )


def stuck(success: float, rollouts: Sequence[Rollout]) -> Finding | None:
    """Nothing is solved, although rewards may differ."""
    if success > 0.0 or not rollouts:
        return None
    most = max(one.total_reward for one in rollouts)
    return Finding(
        name="stuck",
        severity=Severity.WARNING,
        seen=f"success is 0 % (the highest reward is {most:g})",
        why="a task counts as solved when its reward is 1.0 or more",
        remedy="if partial rewards rise, wait; else give easier tasks, a teacher for the warm "
        "start (Env.teacher), or scale the reward to 1.0",
    )


def low_entropy(nats: float, first: float | None, success: float) -> Finding | None:
    """The policy has become sure of itself without being right."""
    bound = max(LOW_ENTROPY, LOW_ENTROPY_SHARE * (first or 0.0))
    if nats >= bound or success >= GOOD_SUCCESS:
        return None
    return Finding(
        name="low_entropy",
        severity=Severity.WARNING,
        seen=f"the entropy of the policy is {nats:.2g} nats a token, with {success:.0%} success",
        why="it hardly tries anything new any more, so it stays as good as it is",
        remedy="lower --rl.lr, raise --rl.temperature, or set --rl.algorithm.entropy-coef 0.001",
    )


def mean_surprise(rollouts: Sequence[Rollout]) -> float:
    """The mean of -log p (nats) over sampled tokens, which estimates the entropy of the tempered
    distribution; infinite without tokens."""
    count = sum(one.num_action_tokens for one in rollouts)
    total = sum(sum(sequence.logps) for one in rollouts for sequence in one.sequences)
    return -total / count if count else math.inf


def _cut(
    evidence: Evidence, name: str, option: str, remedy: str, is_cut: Callable[[Rollout], bool]
) -> Finding | None:
    rollouts = evidence.rollouts
    num_cut = sum(is_cut(one) for one in rollouts)
    if not num_cut or num_cut < MANY * len(rollouts):
        return None
    return Finding(
        name=name,
        severity=evidence.learnable(),
        seen=f"{num_cut} of {len(rollouts)} rollouts were cut off by {option}",
        why="they are scored as unanswered",
        remedy=evidence.after_warm_start(remedy),
    )


def _is_cut_off(rollout: Rollout) -> bool:
    return rollout.status is Status.TRUNCATED_CONTEXT


def _observed(evidence: Evidence, rollout: Rollout) -> str:
    decode = evidence.tokenizer.decode
    return "\n".join(
        decode(rollout.tokens[span.action_end : span.observation_end], skip_special=True)
        for span in rollout.turn_spans
    )
