"""Where roles are placed and whose turn it is. The GPUs are declared and need not be there."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from layout_cases import write_model
from placed_actors import Placed
from tiny_shapes import DENSE

from nanoengine.config import EngineConfig
from nanoengine.parallel.layout import Layout
from nanorl.distributed.roles.device_turns import DeviceTurns, Hosts
from nanorl.distributed.roles.placement import Places, RolePlace, transport_kind
from nanorl.distributed.roles.policy_role import (
    PolicyRank,
    PolicyRecipe,
    RankedEngine,
    start_trainer,
)
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe
from nanorl.options.cluster_config import ClusterConfig, LearnerConfig, RolloutConfig
from nanorl.options.run_config import RunConfig
from nanosched import ActorHandle, PlacementGroup, Resources, Scheduler, WorkerGroup

pytestmark = pytest.mark.xdist_group("placement")


def config(placement: str, algorithm: str = "grpo", **sizes: int) -> RunConfig:
    """Of a run with `dp` trainer processes and `replicas` of `tp` each."""
    cluster = ClusterConfig(backend="local", placement=placement)  # type: ignore[arg-type]
    return RunConfig(
        cluster=cluster,
        learner=LearnerConfig(dp=sizes.get("dp", 1)),
        rollout=RolloutConfig(replicas=sizes.get("replicas", 1), tp=sizes.get("tp", 1)),
    ).with_algorithm(algorithm)


def local(num_gpus: int) -> Scheduler:
    return Scheduler(backend="local", resources=Resources(num_cpus=1, num_gpus=num_gpus))


def started(sched: Scheduler, place: RolePlace) -> WorkerGroup[Placed]:
    return sched.group(Placed, [((), {}) for _ in place.bundles], **place.of_all)


def gpus(sched: Scheduler, group: WorkerGroup[Placed]) -> list[str]:
    return sched.get(group.call(Placed.gpus), timeout_s=60)


def test_separate_roles_have_whole_gpus_of_their_own_and_return_to_them() -> None:
    with local(4) as sched:
        places = Places(sched, config("separate", dp=2, tp=2), has_gpus=True)
        assert sched.available().num_gpus == 0  # also before anybody has started
        trainer = started(sched, places.trainer)
        replica = started(sched, places.replica("replica-0"))
        before = gpus(sched, trainer)
        assert sorted([*before, *gpus(sched, replica)]) == ["0", "1", "2", "3"]
        trainer.kill()
        assert gpus(sched, started(sched, places.trainer)) == before


def test_colocated_trainer_and_replica_processes_share_their_gpus() -> None:
    with local(3) as sched:
        places = Places(sched, config("colocated", dp=2, replicas=3), has_gpus=True)
        trainer = started(sched, places.trainer)
        replicas = [started(sched, places.replica(f"replica-{index}")) for index in range(3)]
        assert gpus(sched, trainer) == ["0", "1"]
        assert [gpus(sched, one) for one in replicas] == [["0"], ["1"], ["2"]]
        assert sched.available().num_gpus == 0


def test_a_critic_has_a_place_either_way() -> None:
    """Colocated, three processes share one GPU at the same time."""
    with local(1) as sched:
        places = Places(sched, config("colocated", "ppo"), has_gpus=True)
        roles = [places.trainer, places.replica("replica-0"), *places.scorers.values()]
        assert len(roles) == 3
        alive = [started(sched, one) for one in roles]
        assert {name for one in alive for name in gpus(sched, one)} == {"0"}
    with local(len(roles)) as sched:
        places = Places(sched, config("separate", "ppo"), has_gpus=True)
        roles = [places.trainer, places.replica("replica-0"), *places.scorers.values()]
        alive = [started(sched, one) for one in roles]
        assert len({name for one in alive for name in gpus(sched, one)}) == len(roles)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("separate", r"needs 7 GPUs \(3 for the trainer, 2 for each of 2 replicas\), and 3 are"),
        ("colocated", r"needs 4 GPUs \(.* 3 processes, the replicas 4\), and 3 are free"),
    ],
)
def test_a_layout_that_needs_more_gpus_than_there_are_is_refused_at_once(
    placement: str, message: str
) -> None:
    with local(3) as sched:
        with pytest.raises(ValueError, match=message):
            Places(sched, config(placement, dp=3, replicas=2, tp=2), has_gpus=True)
        assert sched.available().num_gpus == 3  # nothing is kept


@pytest.mark.parametrize("placement", ["separate", "colocated"])
def test_a_replica_more_needs_a_gpu_more_and_one_that_leaves_gives_it_back(placement: str) -> None:
    with local(3) as sched:
        places = Places(sched, config(placement, replicas=2), has_gpus=True)
        first = [places.replica("replica-0"), places.replica("replica-1")]
        assert places.replica("replica-0") is first[0]  # a successor's
        num_more = 3 - (3 if placement == "separate" else 2)
        for index in range(num_more):
            places.replica(f"more-{index}")
        with pytest.raises(ValueError, match="one more replica needs 1 GPUs, and 0 are free"):
            places.replica("replica-9")
        places.free("replica-1")
        left = {"separate": "2", "colocated": "1"}
        assert gpus(sched, started(sched, places.replica("replica-9"))) == [left[placement]]


def test_a_judge_has_a_gpu_of_its_own_either_way_or_none_where_it_asks_for_none() -> None:
    judges = {"judge-0": True, "judge-1": False, "judge-2": True}
    for placement, num_gpus in (("separate", 4), ("colocated", 3)):
        with local(num_gpus) as sched:
            places = Places(sched, config(placement), has_gpus=True, judges=judges)
            roles = [places.trainer, places.replica("replica-0"), *places.judges.values()]
            assert sched.available().num_gpus == 0
            alive = [started(sched, one) for one in roles]
            seen = [gpus(sched, one) for one in alive]
            others, (first, none, last) = seen[:2], seen[2:]
            assert places.judges["judge-1"].num_gpus == 0 and none in ([], [""])
            taken = {name for one in others for name in one}
            assert len({*taken, *first, *last}) == num_gpus and first != last
            alive[2].kill()
            assert gpus(sched, started(sched, places.judges["judge-0"])) == first  # a successor


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            "separate",
            r"4 GPUs \(1 for the trainer, 2 for judges, 1 .*, and 2 are free; .* device=cpu",
        ),
        ("colocated", r"3 GPUs \(.*, judges 2 of their own\), and 2 are free; .* device=cpu"),
    ],
)
def test_judges_for_which_there_are_too_few_gpus_are_refused_at_once(
    placement: str, message: str
) -> None:
    judges = {"judge-0": True, "judge-1": True}
    with local(2) as sched:
        with pytest.raises(ValueError, match=message):
            Places(sched, config(placement), has_gpus=True, judges=judges)
        assert sched.available().num_gpus == 2
        on_cpus = Places(sched, config(placement), has_gpus=False, judges=judges)
        assert [one.num_gpus for one in on_cpus.judges.values()] == [0, 0]


def test_on_cpus_any_layout_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    reserve = Scheduler.placement_group

    def spy(self: Scheduler, *args: Any) -> PlacementGroup:
        asked.append(args)
        return reserve(self, *args)

    monkeypatch.setattr(Scheduler, "placement_group", spy)
    with local(0) as sched:
        for placement in ("separate", "colocated"):
            places = Places(sched, config(placement, dp=4, replicas=9), has_gpus=False)
            assert [places.replica(f"replica-{index}").num_gpus for index in range(9)] == [0] * 9
    assert {(bundle, args[1]) for args in asked for bundle in args[0]} == {(Resources(), "SPREAD")}


@pytest.mark.parametrize(
    ("cluster", "replicas", "has_gpus", "kind"),
    [
        ({"backend": "local"}, 2, False, "shm"),
        ({"backend": "local"}, 1, True, "shm"),
        ({"backend": "local", "placement": "colocated"}, 1, True, "cuda_ipc"),
        ({"backend": "local", "placement": "colocated"}, 2, True, "shm"),
        ({"backend": "ray"}, 1, True, "dist"),
        ({"backend": "ray", "placement": "colocated"}, 1, True, "disk"),
        ({"backend": "ray", "transport": "shm"}, 1, False, "shm"),
    ],
)
def test_weights_take_the_fastest_way_that_reaches_all_replicas(
    cluster: dict[str, Any], replicas: int, has_gpus: bool, kind: str
) -> None:
    options = RunConfig(cluster=ClusterConfig(**cluster), rollout=RolloutConfig(replicas=replicas))
    assert transport_kind(options, has_gpus=has_gpus) == kind


def test_a_transport_that_the_placement_does_not_allow_is_refused() -> None:
    apart = ClusterConfig(backend="local", transport="cuda_ipc")
    with pytest.raises(ValueError, match="cuda_ipc: only a replica that shares the first GPU"):
        transport_kind(RunConfig(cluster=apart), has_gpus=True)
    together = ClusterConfig(backend="ray", transport="dist", placement="colocated")
    with pytest.raises(ValueError, match="NCCL does not connect two processes of one GPU"):
        transport_kind(RunConfig(cluster=together), has_gpus=True)
    assert transport_kind(RunConfig(cluster=together), has_gpus=False) == "dist"


def test_a_role_that_does_not_see_the_models_folder_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"nowhere is not a folder on {socket.gethostname()}: "):
        Replica(ReplicaRecipe(folder=tmp_path / "nowhere"))


# -- turns ---------------------------------------------------------------------------------------


class Told:
    """What was asked for, in order; each request takes a moment."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def note(self, what: str) -> None:
        self.log.append(what)
        await asyncio.sleep(0)

    def turns(self) -> DeviceTurns:
        names = ("sleep", "wake", "fetch", "park")
        return DeviceTurns(Hosts(**{name: partial(self.note, name) for name in names}))


