"""What a run asks of its roles, wherever they are: `Roles`. inline_roles.py and cluster.py answer.

Methods of the trainer's engine are plain functions that may take minutes: a run calls them in
`optimizer_thread`. Everything else is awaited on the run's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

from nanoengine.config import EngineConfig
from nanoengine.heads.scorer import Policy
from nanorl.distributed.roles.collector_role import CollectorRole
from nanorl.distributed.roles.role import Role
from nanorl.learner import Publisher
from nanorl.observability.monitor.monitor_control import ClusterControl
from nanorl.observability.store import RolloutStore
from nanorl.scorers.scored_learner import ScoringEngine
from nanorl.scorers.value_critic import ValueEstimator


class RunEngine(ScoringEngine, Protocol):
    """The trainer's engine with all that a run does beside steps."""

    def restart(self, config: EngineConfig) -> None: ...

    def keep_average(self, rate: float) -> None:
        """Keep an average of the weights over the steps (nanoengine/state/weight_average.py)."""
        ...

    def save(self, path: Path, cursor: Mapping[str, Any], *, in_background: bool = False) -> object:
        """Write a checkpoint; in the background it returns when the state is copied."""
        ...

    def wait_saved(self) -> object:
        """Wait for what is written in the background; raises what it failed of."""
        ...

    def load(self, path: Path) -> Mapping[str, Any]: ...

    def fingerprints(self) -> dict[str, str]:
        """Each weight's fingerprint by Hugging Face name (nanoengine/state/fingerprint.py)."""
        ...

    def write_model(self, folder: Path, extra_files_from: Path | None = None) -> None:
        """The weights as a Hugging Face folder, whole or not at all, in place of what was there."""
        ...

    def write_adapter(self, folder: Path, base_name: str) -> None:
        """The adapter as a folder in PEFT's format, in place of what was there; only where the run
        trains one (`lora.rank`)."""
        ...


class RunCritic(ValueEstimator, Protocol):
    """The critic with its checkpoints."""

    def save(self, path: Path) -> str:
        """Write a checkpoint under `path`; returns its name there."""
        ...

    def load(self, path: Path) -> None: ...


class Roles(Protocol):
    """The engines, agents and store of a run."""

    say: Callable[[str], None]
    """Tells the user what died and was started again; the run sets it."""

    @property
    def engine(self) -> RunEngine: ...

    @property
    def publisher(self) -> Publisher: ...

    @property
    def optimizer_thread(self) -> Executor: ...

    @property
    def collector(self) -> Role[CollectorRole]: ...

    @property
    def store(self) -> Role[RolloutStore]: ...

    @property
    def control(self) -> ClusterControl | None:
        """Tells of the processes and changes their number, where there are several."""
        ...

    async def start(self) -> None:
        """Start what belongs to the running event loop; `close_loop` ends it."""
        ...

    async def open_reference(self, folders: Sequence[Path]) -> Policy:
        """The reference of that Hugging Face folder, or of several (references.py)."""
        ...

    async def open_critic(self, scratch: Path) -> RunCritic:
        """A critic that starts as a copy of the policy, which may be written to `scratch`."""
        ...

    async def idle_shares(self) -> dict[str, float]:
        """The shares of the time since the last call in which the roles of each kind did not work,
        as `idle_trainer`, `idle_replicas` and so on; nothing where all are in one process."""
        ...

    async def trainer_death(self) -> str:
        """Wait until the trainer dies alone; returns how."""
        ...

    async def restart_trainer(self) -> None:
        """A new trainer with the weights that the run began with, after the old one died."""
        ...

    async def close_loop(self) -> None: ...

    def close(self) -> None: ...
