"""The options of the phases of a run: warm start, RL, evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nanoengine.config import Schedule, UpdateConfig
from nanoinfer.params import SamplingParams
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.bounds import COUNT, NATURAL, POSITIVE, Bound, check_record
from nanorl.flow.batch_policy import BatchPolicy
from nanorl.flow.replay_policy import ReplayPolicy
from nanorl.options.reference_names import check_mixture, parse_references
from nanorl.options.replay_check import check_replay

MAX_ROLLOUTS = 1 << 16
"""A step may have so many: at some 500 tokens each, a gigabyte of Python numbers."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(UpdateConfig):
    """Supervised steps on a teacher's traces, so that RL starts from a format that runs."""

    steps: int = 32
    """Optimizer steps; 0 goes straight to RL."""
    traces_per_step: int = 6
    """Teacher traces in one optimizer step."""
    lr: float = 1e-4
    warmup_steps: int = 4
    schedule: Schedule = "cosine"
    drill_fraction: float = 0.0
    """Share of the steps, the first ones, that train on copy drills instead of traces."""
    epochs: int = 1
    """Passes over the traces: with more, fewer are played and each is trained on so often."""
    stop_loss: float = 0.0
    """Ends it as soon as the loss of about the last ten steps, in nats a token, is at most this: a
    small model learns what it is shown all at once, and sooner with one seed than with another."""

    def __post_init__(self) -> None:
        check_record(
            self,
            "warm-start.",
            stop_loss=NATURAL,
            steps=NATURAL,
            traces_per_step=Bound(1, 4096, "the sandbox plays them all before the step"),
            lr=POSITIVE,
            warmup_steps=NATURAL,
            weight_decay=NATURAL,
            max_grad_norm=POSITIVE,
            drill_fraction=Bound(0, 1),
            epochs=COUNT,
        )

    @property
    def num_drills(self) -> int:
        """The steps that train on copy drills."""
        return math.ceil(self.drill_fraction * self.steps)


