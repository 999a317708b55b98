"""The options of a run in several processes: its roles, the trainer split, the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanoengine.parallel.layout import LayoutConfig
from nanorl.bounds import NATURAL, Bound, check_record

BackendName = Literal["inline", "local", "ray"]
Placement = Literal["separate", "colocated"]
TransportName = Literal["auto", "shm", "cuda_ipc", "dist", "disk"]


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The processes and machines in which the roles of a run live: trainer ranks, rollout replicas,
    agents, the store."""

    backend: BackendName = "inline"
    """inline: all in this process, the fastest on a laptop. local: a process each on this machine.
    ray: on one machine or many (the extra `ray`)."""
    address: str = ""
    """With ray: the cluster to join, "auto" or host:port; empty starts one on this machine."""
    placement: Placement = "separate"
    """separate: trainer, replicas, reference and critic have GPUs of their own, one a process, and
    rollouts may go on during a step. colocated: trainer process i and replica process i share a
    GPU and take turns, the one asleep while the other works. On CPUs both reserve nothing."""
    judges: int = 1
    """Processes for each model that judges (--reward judge with a folder), an engine in each;
    questions are shared out among them. On GPUs each has one to itself."""
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
            judges=Bound(1, 1024, "so many processes"),
            heartbeat_s=Bound(0.05, 3600, "faster only costs time"),
            hang_s=Bound(0.5, 86400, "a longer silence is a night lost"),
            start_s=Bound(1, 86400, "a longer wait is a night lost"),
        )
        if self.address and self.backend != "ray":
            raise ValueError(
                f"--cluster.address {self.address}: only --cluster.backend ray joins a cluster"
            )
        if self.judges > 1 and self.backend == "inline":
            raise ValueError(
                f"--cluster.judges {self.judges}: needs processes of its own; add "
                "--cluster.backend local, or ray"
            )


@dataclass(frozen=True, kw_only=True)
class LearnerConfig(LayoutConfig):
    """The split of the trainer over processes (docs/parallelism.md)."""

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