def test_the_trainers_memory_comes_after_the_replicas_is_free_and_goes_before_they_wake() -> None:
    told = Told()

    async def train() -> None:
        with pytest.raises(KeyError):
            async with told.turns().of_trainer():
                await told.note("train")
                raise KeyError

    asyncio.run(train())
    assert told.log == ["sleep", "fetch", "train", "park", "wake"]


def test_a_replica_starts_between_the_trainers_turns() -> None:
    told = Told()

    async def main() -> None:
        turns = told.turns()

        async def train() -> None:
            async with turns.of_trainer():
                await told.note("train")

        async def start() -> None:
            async with turns.of_replica():
                await told.note("start")
                await told.note("started")

        await asyncio.gather(train(), start(), start(), train())

    asyncio.run(main())
    turn = ["sleep", "fetch", "train", "park", "wake"]
    assert told.log == [*turn, "start", "start", "started", "started", *turn]


def test_a_parked_trainer_saves_in_its_turn_and_parks_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", DENSE)
    recipe = PolicyRecipe(
        folder=folder,
        config=EngineConfig(dtype="fp32"),
        layout=Layout(),
        split=LearnerConfig(),
        device="cpu",
        threads=1,
    )

    async def main() -> None:
        with Scheduler(backend="inline") as sched:
            group = sched.group(PolicyRank, [((recipe, 0), {})])
            await start_trainer(group)
            (rank,) = group.handles
            ask = partial(ask_rank, rank)
            turns = DeviceTurns(
                Hosts(
                    sleep=ask_nobody,
                    wake=ask_nobody,
                    fetch=partial(ask, PolicyRank.reload),
                    park=partial(ask, PolicyRank.offload),
                )
            )
            loop = asyncio.get_running_loop()
            engine = RankedEngine(group, recipe, loop, turn=turns.of_trainer)
            await ask(PolicyRank.offload)
            await loop.run_in_executor(None, engine.save, tmp_path / "checkpoints", {"step": 7})
            with pytest.raises(Exception, match="the optimizer is offloaded"):
                await ask(PolicyRank.save, tmp_path / "more", {})
            cursor = await loop.run_in_executor(None, engine.load, tmp_path / "checkpoints")
            assert cursor == {"step": 7}

    asyncio.run(main())


async def ask_nobody() -> None:
    pass


async def ask_rank(rank: ActorHandle[PolicyRank], method: Any, *args: Any) -> Any:
    return await rank.call(method, *args)
