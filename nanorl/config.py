"""Every option of a run, defined once. The string under a field is its help on the command line.

`presets.py` fills these in; `scripts/train_agent.py` turns them into flags with tyro and writes the
resolved result to `config.json` of the run. There is no other way to change behaviour.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanorl.algorithms.spec import AlgorithmSpec


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised steps on a sloppy teacher's traces, so that RL starts from a format that runs."""

    steps: int = 32
    """Optimizer steps; 0 goes straight to RL."""
    traces_per_step: int = 6
    """Teacher traces in one optimizer step."""
    lr: float = 1e-4
    """Peak learning rate."""
    warmup_steps: int = 4
    """Steps of linear warm-up; the rate then decays along a cosine to a tenth."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    drill_fraction: float = 0.0
    """Share of the steps, the first ones, that train on copy drills instead of traces."""
    epochs: int = 1
    """Passes over the traces: with more, fewer are played and each is trained on so often."""

    def __post_init__(self) -> None:
        _require(
            0 <= self.drill_fraction <= 1, "warm-start.drill-fraction", self.drill_fraction, "0-1"
        )
        _require(self.steps >= 0, "warm-start.steps", self.steps, "0 or more")
        _require(self.epochs >= 1, "warm-start.epochs", self.epochs, "1 or more")
        _require(
            self.traces_per_step >= 1, "warm-start.traces-per-step", self.traces_per_step, "1+"
        )
        _require(self.lr > 0, "warm-start.lr", self.lr, "positive")


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """The reinforcement-learning phase."""

    steps: int = 15
    """Optimizer batches."""
    tasks_per_step: int = 4
    """Tasks (groups) in one batch."""
    group_size: int = 8
    """Rollouts of one task."""
    lr: float = 2e-5
    """Learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    temperature: float = 1.0
    """Sampling temperature of the rollouts; log-probs are of the tempered distribution."""
    epochs: int = 1
    """Optimizer steps on one batch; from the second on, ratios and clipping matter."""
    max_staleness: int = 0
    """Policy versions a rollout may lag behind; 0 is synchronous training."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global gradient-norm clip."""
    max_retries: int = 2
    """How often a failed rollout (infrastructure, never the program's doing) is tried again."""
    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    """Advantages, loss, aggregation and corrections."""
    reference: str = ""
    """Hugging Face folder or name of the policy that KL terms and distillation compare with, of
    the same vocabulary; empty: the policy as RL began."""
    critic_lr: float = 1e-5
    """Learning rate of the critic (advantage gae)."""
    critic_warmup_steps: int = 0
    """First steps in which only the critic learns."""
    value_clip: float = 0.2
    """How far a value may move in one update before its loss stops pulling."""

    def __post_init__(self) -> None:
        _require(self.steps >= 0, "rl.steps", self.steps, "0 or more")
        _require(self.tasks_per_step >= 1, "rl.tasks-per-step", self.tasks_per_step, "1 or more")
        _require(self.group_size >= 1, "rl.group-size", self.group_size, "1 or more")
        _require(self.lr > 0, "rl.lr", self.lr, "positive")
        _require(self.temperature > 0, "rl.temperature", self.temperature, "positive")
        _require(self.epochs >= 1, "rl.epochs", self.epochs, "1 or more")
        _require(self.max_staleness >= 0, "rl.max-staleness", self.max_staleness, "0 or more")
        _require(self.critic_lr > 0, "rl.critic-lr", self.critic_lr, "positive")
        _require(self.value_clip > 0, "rl.value-clip", self.value_clip, "positive")
        critic_only = self.critic_warmup_steps
        _require(critic_only >= 0, "rl.critic-warmup-steps", critic_only, "0 or more")
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


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Limits of one rollout."""

    max_turns: int = 4
    """Model outputs in one rollout, the final answer included."""
    max_turn_tokens: int = 96
    """Sampled tokens in one turn."""
    max_context_tokens: int = 512
    """Tokens of a whole rollout, prompt and observations included."""
    max_observation_tokens: int = 64
    """Tool output is cut to this many tokens."""

    def __post_init__(self) -> None:
        _require(self.max_turns >= 1, "agent.max-turns", self.max_turns, "1 or more")
        _require(self.max_turn_tokens >= 1, "agent.max-turn-tokens", self.max_turn_tokens, "1+")
        _require(
            self.max_context_tokens > self.max_turn_tokens,
            "agent.max-context-tokens",
            self.max_context_tokens,
            f"larger than agent.max-turn-tokens={self.max_turn_tokens}",
        )


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """The sandbox that runs the model's programs."""

    timeout_s: float = 2.0
    """Wall-clock limit of one execution."""
    memory_mb: int = 256
    """Memory of one execution, children included."""
    workers: int = 2
    """Warm sandbox processes."""

    def __post_init__(self) -> None:
        _require(self.timeout_s > 0, "tool.timeout-s", self.timeout_s, "positive")
        _require(self.memory_mb >= 32, "tool.memory-mb", self.memory_mb, "32 or more")
        _require(self.workers >= 1, "tool.workers", self.workers, "1 or more")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Greedy held-out evaluation, before and after RL, with the tool on and off."""

    num_tasks: int = 200
    """Held-out tasks for the figures before and after RL."""
    num_tasks_untrained: int = 42
    """Held-out tasks for the untrained model, the first of the same list."""
    num_tasks_no_tool: int = 42
    """Held-out tasks for the trained model with the tool switched off, the first of the list."""
    seed: int = 12345
    """Seed of the held-out list; the same for every training seed."""

    def __post_init__(self) -> None:
        _require(self.num_tasks >= 1, "evaluation.num-tasks", self.num_tasks, "1 or more")


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Sizes of the two engines."""

    micro_batch_tokens: int = 2048
    """Tokens of one training micro-batch."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    lm_head_fp32: bool = False
    """Multiply the lm_head in fp32 even if the model is bf16."""
    share_prefix: bool = True
    """Forward a group's common prompt once in training. Off in --deterministic."""
    max_num_seqs: int = 64
    """Sequences decoded together."""
    max_batch_tokens: int = 1024
    """Token budget of one engine step."""
    cache_mb: int = 512
    """Memory of the paged KV cache."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    preset: str = "smollm2"
    """Which preset the defaults come from: smollm2 or tiny."""
    out: Path | None = None
    """Run directory; default runs/<preset>-seed<seed>."""
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    model: str | None = None
    """A Hugging Face folder or hub id instead of the preset's model."""
    tasks: Path | None = None
    """A JSONL file of your own tasks: {"prompt", "answer", "files"?, "kind"?} a line."""
    seed: int = 0
    """Seeds tasks, sampling and the warm start."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute type; master weights and moments are always fp32."""
    deterministic: bool = False
    """Stop unless rollout and training log-probs are equal bit for bit."""
    threads: int = 0
    """CPU threads; 0 uses every core."""
    save_every: int = 5
    """RL steps between two checkpoints; one is also written at the end of every phase."""
    keep_checkpoints: int = 2
    """Checkpoints kept on disk."""
    cache_dir: Path = Path("~/.cache/nanorl")
    """Where downloaded and converted models are kept."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    tool: ToolConfig = field(default_factory=ToolConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    engine: EngineLimits = field(default_factory=EngineLimits)

    def __post_init__(self) -> None:
        _require(self.save_every >= 1, "save-every", self.save_every, "1 or more")
        _require(self.threads >= 0, "threads", self.threads, "0 (every core) or more")

    @property
    def run_dir(self) -> Path:
        return self.out or Path("runs") / f"{self.preset}-seed{self.seed}"

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunConfig:
        """The inverse of `to_json`; an unknown key raises ValueError."""
        return _from_json(cls, data)


# Options that may differ between a run and its resumption without changing what is computed.
RESUME_FREE = ("out", "resume", "cache_dir", "save_every", "keep_checkpoints")


def require_same_run(saved: dict[str, Any], config: RunConfig) -> None:
    """Raise ValueError unless `config` continues the run whose config.json is `saved`."""
    now = config.to_json()
    changed = [
        f"{key}: {saved.get(key)!r} -> {now[key]!r}"
        for key in now
        if key not in RESUME_FREE and saved.get(key) != now[key]
    ]
    if changed:
        raise ValueError(
            "--resume goes on with the run's own options, but these differ: "
            + "; ".join(changed)
            + ". Leave them out, or start a new run with another --out."
        )


def _from_json(cls: Any, data: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"config.json has keys that {cls.__name__} does not know: {unknown}")
    values = {}
    for name, value in data.items():
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            value = _from_json(kind, value)
        elif Path in (kind, *typing.get_args(kind)) and value is not None:
            value = Path(value)
        elif isinstance(value, list):
            value = tuple(value)
        values[name] = value
    return cls(**values)


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"--{name} {value}: must be {rule}")
