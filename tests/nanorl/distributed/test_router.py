"""The router loses no request and leaks no count, whatever its replicas and callers do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import turns

from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_clients import ReplicaLost
from nanorl.distributed.roles.router import NoReplica, Router

PROMPT = list(range(40))


def token(ids: list[int], seed: int, position: int) -> int:
    return (sum(ids) * 31 + seed * 7 + position) % 1000


def expected(ids: list[int], params: SamplingParams) -> list[int]:
    return [token(ids, params.seed, i) for i in range(params.max_tokens)]


@dataclass(eq=False)
class FakeReplica:
    """One token each time its event loop turns; knows who is there and whom it has answered."""

    is_dead: bool = False
    is_drained: bool = False
    active: set[str] = field(default_factory=set)
    answered: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    num_brought: int = 0  # tokens that requests had when they came

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        assert name not in self.active, "asked twice at a time"
        self.prompts.append(ids)
        tokens = list(sampled.ids) if sampled is not None else []
        self.num_brought += len(tokens)
        self.active.add(name)
        try:
            while len(tokens) < params.max_tokens:
                if self.is_drained:
                    return _output(tokens, "abort")
                if params.seed == 13:
                    raise RuntimeError("a request that no replica can serve")
                await asyncio.sleep(0)
                if self.is_dead:
                    raise ReplicaLost("killed")
                tokens.append(token(ids, params.seed, len(tokens)))
            self.answered.append(name)
            return _output(tokens, "length")
        finally:
            self.active.remove(name)


def _output(tokens: list[int], reason: str) -> Output:
    return Output(ids=list(tokens), finish_reason=reason)  # type: ignore[arg-type]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(), 60)

    asyncio.run(main())


def make(count: int, **options: float) -> tuple[Router, dict[str, FakeReplica]]:
    router = Router(**options)  # type: ignore[arg-type]
    replicas = {f"r{i}": FakeReplica() for i in range(count)}
    router.set_replicas(replicas)
    return router, replicas


def all_quiet(router: Router) -> bool:
    counters = router.counters()
    is_even = (
        counters["num_requests"] == counters["num_finished"] + counters["num_failed"]
        and counters["num_waiting"] == 0
    )
    return is_even and not any(v for name, v in counters.items() if name.startswith("load/"))


# -- where a request goes ------------------------------------------------------------------------


def test_strangers_spread_and_relatives_meet() -> None:
    async def scenario() -> None:
        router, replicas = make(3)
        strangers = [[i] * 40 for i in range(6)]
        await asyncio.gather(*(router.generate(ids, SamplingParams()) for ids in strangers))
        assert [len(replica.prompts) for replica in replicas.values()] == [2, 2, 2]
        group = [router.generate(PROMPT, SamplingParams(seed=i)) for i in range(5)]
        outputs = await asyncio.gather(*group)
        homes = [name for name, replica in replicas.items() if PROMPT in replica.prompts]
        assert len(homes) == 1
        later = PROMPT + outputs[3].ids + [7, 7]
        await router.generate(later, SamplingParams())
        assert later in replicas[homes[0]].prompts
        assert router.counters()["num_kept"] == 5
        assert all_quiet(router)

    run(scenario)


def test_a_turn_returns_to_the_replica_that_sampled_the_turn_before() -> None:
    """Two members of a group were parted by the gate: the prompt says nothing then, the rest of the
    text does."""

    async def scenario() -> None:
        router, replicas = make(2, gate=0)
        members = [router.generate(PROMPT, SamplingParams(seed=i)) for i in range(2)]
        outputs = await asyncio.gather(*members)
        assert [len(replica.prompts) for replica in replicas.values()] == [1, 1]
        for i in (0, 1, 0, 1):
            await router.generate(PROMPT + outputs[i].ids + [i] * 9, SamplingParams())
        assert [len(replica.prompts) for replica in replicas.values()] == [3, 3]

    run(scenario)


def test_the_gate_lets_go_of_a_prefix_whose_replica_is_overloaded() -> None:
    async def scenario() -> None:
        router, replicas = make(2, gate=3)
        group = [
            asyncio.create_task(router.generate(PROMPT, SamplingParams(seed=i))) for i in range(10)
        ]
        await asyncio.sleep(0)
        loads = [len(replica.active) for replica in replicas.values()]
        assert sum(loads) == 10 and max(loads) - min(loads) <= 4 and min(loads) > 0
        await asyncio.gather(*group)
        assert router.counters()["num_let_go"] > 0 and all_quiet(router)

    run(scenario)


def test_what_is_known_of_prefixes_is_bounded() -> None:
    async def scenario() -> None:
        router, _ = make(2, max_prefixes=5)
        for i in range(20):
            await router.generate([i] * 64, SamplingParams())
        assert len(router._homes) == 5

    run(scenario)


# -- replicas that come and go -------------------------------------------------------------------


def test_requests_of_a_dead_replica_and_of_a_drained_one_go_elsewhere() -> None:
    async def scenario() -> None:
        router, replicas = make(3)
        params = [SamplingParams(seed=i, max_tokens=20) for i in range(9)]
        tasks = [asyncio.create_task(router.generate([i] * 20, p)) for i, p in enumerate(params)]
        await turns(6)
        replicas["r0"].is_dead = True
        replicas["r1"].is_drained = True
        outputs = await asyncio.gather(*tasks)
        for i, (output, p) in enumerate(zip(outputs, params, strict=True)):
            assert output.ids == expected([i] * 20, p)
        counters = router.counters()
        assert counters["num_lost"] >= 3 and counters["num_drained"] >= 3
        assert counters["num_open"] == 1 and replicas["r2"].num_brought >= 3 * 5
        assert all_quiet(router)
        replicas["r0"].is_dead = False
        router.set_replicas({"r0": replicas["r0"]})
        assert (await router.generate(PROMPT, params[1])).ids == expected(PROMPT, params[1])

    run(scenario)


def test_a_request_waits_for_a_replica_and_not_forever() -> None:
    async def scenario() -> None:
        router, replicas = make(1, wait_s=0.05)
        replicas["r0"].is_dead = True
        with pytest.raises(NoReplica, match=r"within 0\.05 s; known, but lost or drained: r0"):
            await router.generate(PROMPT, SamplingParams())
        patient, _ = make(0, wait_s=60)
        task = asyncio.create_task(patient.generate(PROMPT, SamplingParams()))
        await asyncio.sleep(0)
        assert patient.counters()["num_waiting"] == 1
        patient.set_replicas({"late": FakeReplica()})
        assert (await task).ids == expected(PROMPT, SamplingParams())
        assert all_quiet(router) and all_quiet(patient)

    run(scenario)


def test_a_restarted_replica_of_the_same_name_is_not_blamed_for_the_old_one() -> None:
    async def scenario() -> None:
        router, replicas = make(1, wait_s=5)
        task = asyncio.create_task(router.generate(PROMPT, SamplingParams()))
        await asyncio.sleep(0)
        router.set_replicas({"r0": FakeReplica()})
        replicas["r0"].is_dead = True
        assert (await task).ids == expected(PROMPT, SamplingParams())
        assert router.counters()["num_open"] == 1

    run(scenario)


def test_a_final_abort_is_an_answer() -> None:
    """The engine ends a request whose grammar broke; another replica would do the same."""

    class Broken(FakeReplica):
        async def generate(self, *_: object) -> Output:
            return Output(finish_reason="abort", stop_reason="the grammar is too deep")

    async def scenario() -> None:
        router = Router()
        router.set_replicas({"r0": Broken()})
        output = await router.generate(PROMPT, SamplingParams())
        assert output.finish_reason == "abort" and router.counters()["num_open"] == 1

    run(scenario)


@pytest.mark.parametrize("wrong", ["gate=-1", "block_size=0", "max_prefixes=-1"])
def test_a_router_refuses_sizes_that_mean_nothing(wrong: str) -> None:
    name, value = wrong.split("=")
    with pytest.raises(ValueError, match=wrong):
        Router(**{name: int(value)})
    Router(gate=0, block_size=1, max_prefixes=0)


def test_what_a_drain_cut_short_is_counted_once_a_request() -> None:
    async def scenario() -> None:
        router, replicas = make(1)
        tasks = [
            asyncio.create_task(router.generate([i] * 20, SamplingParams(max_tokens=20)))
            for i in range(3)
        ]
        await turns(6)
        replicas["r0"].is_drained = True
        router.set_replicas(replicas | {"r1": FakeReplica()})
        await asyncio.gather(*tasks)
        counters = router.counters()
        assert (counters["num_drained"], counters["num_lost"], counters["num_requests"]) == (
            3,
            0,
            3,
        )

    run(scenario)


# -- everything at once --------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 15)),  # 13 raises
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("kill"), st.integers(0, 9)),
        st.tuples(st.just("drain"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("add"), st.just(0)),
        st.tuples(st.just("turn"), st.integers(1, 9)),
    ),
    max_size=60,
)


class Storm:
    """Random callers and random replicas around one router."""

    def __init__(self) -> None:
        self.router = Router(gate=1, wait_s=50, block_size=4, max_prefixes=20)
        self.named: dict[str, FakeReplica] = {}
        self.replicas: list[FakeReplica] = []
        self.tasks: list[asyncio.Task[Output]] = []
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.cancelled: set[int] = set()

    async def do(self, event: str, number: int) -> None:
        names = sorted(self.named)
        if event == "ask":
            ids, params = [number % 3] * 10, SamplingParams(seed=number, max_tokens=4 + number)
            self.asked.append((ids, params))
            self.tasks.append(asyncio.create_task(self.router.generate(ids, params)))
        elif event == "cancel" and number < len(self.tasks):
            if self.tasks[number].cancel():
                self.cancelled.add(number)
        elif event == "add":
            self.add()
        elif event == "turn":
            await turns(number)
        elif number < len(names):
            self.hit(event, names[number])

    def hit(self, event: str, name: str) -> None:
        if event == "kill":
            self.named[name].is_dead = True
        elif event == "drain":
            self.named[name].is_drained = True
        else:
            del self.named[name]
            self.router.set_replicas(self.named)

    def add(self) -> None:
        name = f"r{len(self.replicas) % 10}"  # sometimes the place of another
        self.named[name] = FakeReplica()
        self.replicas.append(self.named[name])
        self.router.set_replicas(self.named)

    async def end(self) -> None:
        self.add()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for number, (task, (ids, params)) in enumerate(zip(self.tasks, self.asked, strict=True)):
            if number in self.cancelled:
                assert task.cancelled()
            elif params.seed == 13:
                assert isinstance(task.exception(), RuntimeError)
            else:
                assert task.result().ids == expected(ids, params)
        answered = [name for replica in self.replicas for name in replica.answered]
        assert len(answered) == len(set(answered)), "answered twice"
        assert not any(replica.active for replica in self.replicas)
        assert all_quiet(self.router)


@settings(max_examples=150, deadline=None)
@given(EVENTS)
def test_every_request_ends_once_in_any_storm(events: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        storm = Storm()
        for event, number in events:
            await storm.do(event, number)
        await storm.end()

    run(scenario)
