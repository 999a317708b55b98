"""`SimulationConfig`: what is simulated, with its help under each field.

A file is JSON with the sections below; what it leaves out has the default given here. Named ones
are those of published.py. Times are seconds, lengths tokens, both of the real system: how many
tokens one simulated token stands for is chosen in simulation.py and changes none of these numbers.
Left out: what a number should be; fit.py shows how some were found.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from nanorl.bounds import COUNT, NATURAL, POSITIVE, Bound, check_record

Sharing = Literal["separate", "colocated"]
Mode = Literal["sync", "streaming", "async"]
LengthKind = Literal["lognormal", "constant", "empirical"]


@dataclass(frozen=True, kw_only=True)
class GpuLayout:
    """The GPUs of the engines and of the trainer."""

    replicas: int = 8
    """Inference engines."""
    gpus_per_replica: int = 1
    """GPUs of each engine."""
    trainer_gpus: int = 8
    """GPUs of the trainer."""
    placement: Sharing = "separate"
    """separate: engines and trainer have GPUs of their own. colocated: they take turns on the same
    ones, so only mode sync goes."""
    shared_cores: float = 0.0
    """CPU cores on which all engines run together, each on one: a step takes longer where more of
    them are busy. 0: every engine has its own device."""

    def __post_init__(self) -> None:
        _check_choice("cluster.placement", self.placement, Sharing)
        check_record(
            self,
            "cluster.",
            replicas=Bound(1, 4096, "each is simulated step by step"),
            gpus_per_replica=COUNT,
            trainer_gpus=COUNT,
            shared_cores=NATURAL,
        )

    @property
    def num_gpus(self) -> int:
        inference = self.replicas * self.gpus_per_replica
        if self.placement == "colocated":
            return max(inference, self.trainer_gpus)
        return inference + self.trainer_gpus


@dataclass(frozen=True, kw_only=True)
class AnswerLengths:
    """The number of tokens that the policy says in a rollout, over all its turns."""

    kind: LengthKind = "lognormal"
    """lognormal: cut off at `cap`. constant: all have `mean`. empirical: drawn from `values`."""
    mean: float = 4000.0
    """Tokens of an answer on average, after the cut."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of a length before the cut (lognormal)."""
    cap: int = 16384
    """Longest answer; longer ones are cut off there."""
    group_share: float = 0.0
    """Share of the variance of a logarithm that the members of a group have in common."""
    values: tuple[int, ...] = ()
    """Lengths to draw from (empirical); those above `cap` are cut."""

    def __post_init__(self) -> None:
        _check_choice("workload.answer.kind", self.kind, LengthKind)
        check_record(
            self,
            "workload.answer.",
            mean=Bound(1),
            sigma=POSITIVE,
            cap=COUNT,
            group_share=Bound(0, 1),
        )
        if self.kind == "empirical" and (not self.values or min(self.values) < 1):
            raise ValueError(
                f"--workload.answer.values {self.values[:3]}: kind empirical draws from them; give "
                "at least one length, each of 1 token or more"
            )
        if self.kind != "empirical" and self.mean > self.cap:
            raise ValueError(
                f"--workload.answer.mean {self.mean}: must be at most --workload.answer.cap "
                f"{self.cap}, where answers are cut off"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest answer that may come."""
        return round(self.mean) if self.kind == "constant" else self.cap


@dataclass(frozen=True, kw_only=True)
class RolloutLoad:
    """The work of the simulated run."""

    tasks_per_step: int = 64
    """Tasks (groups) that one batch trains on."""
    group_size: int = 8
    """Rollouts of one task."""
    steps: int = 100
    """Batches of the whole run; a few of them are simulated."""
    prompt: int = 200
    """Tokens of a prompt."""
    answer: AnswerLengths = field(default_factory=AnswerLengths)
    """Tokens that the policy says in a rollout."""
    turns: int = 1
    """Turns of a rollout, among which its tokens are divided evenly."""
    tool_s: float = 0.0
    """Seconds of a tool call; there is one between two turns."""
    observation: int = 0
    """Tokens that a tool answers with."""
    agent_s: float = 0.0
    """Seconds of the collector's own work for a rollout (environment, text, reward), before its
    first request. It does this for one rollout at a time."""
    chunk: int = 0
    """Tokens after which a request ends and is sent again, so that the router may place it anew
    (divided rollout); 0: never."""

    def __post_init__(self) -> None:
        held = "all rollouts of a step are held in memory"
        check_record(
            self,
            "workload.",
            tasks_per_step=Bound(1, 4096, held),
            group_size=Bound(1, 1024, held),
            steps=COUNT,
            prompt=COUNT,
            turns=Bound(1, 1000),
            tool_s=NATURAL,
            observation=NATURAL,
            agent_s=NATURAL,
            chunk=NATURAL,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest rollout, prompt and observations included."""
        return self.prompt + self.answer.longest + (self.turns - 1) * self.observation


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """One inference engine: how long its steps take, and what it holds.

    A step takes step_s + seq_s * (sequences that decode) + kv_s * (tokens of context that they
    read) + prefill_s * (tokens that are prefilled)."""

    step_s: float = 0.008
    """Seconds of a step that decodes next to nothing: reading the weights, starting kernels."""
    seq_s: float = 2e-5
    """Seconds that each decoding sequence adds."""
    kv_s: float = 1e-8
    """Seconds that each token of context adds which a decoding sequence reads."""
    prefill_s: float = 3e-5
    """Seconds that each prefilled token adds."""
    cache_tokens: int = 1 << 20
    """Tokens that the KV cache holds."""
    max_num_seqs: int = 256
    """Sequences that are decoded together."""
    max_batch_tokens: int = 8192
    """Tokens of one step, decodes and prefills together."""
    router_gate: int = 8
    """Requests by which a replica may be ahead of the least loaded and still get those whose
    prefix it has (nanorl/distributed/roles/router.py)."""

    def __post_init__(self) -> None:
        check_record(
            self,
            "engine.",
            step_s=POSITIVE,
            seq_s=NATURAL,
            kv_s=NATURAL,
            prefill_s=NATURAL,
            cache_tokens=COUNT,
            max_num_seqs=COUNT,
            max_batch_tokens=Bound(self.max_num_seqs, 1 << 24, "a step is held in memory"),
            router_gate=NATURAL,
        )


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds that the trainer spends on one batch. They are those of the mode and layout that is
    simulated: feed what was measured there, for they do not scale from one to the other."""

    old_logp_s: float = 0.0
    """Log-probs of the old policy; 0 where the rollouts' own are used."""
    reference_s: float = 0.0
    """Log-probs of the reference policy."""
    update_s: float = 30.0
    """Forward, backward and optimizer, over all minibatches of the batch."""
    other_s: float = 0.0
    """Whatever else happens once a step: rewards, advantages, records."""
    sync_s: float = 1.0
    """The way of the weights to the engines."""

    def __post_init__(self) -> None:
        names = [one.name for one in dataclasses.fields(self)]
        check_record(self, "phases.", **dict.fromkeys(names, NATURAL))

    @property
    def train_s(self) -> float:
        """The seconds of the work that is done minibatch by minibatch."""
        return self.old_logp_s + self.reference_s + self.update_s


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """One run to be simulated."""

    name: str = "unnamed"
    """Its name in what is printed and drawn."""
    mode: Mode = "sync"
    """sync: rollouts, then training. streaming: the same, but a minibatch is trained as soon as its
    groups are there. async: that, and rollouts go on up to `max_staleness` batches ahead."""
    max_staleness: float = 0.0
    """Batches, also fractions of one, that rollouts may be ahead (async)."""
    minibatches: int = 1
    """Parts of a batch that are trained one after the other as they come (streaming, async)."""
    partial_rollouts: bool = True
    """New weights reach requests in flight, which are prefilled again and go on. False: new weights
    wait until the requests in flight have ended, and nothing starts meanwhile."""
    cluster: GpuLayout = field(default_factory=GpuLayout)
    workload: RolloutLoad = field(default_factory=RolloutLoad)
    engine: EngineTimes = field(default_factory=EngineTimes)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    measured_steps: int = 3
    """Steps that are simulated and averaged."""
    warmup_steps: int = 2
    """Steps simulated before them, until the pipeline is full."""
    quantum: int = 0
    """Real tokens that one simulated token stands for; 0: chosen for the size of the run."""
    seed: int = 0
    """Seed of the lengths."""

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, Mode)
        check_record(
            self,
            "",
            max_staleness=Bound(0, 64, "so many batches wait in memory"),
            minibatches=Bound(1, self.workload.tasks_per_step, "each has at least one group"),
            measured_steps=Bound(1, 1000, "each takes seconds"),
            warmup_steps=Bound(0, 1000, "each takes seconds"),
            quantum=NATURAL,
        )
        self._check_mode()
        longest = self.workload.longest
        if longest > self.engine.cache_tokens:
            raise ValueError(
                f"--engine.cache-tokens {self.engine.cache_tokens}: the longest rollout has "
                f"{longest} tokens and could never run; raise it, or lower --workload.answer.cap"
            )

    def _check_mode(self) -> None:
        if self.mode != "async" and self.max_staleness:
            raise ValueError(
                f"--max-staleness {self.max_staleness}: mode {self.mode} has none; choose mode "
                "async, or 0"
            )
        if self.mode == "async" and not self.max_staleness:
            raise ValueError(
                "--max-staleness 0: mode async without staleness is streaming; choose that mode, "
                "or a staleness above 0"
            )
        if self.mode == "sync" and self.minibatches > 1:
            raise ValueError(
                f"--minibatches {self.minibatches}: mode sync trains when all groups are there; "
                "choose streaming, or 1"
            )
        if self.mode != "sync" and self.cluster.placement == "colocated":
            raise ValueError(
                f"--mode {self.mode} with --cluster.placement colocated: engines that take turns "
                "with the trainer cannot roll out while it works; choose separate"
            )