@dataclass(frozen=True, kw_only=True)
class RLConfig(UpdateConfig):
    """The reinforcement-learning phase."""

    steps: int = 15
    """Optimizer batches."""
    tasks_per_step: int = 4
    """Tasks (groups) in one batch."""
    group_size: int = 8
    """Rollouts of one task."""
    lr: float = 2e-5
    temperature: float = 1.0
    """Sampling temperature of the rollouts; log-probs are of the tempered distribution."""
    top_p: float = 1.0
    """Rollouts draw from the likeliest tokens that together have this probability; 1: from all.
    Log-probs, ratios and entropies are then of what was kept, at most 1,024 tokens a place."""
    min_p: float = 0.0
    """Rollouts draw from tokens at least this likely relative to the likeliest; 0: from all."""
    top_k: int = 0
    """Rollouts draw from so many of the likeliest tokens; 0: from all."""
    keep_entropies: bool = False
    """Compute and store the entropy at every trained token, for nanorl view; it costs a pass over
    the logits. Losses with an entropy bonus have them anyway."""
    epochs: int = 1
    """Passes over one batch; from the second step on, ratios and clipping matter."""
    minibatches: int = 1
    """Optimizer steps of one pass, each on an equal part of the batch's groups."""
    curriculum: str = "in_order"
    """Which task is played next: in_order, learnable (kinds that are solved about half of the
    time), pools (tasks solved always, never and sometimes have shares of what is played), or a
    class of yours as mine.py:name (nanorl/flow/curriculum.py)."""
    curriculum_args: tuple[str, ...] = ()
    """Its arguments, as name=value; of pools easy=0.1 hard=0.2, shares of what is played."""
    batch: BatchPolicy = field(default_factory=BatchPolicy)
    """Which groups make a batch, and what becomes of those that do not fit."""
    replay: ReplayPolicy = field(default_factory=ReplayPolicy)
    """Groups of earlier steps that are trained on again beside the fresh ones."""
    concurrency: int = 0
    """Rollouts that play at a time, the others wait; 0: as many as are let start, but fewer as soon
    as turns find that the cache has forgotten what they had in it."""
    max_staleness: int = 0
    """Policy versions a rollout may lag behind; 0 is synchronous training. Stale tokens are
    weighed by the present policy over the one that sampled them, at most 2 (algorithm.correction).
    """
    max_retries: int = 2
    """How often a failed rollout (infrastructure, never the program's doing) is tried again."""
    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    """Advantages, loss, aggregation and corrections."""
    reference: str = ""
    """Hugging Face folder or name of the policy that KL terms and distillation compare with, of
    the same vocabulary; empty: the policy as RL began. Several, with commas between: NAME=WEIGHT
    takes part in a mean of log-probs, KIND:NAME is asked about that kind of task alone."""
    critic_lr: float = 1e-5
    """Learning rate of the critic (advantage gae)."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic learns."""
    value_clip: float = 0.2
    """How far a value may move in one update before its loss stops pulling."""

    def __post_init__(self) -> None:
        held = "all rollouts of a step are held in memory"
        check_record(
            self,
            "rl.",
            steps=NATURAL,
            tasks_per_step=Bound(1, 4096, held),
            group_size=Bound(1, 1024, held),
            lr=POSITIVE,
            warmup_steps=NATURAL,
            temperature=Bound(0.01, 100, "colder is greedy, hotter is noise"),
            top_p=Bound(0.01, 1, "so much of the probability is drawn from; 1 is all"),
            min_p=Bound(0, 0.99, "a share of the likeliest token's probability; 0 is off"),
            top_k=NATURAL,
            epochs=Bound(1, 1000, "they all train on one batch"),
            minibatches=Bound(1, 4096, "each is an optimizer step"),
            concurrency=NATURAL,
            max_staleness=Bound(
                0, 64, "so many batches wait in memory, and so old is their policy"
            ),
            weight_decay=NATURAL,
            max_grad_norm=POSITIVE,
            max_retries=Bound(0, 100, "a sandbox that fails so often is broken"),
            critic_lr=POSITIVE,
            critic_warmup_steps=NATURAL,
            value_clip=POSITIVE,
        )
        self._check_rollouts()
        self._check_algorithm()

    @property
    def is_on_policy(self) -> bool:
        """True if every token is of the policy that its batch updates."""
        return self.is_synchronous and not self.replay.share

    @property
    def is_synchronous(self) -> bool:
        """True if nothing is played while the policy changes, so that no clock has a say."""
        return self.max_staleness == 0 and not self.batch.oversample

    @property
    def truncates(self) -> bool:
        """True if rollouts draw from a part of the vocabulary."""
        return self.top_p < 1 or self.min_p > 0 or self.top_k > 0

    def sampling(self, seed: int = 0) -> SamplingParams:
        """The way that rollouts are drawn."""
        if not self.truncates:
            return SamplingParams(temperature=self.temperature, seed=seed)
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            top_k=self.top_k,
            logps_mode="kept",
            seed=seed,
        )

    @property
    def groups_per_step(self) -> int:
        """The groups that a step trains on at most, replayed ones among them."""
        return self.tasks_per_step + self.replay.num_groups(self.tasks_per_step)

    def _check_rollouts(self) -> None:
        """Refuse batches that would be too large, or that hold nothing to learn from."""
        num_rollouts = self.groups_per_step * self.group_size
        if num_rollouts > MAX_ROLLOUTS:
            replay = f" and --rl.replay.share {self.replay.share}" * bool(self.replay.share)
            raise ValueError(
                f"--rl.tasks-per-step {self.tasks_per_step}: with --rl.group-size "
                f"{self.group_size}{replay} a step has {num_rollouts} rollouts; must be at most "
                f"{MAX_ROLLOUTS}, for all of them are held in memory"
            )
        spec = self.algorithm
        if spec.advantage == "pass_at_k" and self.group_size <= spec.pass_k:
            raise ValueError(
                f"--rl.algorithm.pass-k {spec.pass_k}: must be less than --rl.group-size "
                f"{self.group_size}, or a group is one set of k and there is nothing to compare it "
                "with; raise the group size, or lower k"
            )
        if self.group_size == 1 and spec.compares_members:
            name = "dynamic-sampling" if spec.dynamic_sampling else f"advantage {spec.advantage}"
            raise ValueError(
                f"--rl.group-size 1: --rl.algorithm.{name} compares the rollouts of a group, and "
                "one has nothing to be compared with; raise it, or choose advantage reinforce_pp "
                "or gae"
            )

    def _check_algorithm(self) -> None:
        """Refuse options that do not go with the algorithm, or that it would ignore."""
        spec, critic_only = self.algorithm, self.critic_warmup_steps
        several = ("epochs", self.epochs) if self.epochs > 1 else ("minibatches", self.minibatches)
        if several[1] > 1 and spec.loss == "reinforce":
            raise ValueError(
                f"--rl.{several[0]} {several[1]}: --rl.algorithm.loss reinforce has no ratio, so "
                "from the second step on it would train on another policy's tokens as if they were "
                "its own; choose loss ppo, or 1 of them"
            )
        if not self.is_on_policy and not spec.answers_for_staleness:
            flags = {
                f"--rl.max-staleness {self.max_staleness}": self.max_staleness,
                f"--rl.batch.oversample {self.batch.oversample}": self.batch.oversample,
                f"--rl.replay.share {self.replay.share}": self.replay.share,
            }
            flag = next(flag for flag, is_set in flags.items() if is_set)
            raise ValueError(
                f"{flag}: nothing answers for stale tokens "
                f"(--rl.algorithm.correction {spec.resolved_correction}, old-policy "
                f"{spec.old_policy}, loss {spec.loss}), so they would count as the present "
                "policy's own; set --rl.algorithm.correction tis, or old-policy rollout with a "
                "loss that has a ratio"
            )
        if critic_only and not self.algorithm.needs_critic:
            raise ValueError(
                f"--rl.critic-warmup-steps {critic_only}: there is no critic with "
                f"--rl.algorithm.advantage {self.algorithm.advantage}; choose gae, or 0 steps"
            )
        if self.reference and not self.algorithm.needs_reference:
            raise ValueError(
                f"--rl.reference {self.reference}: nothing reads it; set --rl.algorithm.kl-coef, "
                "kl-reward-coef or distill-coef, or loss opd"
            )
        check_replay(self.replay, spec, tasks_per_step=self.tasks_per_step)
        check_mixture(parse_references(self.reference), is_topk=spec.loss == "opd_topk")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: greedy before and after RL, with the tool on and off, and of models that
    see with pictures hidden; sampled while RL goes on."""

    num_tasks: int = 200
    """Held-out tasks for the figures before and after RL."""
    num_tasks_untrained: int = 42
    """Held-out tasks for the untrained model, the first of the same list."""
    num_tasks_no_tool: int = 42
    """Held-out tasks for the trained model with the tool switched off, the first of the list."""
    num_tasks_hidden: int = 42
    """Held-out tasks for a trained model that sees, with grey in place of every picture, and once
    more in place of the first one: the first of the list."""
    seed: int = 12345
    """Seed of the held-out list; the same for every training seed."""
    every: int = 0
    """RL steps from one evaluation to the next while RL goes on, the first one before it; 0: none.
    The checkpoint with the best one is kept (RUN:best)."""
    num_tasks_each: int = 50
    """Held-out tasks for each of those, the first of the list, and as many training tasks."""
    k: int = 4
    """Samples of each task in those, for pass@k."""
    temperature: float = 1.0
    """Of that sampling; 0 is greedy, with --evaluation.k 1."""

    def __post_init__(self) -> None:
        why = "each is played to its end, twice; the error is then below one percent"
        most = 10_000
        check_record(
            self,
            "evaluation.",
            num_tasks=Bound(1, most, why),
            num_tasks_untrained=Bound(0, most, why),
            num_tasks_no_tool=Bound(0, most, why),
            num_tasks_hidden=Bound(0, most, why),
            every=NATURAL,
            num_tasks_each=Bound(1, most, "each is played to its end, k times"),
            k=Bound(1, 1024, "all rollouts are held in memory"),
            temperature=Bound(0, 100, "hotter is noise"),
        )
        if self.k > 1 and self.temperature == 0.0:
            raise ValueError(
                f"--evaluation.temperature 0 with --evaluation.k {self.k}: greedy samples are all "
                "alike; use --evaluation.k 1"
            )

    @property
    def num_drawn(self) -> int:
        """The held-out tasks that the longest of a run's evaluations plays."""
        return max(self.num_tasks, self.num_tasks_each if self.every else 0)
