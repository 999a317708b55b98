"""Every option of a run, in one record of records: `RunConfig`.

A section is a record in a file beside this one. The string under a field is its help on the command
line. A record inherits from the record of whoever reads it (`UpdateConfig` of the optimizer,
`ComputeConfig` of the training engine, `StepSizes` of the inference engine, `Limits` of an agent):
an option is described there, and only a default that differs is stated here again.

presets.py fills these in, parse.py reads them from flags, a file or Python, and the resolved
result is `config.json` of the run. There is no other way to change behaviour.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

from nanorl.algorithms.option_groups import BOUNDS
from nanorl.algorithms.recipes import named_spec
from nanorl.bounds import COUNT, NATURAL, POSITIVE, Bound, check_record
from nanorl.envs.http_record.record_config import HttpConfig
from nanorl.options.agent_config import AgentConfig, ToolConfig
from nanorl.options.cluster_config import ClusterConfig, LearnerConfig, RolloutConfig
from nanorl.options.engine_config import EngineLimits, LoraOptions
from nanorl.options.monitor_config import MonitorConfig
from nanorl.options.phase_config import EvaluationConfig, RLConfig, WarmStartConfig
from nanorl.options.values import read_record
from nanorl.options.vision_config import VisionOptions

CHECK_MIX = "nanorl.options.env_mix:check_mix"
"""Refuses what does not fit together where a run has several environments."""
CHECK_TRUNCATION = "nanorl.options.truncated_draws:check_truncation"
"""Refuses what has no log-probs over the tokens that truncated rollouts keep."""
TrackerName = Literal["wandb", "mlflow", "trackio", "clearml", "otel"]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    preset: str = "smollm2"
    """Which preset the defaults come from: smollm2, tiny or tiny_vision."""
    algorithm: str = "grpo"
    """Which published recipe the defaults of --rl.algorithm come from; `nanorl algorithms` lists
    them."""
    out: Path | None = None
    """Run directory; default runs/<preset>-seed<seed>."""
    resume: bool = False
    """Go on from the last checkpoint in --out, with the options given here changed from there on;
    history.jsonl records them."""
    fork: str = ""
    """Begin at a checkpoint of another run, RUN, RUN@7 (after 7 RL steps), RUN@done or RUN:best,
    with its options and those given here. That run stays as it is."""
    model: str | None = None
    """A Hugging Face folder, a .gguf file or a hub id instead of the preset's model."""
    env: str | tuple[str, ...] = ""
    """Your own environment: a file (maze.py), module:Class, or one of those that come along;
    empty: programs that solve the preset's tasks. Several are trained in together, each with a name
    of yours if you like (easy=maze.py). See docs/environments.md."""
    env_weights: tuple[float, ...] = ()
    """Of several environments, how often tasks of each are drawn: 2 1 is twice as often of the
    first. Empty: alike."""
    env_args: tuple[str, ...] = ()
    """Its arguments, as name=value; of several NAME.name=value, and NAME.agent.max_turns=2 for a
    limit of one of them."""
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
    vision: VisionOptions = field(default_factory=VisionOptions)
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
        if self.env_weights or len(self.envs) > 1:
            resolve_name(CHECK_MIX)(self)
        if self.deterministic and not self.rl.is_synchronous:
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
        if self.rl.truncates:
            resolve_name(CHECK_TRUNCATION)(self)
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
    def envs(self) -> tuple[str, ...]:
        """The environments that `env` names, one by one; none where it is empty."""
        return self.env if isinstance(self.env, tuple) else (self.env,) * bool(self.env)

    @property
    def saves_in_background(self) -> bool:
        """Say whether training goes on while a checkpoint is written."""
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
            from nanorl.options.store_address import (
                StoreAddress,  # here: few options need numpy
            )

            StoreAddress.parse(self.store)

    @property
    def store_address(self) -> str:
        """The address of the store of RL's rollouts; those of the run's own evaluations are in
        evaluations.sqlite."""
        return self.store or str(self.run_dir / "rollouts.sqlite")

    @property
    def run_dir(self) -> Path:
        return self.out or Path("runs") / f"{self.preset}-seed{self.seed}"

    @property
    def http_store(self) -> Path:
        """The file in which recorded answers lie."""
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
