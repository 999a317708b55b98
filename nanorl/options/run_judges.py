"""The judges of a run whose models lie in folders: where each is loaded, and what cannot be.

    inline        an engine in the process of the run
    local, ray    a role of its own, `cluster.judges` processes for each model; rewards ask it from
                  the collector's process

`--reward judge` is asked there also where the episodes are played in environment workers. A reward
of the user's that holds a judge runs where the user's code runs: workers know no roles.
Left out: judges at addresses, which somebody else runs, and those that an environment's own `score`
asks, whose engine stays in the process of the episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nanoengine.parallel.device import resolve_device
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.judged import judges_of
from nanorl.envs.rewards.judge_models import FolderJudge, JudgeModel
from nanorl.envs.rewards.load import REWARDS
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import num_env_workers


@dataclass(frozen=True, kw_only=True)
class JudgeSeat:
    """One process that a run needs for the model of a judge."""

    name: str
    model: JudgeModel
    timeout_s: float
    """The longest that a reward waits for a reply."""


def folder_judges(kind: EnvKind) -> list[FolderJudge]:
    """The judges of its reward whose models lie in folders."""
    found = (judge.folder_judge for judge in judges_of(kind))
    return [judge for judge in found if judge is not None]


def judge_seats(config: RunConfig, kind: EnvKind) -> list[JudgeSeat]:
    """The processes of judges that a run on processes needs: rewards that name the same model share
    its engines."""
    limits: dict[JudgeModel, float] = {}
    for judge in folder_judges(kind):
        limits[judge.model] = max(limits.get(judge.model, 0.0), judge.limits.timeout_s)
    pairs = [pair for pair in limits.items() for _ in range(config.cluster.judges)]
    return [
        JudgeSeat(name=f"judge-{index}", model=model, timeout_s=timeout_s)
        for index, (model, timeout_s) in enumerate(pairs)
    ]


def settle_judges(config: RunConfig, kind: EnvKind) -> None:
    """Load the models that this process asks itself, so that sizes are chosen by the memory that is
    left. ValueError for judges that a run on processes cannot have."""
    judges = folder_judges(kind)
    is_hosted = num_env_workers(config) > 0 and config.reward not in REWARDS
    if config.cluster.backend == "inline":
        for judge in () if is_hosted else judges:
            judge.load()
        return
    _check_seats(config, judges, is_hosted)


def _check_seats(config: RunConfig, judges: Sequence[FolderJudge], is_hosted: bool) -> None:
    backend = f"--cluster.backend {config.cluster.backend}"
    if config.cluster.judges > 1 and not judges:
        raise ValueError(
            f"--cluster.judges {config.cluster.judges}: no reward of this run has a judge with a "
            "folder; add --reward judge --reward-args folder=DIR, or leave it out"
        )
    for judge in judges:
        place = judge.model.device
        if is_hosted:
            raise ValueError(
                f"--reward {config.reward} with {backend}: the judge {judge.name} gets a process "
                "of its own, which a reward in environment workers cannot reach; add "
                "--env-workers 0, which runs your reward in the collector's process, or give the "
                "judge the address= of a server (python -m nanoinfer.server)"
            )
        if place.startswith("cuda:"):
            raise ValueError(
                f"device={place} of the judge {judge.name} with {backend}: each process gets "
                "devices of its own; say device=cuda, or device=cpu"
            )
        if place == "cuda" and resolve_device(config.device).type == "cpu":
            raise ValueError(
                f"device=cuda of the judge {judge.name} with --device {config.device}: this run is "
                "on the CPU and reserves no GPUs; say device=cpu, or --device cuda"
            )