def scaled(config: SimulationConfig, num_gpus: int) -> SimulationConfig:
    """The same run on another number of GPUs: replicas and the trainer's GPUs in the same
    proportion, and the trainer's phases, all but the way of the weights, shorter or longer in
    inverse proportion. The last is an assumption that no trainer quite keeps.

    `ValueError` where the replicas or the trainer would get less than one."""
    factor = num_gpus / config.cluster.num_gpus
    layout = config.cluster
    replicas, trainer = round(layout.replicas * factor), round(layout.trainer_gpus * factor)
    if replicas < 1 or trainer < 1:
        raise ValueError(
            f"--gpus {num_gpus}: {config.name} has {layout.replicas} replicas of "
            f"{layout.gpus_per_replica} GPUs and {layout.trainer_gpus} of the trainer; that leaves "
            "less than one of each; give more GPUs"
        )
    phases = config.phases
    names = ("old_logp_s", "reference_s", "update_s", "other_s")
    times: dict[str, float] = {name: getattr(phases, name) / factor for name in names}
    return replace(
        config,
        name=f"{config.name} on {num_gpus}",
        cluster=replace(layout, replicas=replicas, trainer_gpus=trainer),
        phases=replace(phases, **times),
    )


def _check_choice(flag: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"--{flag} {value}: must be one of {', '.join(get_args(choices))}")
