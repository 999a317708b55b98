"""Every option of a run, defined once. The string under a field is its help on the command line.

A record of a run inherits from the record of whoever reads it (`UpdateConfig` of the optimizer,
`ComputeConfig` of the training engine, `StepSizes` of the inference engine, `Limits` of an agent):
an option is described there, and only a default that differs is stated here again.

`presets.py` fills these in, `options.py` reads them from flags, a file or Python, and the resolved
result is `config.json` of the run. There is no other way to change behaviour.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from nanoengine.config import ComputeConfig, LayoutConfig, Schedule, UpdateConfig
from nanoengine.model.lora_config import LoraConfig
from nanoinfer.config import Quantization, StepSizes, WeightUpdates
from nanorl.agents.limits import Limits
from nanorl.algorithms.option_groups import BOUNDS
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.bounds import COUNT, NATURAL, POSITIVE, Bound, check_record
from nanorl.flow.policy import BatchPolicy
from nanorl.http_record.config import HttpConfig
from nanorl.monitor.config import MonitorConfig
from nanorl.option_values import read_record
from nanorl.sandbox.base import SandboxName, SandboxSpec, check_safety
from nanorl.scorers.reference_names import check_mixture, parse_references

MAX_ROLLOUTS = 1 << 16
"""A step may have so many: at some 500 tokens each, a gigabyte of Python numbers."""


@dataclass(frozen=True, kw_only=True)
class WarmStartConfig(UpdateConfig):
    """Supervised steps on a sloppy teacher's traces, so that RL starts from a format that runs."""

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

    def __post_init__(self) -> None:
        check_record(
            self,
            "warm-start.",
            steps=NATURAL,
            traces_per_step=Bound(1, 4096, "the sandbox plays them all before the step"),
            lr=POSITIVE,
            warmup_steps=NATURAL,
            weight_decay=NATURAL,
            max_grad_norm=POSITIVE,
            drill_fraction=Bound(0, 1),
            epochs=COUNT,
        )


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
    keep_entropies: bool = False
    """Compute and store the entropy at every trained token, for nanorl view; it costs a pass over
    the logits. Losses with an entropy bonus have them anyway."""
    epochs: int = 1
    """Passes over one batch; from the second step on, ratios and clipping matter."""
    minibatches: int = 1
    """Optimizer steps of one pass, each on an equal part of the batch's groups."""
    curriculum: str = "in_order"
    """Which task is played next: in_order, learnable (kinds that are solved about half of the
    time), or a class of yours as mine.py:name (nanorl/flow/curriculum.py)."""
    batch: BatchPolicy = field(default_factory=BatchPolicy)
    """Which groups make a batch, and what becomes of those that do not fit."""
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
        return self.max_staleness == 0 and not self.batch.oversample

    def _check_rollouts(self) -> None:
        """Refuse batches that would be too large, or that hold nothing to learn from."""
        num_rollouts = self.tasks_per_step * self.group_size
        if num_rollouts > MAX_ROLLOUTS:
            raise ValueError(
                f"--rl.tasks-per-step {self.tasks_per_step}: with --rl.group-size "
                f"{self.group_size} a step has {num_rollouts} rollouts; must be at most "
                f"{MAX_ROLLOUTS}, for all of them are held in memory"
            )
        spec = self.algorithm
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
            flag = (
                f"--rl.max-staleness {self.max_staleness}"
                if self.max_staleness
                else f"--rl.batch.oversample {self.batch.oversample}"
            )
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
        check_mixture(parse_references(self.reference), is_topk=spec.loss == "opd_topk")


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Limits):
    """Limits of one rollout."""

    max_turn_tokens: int = 96
    max_context_tokens: int = 512
    max_observation_tokens: int = 64
    loop: str = ""
    """Who decides when the policy speaks: tool, single_turn, feedback, compact, sub_agents,
    command, or yours as file.py:loop; --agent for short. Empty: the environment's own."""
    loop_args: tuple[str, ...] = ()
    """Its options, as name=value; --agent-args for short."""
    command: str = ""
    """The program that plays with --agent command: "python mine.py"."""
    host: str = "127.0.0.1"
    """Where agents that call the policy through an API reach it: this machine alone, or 0.0.0.0 for
    others too. Every episode has a key of its own."""
    max_calls_at_once: int = 64
    """Requests of one such agent at a time; more are answered 429."""
    scorer_key_file: Path | None = None
    """File with the key by which a scorer of yours, and no agent, reports rewards by HTTP; without
    one none is taken."""
    max_reward: float = 1.0
    """A reward reported by HTTP lies between minus this and this."""
    template_args: tuple[str, ...] = ()
    """Variables of the model's chat template, as enable_thinking=false of Qwen3's."""
    deadline_s: float = 3600.0
    """Wall-clock limit of a rollout; one that takes longer has failed and is played again. 0: none.
    """

    def __post_init__(self) -> None:
        check_record(
            self,
            "agent.",
            deadline_s=NATURAL,
            max_calls_at_once=COUNT,
            max_reward=POSITIVE,
            max_turns=Bound(1, 1000, "each is an execution in the sandbox"),
            max_turn_tokens=COUNT,
            max_response_tokens=COUNT,
            max_context_tokens=COUNT,
            max_observation_tokens=COUNT,
        )
        _require(
            self.max_context_tokens > self.max_turn_tokens,
            "agent.max-context-tokens",
            self.max_context_tokens,
            f"larger than agent.max-turn-tokens={self.max_turn_tokens}",
        )
        if self.command and self.loop not in ("", "command"):
            raise ValueError(
                f"--agent.command {self.command!r} with --agent {self.loop}: only --agent command "
                "runs a program; leave one of them out"
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
    max_workers: int = 0
    """So many while programs wait; those beyond `workers` end after half a minute of idleness. 0:
    never more than `workers`."""
    python: str = ""
    """The interpreter that runs the programs, outside of /tmp; empty: the system's, or this one."""
    sandbox: SandboxName = "auto"
    """What keeps programs in (docs/sandbox.md): auto is bwrap where that runs, else wasm. Others by
    name: oci (podman or docker), gvisor, microvm; landlock and rlimits only with
    --allow-unsafe-sandbox. One that is named and does not run here is refused."""
    image: str = ""
    """The system that programs see: of oci the name of a local image, of microvm a folder; both
    from scripts/make_sandbox_image.sh."""
    allow_unsafe_sandbox: bool = False
    """Permit sandboxes from which programs can reach this machine."""

    def limits(self) -> SandboxSpec:
        """The limits of one execution."""
        return SandboxSpec(
            timeout_s=self.timeout_s,
            memory_bytes=self.memory_mb << 20,
            python=self.python or None,
            image=self.image or None,
        )

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        check_record(
            self,
            "tool.",
            timeout_s=Bound(0.01, 3600, "a rollout waits so long for each execution"),
            memory_mb=Bound(32, 1 << 20),
            workers=Bound(1, 16 * cores, f"16 processes for each of the {cores} cores here"),
            max_workers=Bound(0, 16 * cores, f"16 processes for each of the {cores} cores here"),
        )
        _require(
            not 0 < self.max_workers < self.workers,
            "tool.max-workers",
            self.max_workers,
            f"0 or at least tool.workers={self.workers}",
        )
        check_safety(self.sandbox, self.allow_unsafe_sandbox)


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
        why = "each is played to its end, twice; the error is then below one percent"
        most = 10_000
        check_record(
            self,
            "evaluation.",
            num_tasks=Bound(1, most, why),
            num_tasks_untrained=Bound(0, most, why),
            num_tasks_no_tool=Bound(0, most, why),
        )


@dataclass(frozen=True, kw_only=True)
class EngineLimits(ComputeConfig, StepSizes, WeightUpdates):
    """Sizes of the two engines; 0: chosen for the device (sizes.py)."""

    micro_batch_tokens: int = 0
    """Tokens of one training micro-batch, rows of the model in a forward and a backward pass."""
    quantization: Quantization = "none"
    """fp8, or int8 on a CPU: rollouts multiply in 8 bits, training does not. Needs an off-policy
    correction; for an int8 base of an adapter, which needs none, see --lora.base-dtype."""
    activation_mb: int = 160
    share_prefix: bool = True
    cache_mb: int = 0
    """Memory of the paged KV cache."""

    def __post_init__(self) -> None:
        most = Bound(0, 1 << 20, "a step's activations grow with it")
        check_record(
            self,
            "engine.",
            micro_batch_tokens=most,
            max_num_seqs=Bound(0, 1 << 16, "each has a place in every step"),
            max_batch_tokens=most,
            cache_mb=NATURAL,
            activation_mb=NATURAL,
        )
        _require(
            self.max_batch_tokens >= self.max_num_seqs or self.max_batch_tokens == 0,
            "engine.max-batch-tokens",
            self.max_batch_tokens,
            f"at least engine.max-num-seqs={self.max_num_seqs}: a step gives each one a token",
        )


BaseDtype = Literal["auto", "int8"]


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LoraConfig):
    """The adapter that the run trains, warm start and RL, in place of the model's weights."""

    base_dtype: BaseDtype = "auto"
    """The dtype of the frozen matrices below the adapter. auto: the run's own, and rollouts read a
    merged copy. int8, on a CPU: a byte a weight and no copy; both engines add the adapter to the
    same products, so log-probs stay equal bit for bit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_record(
            self, "lora.", rank=Bound(0, 1 << 16, "a full matrix has no more"), alpha=POSITIVE
        )
        if self.base_dtype not in get_args(BaseDtype):
            raise ValueError(f"--lora.base-dtype {self.base_dtype}: must be auto or int8")
        unread = [one.name for one in dataclasses.fields(self) if self._differs(one)]
        if self.rank == 0 and unread:
            raise ValueError(
                f"--lora.{unread[0].replace('_', '-')} {getattr(self, unread[0])}: there is no "
                "adapter; set --lora.rank too"
            )

    @property
    def is_int8(self) -> bool:
        return self.base_dtype == "int8"

    def _differs(self, one: dataclasses.Field[Any]) -> bool:
        return bool(getattr(self, one.name) != one.default)


BackendName = Literal["inline", "local", "ray"]
Placement = Literal["separate", "colocated"]
TransportName = Literal["auto", "shm", "cuda_ipc", "dist", "disk"]
TrackerName = Literal["wandb", "mlflow", "trackio", "clearml", "otel"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where the roles of a run live: trainer ranks, rollout replicas, agents, the store."""

    backend: BackendName = "inline"
    """inline: all in this process, the fastest on a laptop. local: a process each on this machine.
    ray: on one machine or many (the extra `ray`)."""
    address: str = ""
    """With ray: the cluster to join, "auto" or host:port; empty starts one on this machine."""
    placement: Placement = "separate"
    """separate: trainer, replicas, reference and critic have GPUs of their own, one a process, and
    rollouts may go on during a step. colocated: trainer process i and replica process i share a
    GPU and take turns, the one asleep while the other works. On CPUs both reserve nothing."""
    transport: TransportName = "auto"
    """How weights reach replicas in other processes; auto: shm on one machine, dist on many, disk
    for servers, cuda_ipc where the trainer and the only replica share a GPU."""
    delta: bool = False
    """Send what changed since the last version; needs the transport disk."""
    heartbeat_s: float = 5.0
    """Seconds between two questions to each role whether it still works."""
    hang_s: float = 120.0
    """A role that does not answer so long is killed and started again."""
    start_s: float = 600.0
    """A role that is not ready so long after it was started, its model loaded, is killed, too."""

    def __post_init__(self) -> None:
        check_record(
            self,
            "cluster.",
            heartbeat_s=Bound(0.05, 3600, "faster only costs time"),
            hang_s=Bound(0.5, 86400, "a longer silence is a night lost"),
            start_s=Bound(1, 86400, "a longer wait is a night lost"),
        )
        if self.address and self.backend != "ray":
            raise ValueError(
                f"--cluster.address {self.address}: only --cluster.backend ray joins a cluster"
            )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(LayoutConfig):
    """How the trainer is split over processes (docs/parallelism.md)."""

    threads: int = 0
    """CPU threads of each process; 0: those of the run divided among the processes of a machine."""

    def __post_init__(self) -> None:
        most = Bound(1, 4096, "so many processes")
        check_record(self, "learner.", tp=most, pp=most, dp=most, cp=most, ep=most, threads=NATURAL)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The inference engines that sample the rollouts."""

    replicas: int = 1
    """Engines, each with all the weights; requests are shared out among them. 0: only those at
    --rollout.addresses."""
    tp: int = 1
    """Processes that share each engine's matrices."""
    addresses: tuple[str, ...] = ()
    """Servers that somebody else started, used as further replicas: http://HOST:PORT of a
    nanoinfer.server, vllm+http://HOST:PORT, sglang+http://HOST:PORT."""
    api_key_file: Path | None = None
    """The admin's key of those servers (their --admin-key-file), to hand them weights."""
    threads: int = 0
    """CPU threads of each process; 0: those of the run divided among the replicas."""

    def __post_init__(self) -> None:
        most = Bound(1, 1024, "so many processes")
        least = most._replace(low=0) if self.addresses else most
        check_record(self, "rollout.", replicas=least, tp=most, threads=NATURAL)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    preset: str = "smollm2"
    """Which preset the defaults come from: smollm2 or tiny."""
    algorithm: str = "grpo"
    """Which published recipe the defaults of --rl.algorithm come from; `nanorl algorithms` lists
    them."""
    out: Path | None = None
    """Run directory; default runs/<preset>-seed<seed>."""
    resume: bool = False
    """Go on from the last checkpoint in --out, with the options given here changed from there on;
    history.jsonl records them."""
    fork: str = ""
    """Begin at a checkpoint of another run, RUN, RUN@7 (after 7 RL steps) or RUN@done, with its
    options and those given here. That run stays as it is."""
    model: str | None = None
    """A Hugging Face folder, a .gguf file or a hub id instead of the preset's model."""
    env: str = ""
    """Your own environment: a file (maze.py), module:Class, or one of those that come along;
    empty: programs that solve the preset's tasks. See docs/environments.md."""
    env_args: tuple[str, ...] = ()
    """Its arguments, as name=value."""
    reward: str = ""
    """A reward in place of the environment's own: rule, a file (score.py) or module:function."""
    reward_args: tuple[str, ...] = ()
    """Its arguments, as name=value, where it is a class."""
    env_workers: int | None = None
    """Processes for environments and rewards of yours, which may hang or die there; 0: this one,
    as a debugger needs it; None: two, and none for what comes along."""
    env_deadline_s: float = 60.0
    """Wall-clock limit of one call in such a process."""
    tasks: str | None = None
    """Your own tasks: a .jsonl, .json, .csv or .parquet file with `prompt` and `answer`, a folder
    of `datasets`, or hf:NAME:SPLIT of the Hugging Face hub."""
    task_fields: tuple[str, ...] = ()
    """Which column is which field of a task: prompt=question answer=solution data.level=level."""
    seed: int = 0
    """Seeds tasks, sampling and the warm start."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Compute type; master weights and moments are always fp32."""
    deterministic: bool = False
    """Stop unless rollout and training log-probs are equal bit for bit. Synchronous runs only."""
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N; both engines work there."""
    threads: int = 0
    """CPU threads; 0 uses every core."""
    save_every: int = 5
    """RL steps between two checkpoints; one is also written at the end of every phase."""
    keep_checkpoints: int = 2
    """Checkpoints kept on disk."""
    background_saves: bool | None = None
    """Write checkpoints while training goes on, from a copy in memory (12 bytes a weight); None:
    where rollouts go on beside training (--rl.max-staleness)."""
    store: str = ""
    """Where the rollouts are kept: a SQLite file or postgresql://SERVER/DATABASE?run=NAME, either
    with blobs=ADDRESS for large contents (docs/store.md); empty: rollouts.sqlite in --out."""
    keep_start: bool = True
    """Keep the checkpoint with which RL began as well, so that `nanorl replay` can make the weights
    of any step again: 12 bytes a weight (SmolLM2-135M: 1.6 GB). Without a warm start the model
    itself is all that it takes, and nothing more is kept."""
    keep_rollout_steps: int = 0
    """RL steps, the newest, whose rollouts are kept; 0 keeps those of every step."""
    keep_rollout_days: float = 0.0
    """Days that rollouts are kept; 0: for ever."""
    keep_rollout_mb: int = 0
    """Size of the store, MiB, above which the rollouts of least worth go; 0: no limit."""
    log: tuple[TrackerName, ...] = ()
    """Send metrics, evaluations and rollouts to these trackers too, each with its own settings
    (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, CLEARML_API_HOST and so on); otel: spans of every
    phase, step, rollout, turn and call, to an OTLP collector (OTEL_EXPORTER_OTLP_ENDPOINT)."""
    log_rollouts: int = 32
    """So many rollouts of each step, and of each evaluation, go to trackers as tables; 0: none."""
    log_project: str = "nanorl"
    """The project, or experiment, that the run appears in there."""
    cache_dir: Path = Path("~/.cache/nanorl")
    """Where downloaded and converted models are kept."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    lora: LoraOptions = field(default_factory=LoraOptions)
    agent: AgentConfig = field(default_factory=AgentConfig)
    tool: ToolConfig = field(default_factory=ToolConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    engine: EngineLimits = field(default_factory=EngineLimits)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    http: HttpConfig = field(default_factory=HttpConfig)

    def __post_init__(self) -> None:
        named_spec(self.algorithm)
        cores = os.cpu_count() or 1
        check_record(
            self,
            "",
            threads=Bound(0, 4 * cores, f"4 for each of the {cores} cores here; 0 uses every core"),
            env_workers=Bound(0, 64 * cores, "so many processes"),
            env_deadline_s=POSITIVE,
            save_every=COUNT,
            keep_checkpoints=COUNT,
            keep_rollout_steps=NATURAL,
            keep_rollout_days=NATURAL,
            keep_rollout_mb=NATURAL,
            log_rollouts=Bound(0, 4096, "a tracker shows them on one page"),
        )
        self._check_store()
        if self.deterministic and not self.rl.is_on_policy:
            raise ValueError(
                f"--deterministic with --rl.max-staleness {self.rl.max_staleness} and "
                f"--rl.batch.oversample {self.rl.batch.oversample}: with staleness the time "
                "decides which weights sample a token, so no two runs are equal; set both to 0, or "
                "leave --deterministic out"
            )
        if self.engine.quantization != "none":
            self._check_quantization()
        self._check_processes()
        self._check_http()
        if self.lora.rank and self.cluster.backend != "inline":
            raise ValueError(
                f"--lora.rank {self.lora.rank} with --cluster.backend {self.cluster.backend}: an "
                "adapter is trained in one process; leave the backend inline, or train all weights "
                "(--lora.rank 0)"
            )
        if self.lora.is_int8:
            self._check_int8_base()
        buffer, most = self.rl.algorithm.overlong_buffer, self.agent.max_context_tokens
        if buffer > most:
            raise ValueError(
                f"--rl.algorithm.overlong-buffer {buffer}: must be at most "
                f"--agent.max-context-tokens {most}, the limit before which the penalty grows"
            )

    @property
    def saves_in_background(self) -> bool:
        """Whether training goes on while a checkpoint is written."""
        chosen = self.background_saves
        return self.rl.max_staleness > 0 if chosen is None else chosen

    def with_algorithm(self, name: str) -> RunConfig:
        """The same run with the published recipe `name` in place of its algorithm."""
        return replace(self, algorithm=name, rl=replace(self.rl, algorithm=named_spec(name)))

    def _check_quantization(self) -> None:
        flag = f"--engine.quantization {self.engine.quantization}"
        if self.deterministic:
            raise ValueError(
                f"--deterministic with {flag}: rollouts in 8 bits have other log-probs than "
                "training; leave one of them out"
            )
        if not self.rl.algorithm.answers_for_staleness:
            raise ValueError(
                f"{flag} with --rl.algorithm.correction {self.rl.algorithm.correction}: rollouts "
                "come from another policy than the trained one, and nothing would weigh them for "
                "it; set --rl.algorithm.correction tis"
            )

    def check_address(self, address: str) -> None:
        """ValueError for another project's server where the losses would take its log-probs for
        those of the trainer."""
        if "+" not in address.partition("://")[0]:
            return
        flag = f"--rollout.addresses {address}"
        if self.deterministic:
            raise ValueError(
                f"--deterministic with {flag}: that engine's log-probs are not the trainer's; "
                "leave one of them out"
            )
        if not self.rl.algorithm.answers_for_staleness:
            raise ValueError(
                f"{flag} with --rl.algorithm.correction {self.rl.algorithm.correction}: that "
                "engine's log-probs are not the trainer's, and nothing would weigh the tokens for "
                "it; set --rl.algorithm.correction tis"
            )

    def _check_int8_base(self) -> None:
        """Refuse what an int8 base cannot do: both engines read it, and it has no gradient."""
        flags = {
            f"--rl.max-staleness {self.rl.max_staleness}": self.rl.max_staleness > 0,
            f"--engine.in-flight {self.engine.in_flight}": self.engine.in_flight == "wait",
            f"--engine.quantization {self.engine.quantization}": self.engine.quantization != "none",
            f"--device {self.device}": self.device.startswith("cuda"),
            f"--algorithm {self.algorithm}, which trains a critic": self.rl.algorithm.needs_critic,
        }
        refused = next((flag for flag, is_set in flags.items() if is_set), None)
        if refused is not None:
            raise ValueError(
                f"--lora.base-dtype int8 with {refused}: rollouts and training take turns at one "
                "frozen base in a CPU's memory; leave that out, or --lora.base-dtype auto"
            )

    def _check_processes(self) -> None:
        """Refuse options of several processes in a run of one, and two that exclude each other."""
        if self.cluster.backend == "inline":
            several = {"learner": LearnerConfig(), "rollout": RolloutConfig()}
            for section, alone in several.items():
                mine = getattr(self, section)
                for one in dataclasses.fields(mine):
                    value = getattr(mine, one.name)
                    if value != getattr(alone, one.name):
                        raise ValueError(
                            f"--{section}.{one.name} {value}: needs processes of its own; add "
                            "--cluster.backend local, or ray"
                        )
        elif self.device.startswith("cuda:"):
            raise ValueError(
                f"--device {self.device} with --cluster.backend {self.cluster.backend}: each "
                "process gets devices of its own; say cuda, and choose with CUDA_VISIBLE_DEVICES"
            )
        self._check_transport()
        if self.cluster.placement == "colocated" and self.rl.max_staleness > 0:
            raise ValueError(
                f"--cluster.placement colocated with --rl.max-staleness {self.rl.max_staleness}: "
                "engines that take turns cannot roll out during a step; choose separate, or "
                "--rl.max-staleness 0"
            )

    def _check_http(self) -> None:
        """Refuse a recording proxy that the code of environments would not be kept to."""
        mode = f"--http.mode {self.http.mode}"
        if self.http.mode == "off":
            return
        if self.env_workers == 0:
            raise ValueError(
                f"{mode} with --env-workers 0: code in the run's own process cannot be led to a "
                "proxy; leave --env-workers out"
            )
        if self.cluster.backend == "ray":
            raise ValueError(
                f"{mode} with --cluster.backend ray: the proxy answers on one machine alone; use "
                "--cluster.backend local, or inline"
            )

    def _check_transport(self) -> None:
        """Refuse ways of the weights that do not exist or do not reach all who need them."""
        transport, addresses = self.cluster.transport, self.rollout.addresses
        for address in addresses:
            self.check_address(address)
        if self.cluster.backend == "inline" and (transport != "auto" or self.cluster.delta):
            flag = "delta" if transport == "auto" else f"transport {transport}"
            raise ValueError(
                f"--cluster.{flag}: in one process weights are copied within it; add "
                "--cluster.backend local, or ray, or leave it out"
            )
        if self.cluster.delta and transport != "disk":
            raise ValueError(
                f"--cluster.delta with --cluster.transport {transport}: only files can hold what "
                "changed alone; add --cluster.transport disk"
            )
        if addresses and transport not in ("auto", "disk"):
            raise ValueError(
                f"--rollout.addresses {addresses[0]} with --cluster.transport {transport}: a "
                "server reads its weights from files; set --cluster.transport disk"
            )

    def _check_store(self) -> None:
        """Also that nothing secret is in it: config.json keeps it."""
        if self.store:
            from nanorl.store.address import StoreAddress  # here: few options need numpy

            StoreAddress.parse(self.store)

    @property
    def store_address(self) -> str:
        """Of the rollouts of RL; those of the run's own evaluations are in evaluations.sqlite."""
        return self.store or str(self.run_dir / "rollouts.sqlite")

    @property
    def run_dir(self) -> Path:
        return self.out or Path("runs") / f"{self.preset}-seed{self.seed}"

    @property
    def http_store(self) -> Path:
        """Where recorded answers lie."""
        return self.http.store or self.run_dir / "http.sqlite"

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunConfig:
        """The inverse of `to_json`, also of 0.1.0's; an unknown key raises ValueError."""
        return read_record(cls, _without_unread_bounds(data), where="config.json")


def flatten(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by their names on the command line, `rl.group_size`."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _without_unread_bounds(data: dict[str, Any]) -> dict[str, Any]:
    """0.1.0 wrote every option's default, also bounds of a correction that has none, which are
    refused now."""
    rl = data.get("rl")
    given = rl.get("algorithm") if isinstance(rl, dict) else None
    algorithm = dict(given) if isinstance(given, dict) else {}
    if not algorithm or algorithm.get("correction") in BOUNDS:
        return data
    for name in ("correction_low", "correction_high"):
        algorithm.pop(name, None)
    return data | {"rl": data["rl"] | {"algorithm": algorithm}}


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"--{name} {value}: must be {rule}")
