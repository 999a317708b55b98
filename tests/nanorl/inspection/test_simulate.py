"""The simulator against closed forms: constant lengths, one replica, times that can be added by
hand."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from nanoinfer.params import SamplingParams
from nanorl.inspection.simulate.clock import run_virtually
from nanorl.inspection.simulate.lengths import clipped_mean, draw_length, mean_length
from nanorl.inspection.simulate.picture import draw, occupancy
from nanorl.inspection.simulate.rollouts import END_S
from nanorl.inspection.simulate.simulated_learner import minibatch_times
from nanorl.inspection.simulate.simulated_replica import RequestSize, SharedCores, SimulatedReplica
from nanorl.inspection.simulate.simulation import choose_quantum, simulate, with_half_quantum
from nanorl.inspection.simulate.simulation_config import (
    AnswerLengths,
    EngineTimes,
    GpuLayout,
    PhaseTimes,
    RolloutLoad,
    SimulationConfig,
    scaled,
)
from nanorl.types import Rollout

NEAR = 1e-4  # relative; a simulated step begins 1e-7 s after the request that wakes the engine
PHASES = PhaseTimes(old_logp_s=0.5, reference_s=0.25, update_s=3.0, other_s=0.125, sync_s=0.0625)
ALL_PHASES = 0.5 + 0.25 + 3.0 + 0.125 + 0.0625


def make(
    *,
    num_tasks: int = 1,
    group_size: int = 1,
    answer: float = 40,
    engine: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    **options: Any,
) -> SimulationConfig:
    """Constant answers, token by token."""
    given: dict[str, Any] = {
        "cluster": GpuLayout(replicas=1, trainer_gpus=1),
        "phases": PHASES,
        "quantum": 1,
        **options,
    }
    return SimulationConfig(
        workload=RolloutLoad(
            tasks_per_step=num_tasks,
            group_size=group_size,
            prompt=30,
            answer=AnswerLengths(kind="constant", mean=answer),
            **(workload or {}),
        ),
        engine=EngineTimes(**(engine or {})),
        **given,
    )


ONLY_STEPS: dict[str, Any] = {"step_s": 0.1, "seq_s": 0.0, "kv_s": 0.0, "prefill_s": 0.0}
ONE_BY_ONE: dict[str, Any] = {**ONLY_STEPS, "max_num_seqs": 1}


# -- the clock ---------------------------------------------------------------------------------


def test_the_virtual_clock_jumps_and_keeps_the_order() -> None:
    seen: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        await asyncio.gather(sleep("c", 7e5), sleep("a", 1.5), sleep("b", 2.0), sleep("now", 0))
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(7e5)
    assert [name for name, _ in seen] == ["now", "a", "b", "c"]
    assert [at for _, at in seen] == pytest.approx([0.0, 1.5, 2.0, 7e5])


def test_a_simulation_in_which_nothing_can_happen_any_more_says_so() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="stuck"):
        run_virtually(main())


# -- one engine --------------------------------------------------------------------------------


def by_hand(engine: EngineTimes, prompt: int, answer: int) -> float:
    """A lone request: a prefill that gives the first token, then a step for each further one."""
    decodes = sum(
        engine.step_s + engine.seq_s + engine.kv_s * (prompt + k) for k in range(1, answer)
    )
    return engine.step_s + engine.prefill_s * prompt + decodes


def test_a_lone_request_takes_what_its_steps_add_up_to() -> None:
    config = make(engine={"kv_s": 1e-5, "seq_s": 1e-3, "prefill_s": 1e-3})
    result = simulate(config)
    wanted = by_hand(config.engine, 30, 40)
    assert result.mean("wait_s") == pytest.approx(wanted, rel=NEAR)
    assert result.mean("rollout_s") == pytest.approx(wanted, rel=NEAR)  # the real collector's own
    assert result.step_s == pytest.approx(wanted + ALL_PHASES, rel=NEAR)


def test_a_batch_shares_each_step_and_a_group_its_prompt() -> None:
    """Two groups of two: the first members prefill together, the others wait for that step and
    take all but the last token of their prompts from the cache."""
    engine = EngineTimes(kv_s=1e-5, seq_s=1e-3, prefill_s=1e-3)
    config = make(num_tasks=2, group_size=2, answer=3, engine={})
    config = replace(config, engine=engine)
    a, b, c, d = engine.step_s, engine.seq_s, engine.kv_s, engine.prefill_s
    steps = [
        a + d * 60,  # two prefills
        a + 2 * (b + c * 31) + 2 * (b + c * 30),  # second tokens; the others' first ones
        a + 2 * (b + c * 32) + 2 * (b + c * 31),
        a + 2 * (b + c * 32),
    ]
    assert simulate(config).mean("wait_s") == pytest.approx(sum(steps), rel=NEAR)


def test_a_long_prompt_is_prefilled_in_chunks_of_the_step_budget() -> None:
    engine = {"step_s": 0.1, "prefill_s": 0.01, "max_batch_tokens": 8, "max_num_seqs": 8}
    result = simulate(make(answer=1, engine=engine))
    assert result.mean("wait_s") == pytest.approx(4 * 0.1 + 30 * 0.01, rel=NEAR)


@pytest.mark.parametrize("quantum", [2, 5, 20])
def test_a_quantum_stands_for_that_many_real_steps(quantum: int) -> None:
    """Of a lone request only the place of the prompt's last token is rounded."""
    config = make(answer=400, engine={"kv_s": 1e-4, "seq_s": 1e-3, "prefill_s": 1e-4})
    exact = by_hand(config.engine, 30, 400)
    result = simulate(replace(config, quantum=quantum))
    assert result.mean("wait_s") == pytest.approx(exact, rel=2e-3)


def test_a_member_that_waits_for_its_groups_prompt_loses_a_step_and_no_quantum() -> None:
    config = make(group_size=2, answer=100, engine=ONLY_STEPS)
    assert simulate(config).mean("wait_s") == pytest.approx(101 * 0.1, rel=NEAR)
    wait_s = simulate(replace(config, quantum=10)).mean("wait_s")
    assert wait_s == pytest.approx(101 * 0.1, rel=0.02)


def ends(times: EngineTimes, quantum: int, *requests: tuple[float, int], new_at: float) -> Any:
    """When requests of 30 tokens, given by their (second, tokens), have their answers from one
    replica, whose weights change at `new_at`."""

    async def ask(replica: SimulatedReplica, number: int, at: float) -> float:
        await asyncio.sleep(at)
        first = 1000 * number
        ids = list(range(first, first + math.ceil(29 / quantum) + 1))
        params = SamplingParams(seed=number, max_tokens=1000)
        await replica.generate(ids, params, str(number), None)
        return asyncio.get_running_loop().time()

    async def main() -> list[float]:
        sizes = {i: RequestSize(prompt=30, answer=n) for i, (_, n) in enumerate(requests)}
        replica = SimulatedReplica(times, quantum, sizes, SharedCores())
        answers = [asyncio.create_task(ask(replica, i, at)) for i, (at, _) in enumerate(requests)]
        await asyncio.sleep(new_at)
        await replica.load_weights(1, waits=False)
        return await asyncio.gather(*answers)

    return run_virtually(main())


def test_new_weights_make_the_engine_read_again_what_is_in_flight() -> None:
    """They come during the 11th step, so 11 tokens have been sampled when it ends."""
    times = EngineTimes(**{**ONLY_STEPS, "prefill_s": 0.01})
    first_s = 0.1 + 0.01 * 30
    (end_s,) = ends(times, 1, (0.0, 40), new_at=first_s + 9.5 * 0.1)
    assert end_s == pytest.approx(40 * 0.1 + 0.01 * 30 + 0.01 * (30 + 11), rel=NEAR)


def test_a_request_that_comes_inside_a_quantum_is_not_late_by_its_rest() -> None:
    times = EngineTimes(**ONLY_STEPS)
    exact = ends(times, 1, (0.0, 300), (0.32, 100), new_at=0.0)
    coarse = ends(times, 10, (0.0, 300), (0.32, 100), new_at=0.0)
    assert exact[1] == pytest.approx(0.4 + 100 * 0.1, rel=NEAR)
    assert coarse[1] == pytest.approx(exact[1], abs=0.5)  # half a quantum of a second


def test_quanta_change_a_crowded_run_by_little() -> None:
    lengths = AnswerLengths(mean=300, sigma=0.8, cap=2000, group_share=0.5)
    config = make(num_tasks=12, group_size=4, engine={"max_num_seqs": 32, "kv_s": 1e-6})
    config = replace(config, workload=replace(config.workload, answer=lengths), measured_steps=2)
    exact = simulate(config).mean("wait_s")
    assert simulate(replace(config, quantum=16)).mean("wait_s") == pytest.approx(exact, rel=0.06)


def test_a_cache_that_is_too_small_preempts_and_costs_time() -> None:
    roomy = make(num_tasks=8, answer=200, engine={"cache_tokens": 8 * 240})
    tight = replace(roomy, engine=replace(roomy.engine, cache_tokens=3 * 240))
    assert simulate(roomy).num_preemptions == 0
    result = simulate(tight)
    assert result.num_preemptions > 0
    assert result.mean("wait_s") > 1.5 * simulate(roomy).mean("wait_s")


def test_two_replicas_halve_the_time_of_two_requests_and_shared_cores_give_it_back() -> None:
    one = make(num_tasks=2, answer=50, engine=ONE_BY_ONE)
    two = replace(one, cluster=replace(one.cluster, replicas=2))
    shared = replace(one, cluster=replace(two.cluster, shared_cores=1.0))
    assert simulate(one).mean("wait_s") == pytest.approx(2 * 50 * 0.1, rel=NEAR)
    assert simulate(two).mean("wait_s") == pytest.approx(50 * 0.1, rel=NEAR)
    assert simulate(shared).mean("wait_s") == pytest.approx(2 * 50 * 0.1, rel=NEAR)


def test_turns_add_their_tools_and_what_these_say_is_read() -> None:
    engine = {**ONLY_STEPS, "prefill_s": 0.01, "max_num_seqs": 1}
    work = {"turns": 4, "tool_s": 2.0, "observation": 5}
    result = simulate(make(answer=40, engine=engine, workload=work))
    # Each later turn prefills the last token of the turn before and the observation.
    prefills = 30 + 3 * (1 + 5)
    wanted = 40 * 0.1 + 3 * 2.0 + 0.01 * prefills
    assert result.mean("wait_s") == pytest.approx(wanted, rel=0.02)


def test_chunks_of_an_answer_are_requests_of_their_own() -> None:
    whole = make(answer=40, engine=ONE_BY_ONE, num_tasks=2)
    chunked = replace(whole, workload=replace(whole.workload, chunk=10))
    # One row, so that requests take turns: the first to come ends one chunk before the last.
    assert simulate(whole).mean("tail_s") == pytest.approx(0.0, abs=NEAR)
    first, last = 2 * 40 * 0.1, simulate(chunked).mean("wait_s")
    assert last == pytest.approx(first, rel=NEAR)


# -- modes -------------------------------------------------------------------------------------


def test_the_bubble_of_a_synchronous_run_is_the_other_side() -> None:
    result = simulate(make(answer=40, engine=ONE_BY_ONE))
    generation = 40 * 0.1
    step = generation + ALL_PHASES
    assert result.idle_trainer == pytest.approx(generation / step, rel=NEAR)
    assert result.idle_replicas == pytest.approx(ALL_PHASES / step, rel=NEAR)
    assert result.staleness == {0: 1.0}
    assert result.total_s == pytest.approx(100 * step + 0.0625, rel=NEAR)
    assert result.gpu_hours == pytest.approx(2 * result.total_s / 3600)
    assert result.tokens_per_s == pytest.approx(40 / step, rel=NEAR)


@pytest.mark.parametrize("part_s", [0.25, 4.0])
def test_streaming_hides_all_but_what_must_come_after(part_s: float) -> None:
    """Four rollouts one after the other, each a minibatch: the last is trained at the end, or all
    but the first wait for the trainer."""
    phases = PhaseTimes(update_s=4 * part_s, other_s=0.5, sync_s=0.25)
    config = make(num_tasks=4, answer=10, engine=ONE_BY_ONE, phases=phases)
    result = simulate(replace(config, mode="streaming", minibatches=4))
    one = 10 * 0.1
    wanted = (4 * one + part_s if part_s < one else one + 4 * part_s) + 0.75
    assert result.step_s == pytest.approx(wanted, rel=NEAR)
    assert result.staleness == {0: 1.0}
    assert simulate(config).step_s == pytest.approx(4 * one + 4 * part_s + 0.75, rel=NEAR)


@pytest.mark.parametrize("update_s", [1.0, 20.0])
def test_an_asynchronous_run_is_bound_by_the_slower_side(update_s: float) -> None:
    phases = PhaseTimes(update_s=update_s, sync_s=0.0)
    config = make(num_tasks=4, answer=20, engine=ONE_BY_ONE, phases=phases, measured_steps=6)
    result = simulate(replace(config, mode="async", max_staleness=4.0))
    generation = 4 * 20 * 0.1
    assert result.step_s == pytest.approx(max(generation, update_s), rel=0.01)
    busy = 1 - (result.idle_replicas if generation > update_s else result.idle_trainer)
    assert busy == pytest.approx(1.0, abs=0.01)


FAST = {**ONLY_STEPS, "step_s": 1e-3}


@pytest.mark.parametrize(
    ("max_staleness", "ages"),
    [(1.0, {1: 1.0}), (2.0, {2: 1.0}), (0.5, {0: 0.5, 1: 0.5}), (1.25, {1: 0.75, 2: 0.25})],
)
def test_the_staleness_limit_admits_exactly_what_the_controller_says(
    max_staleness: float, ages: dict[int, float]
) -> None:
    """Rollouts are done at once, so a batch of 4 is as old as its admission: rollout i starts at
    the first version v with i + 1 <= (max_staleness + v + 1) * 4."""
    config = make(num_tasks=4, answer=5, engine=FAST, warmup_steps=3)
    result = simulate(replace(config, mode="async", max_staleness=max_staleness))
    by_rule = [
        6 - min(v for v in range(9) if i + 1 <= (max_staleness + v + 1) * 4) for i in range(24, 28)
    ]
    assert {age: by_rule.count(age) / 4 for age in sorted(set(by_rule))} == ages
    assert result.staleness == pytest.approx(ages)


def test_weights_that_wait_for_requests_in_flight_hold_the_others_up() -> None:
    """Steps cost the same however few decode, so that a batch which runs out costs throughput."""
    phases = PhaseTimes(update_s=0.5, sync_s=0.0)
    lengths = AnswerLengths(mean=60, sigma=1.2, cap=400)
    config = make(num_tasks=4, engine={**ONLY_STEPS, "max_num_seqs": 4}, phases=phases)
    config = replace(config, mode="async", max_staleness=2.0, measured_steps=10)
    partial = replace(config, workload=replace(config.workload, answer=lengths))
    waiting = replace(partial, partial_rollouts=False)
    assert simulate(waiting).step_s > 1.2 * simulate(partial).step_s
    assert simulate(partial).idle_trainer > 0.5  # the engine is what both wait for


def test_minibatches_are_made_of_groups_as_they_end() -> None:
    ends = [[1.0, 9.0], [2.0, 3.0], [4.0, 4.0], [0.5, 0.5]]
    groups = [[ended(at) for at in group] for group in ends]
    assert minibatch_times(groups, 2) == [3.0, 9.0]
    assert minibatch_times(groups, 4) == [0.5, 3.0, 4.0, 9.0]


def ended(at: float) -> Rollout:
    return Rollout(
        task_id="", group_id="", rollout_id="", tokens=[], loss_mask=[], logps=[], versions=[],
        metrics={END_S: at},
    )  # fmt: skip


def test_a_seed_decides_everything() -> None:
    lengths = AnswerLengths(mean=100, sigma=1.0, cap=800)
    config = make(num_tasks=4, group_size=4)
    config = replace(
        config, mode="async", max_staleness=1.0,
        workload=replace(config.workload, answer=lengths),
        cluster=replace(config.cluster, replicas=3),
    )  # fmt: skip
    assert simulate(config).numbers() == simulate(config).numbers()
    assert simulate(config).step_s != simulate(replace(config, seed=1)).step_s


# -- lengths -----------------------------------------------------------------------------------


def test_the_mean_of_cut_lengths_is_the_integral() -> None:
    z = np.linspace(-10, 10, 400_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    values = np.minimum(np.exp(6.0 + 1.3 * z), 2000.0)
    integral = float(np.sum(values * density) * (z[1] - z[0]))
    assert clipped_mean(6.0, 1.3, 2000.0) == pytest.approx(integral, rel=1e-6)


def test_lengths_have_the_mean_that_is_asked_for_and_keep_the_cap() -> None:
    lengths = AnswerLengths(mean=500, sigma=1.0, cap=2000)
    drawn = [draw_length(lengths, 0, f"t{i}", f"t{i}-m0") for i in range(8000)]
    assert max(drawn) == 2000 and min(drawn) >= 1
    error = float(np.std(drawn)) / np.sqrt(len(drawn))
    assert abs(np.mean(drawn) - 500) < 4 * error


@pytest.mark.parametrize(("share", "wanted"), [(0.0, 0.0), (0.6, 0.6), (1.0, 1.0)])
def test_members_of_a_group_share_what_they_are_to_share(share: float, wanted: float) -> None:
    lengths = AnswerLengths(mean=500, sigma=0.5, cap=10**6, group_share=share)
    logs = np.log(
        [[draw_length(lengths, 0, f"t{i}", f"t{i}-m{j}") for j in range(2)] for i in range(4000)]
    )
    assert float(np.corrcoef(logs.T)[0, 1]) == pytest.approx(wanted, abs=0.06)


def test_empirical_lengths_are_those_given_cut_at_the_cap() -> None:
    lengths = AnswerLengths(kind="empirical", values=(10, 20, 90), cap=50)
    assert {draw_length(lengths, 0, "t", f"m{i}") for i in range(50)} == {10, 20, 50}
    assert mean_length(lengths) == pytest.approx(80 / 3)


# -- configurations, results -------------------------------------------------------------------


def test_a_quantum_is_chosen_by_the_size_of_the_run() -> None:
    small = make(answer=500)
    assert choose_quantum(replace(small, quantum=0)) == 1
    work = RolloutLoad(tasks_per_step=512, group_size=16, answer=AnswerLengths(mean=3000, cap=9000))
    large = replace(small, quantum=0, workload=work)
    quantum = choose_quantum(large)
    num_tokens = 512 * 16 * 3000 * 5
    assert num_tokens / quantum <= 1 << 20 < num_tokens / (quantum // 2)
    assert choose_quantum(replace(large, workload=replace(work, turns=16))) == 8  # 188 a turn


def test_half_the_quantum_is_the_same_run_told_finer() -> None:
    config = make(answer=64, engine=ONE_BY_ONE)
    result = simulate(replace(config, quantum=8))
    half = with_half_quantum(result)
    assert half is not None and half.quantum == 4
    assert f"{half.step_s / result.step_s - 1:+.1%}" in result.text(half)
    assert with_half_quantum(simulate(config)) is None


def test_scaling_keeps_proportions_and_says_when_nothing_is_left() -> None:
    config = make(cluster=GpuLayout(replicas=4, gpus_per_replica=2, trainer_gpus=8))
    double = scaled(config, 32)
    assert (double.cluster.replicas, double.cluster.trainer_gpus) == (8, 16)
    assert double.cluster.num_gpus == 32
    assert double.phases.train_s == pytest.approx(config.phases.train_s / 2)
    assert double.phases.sync_s == config.phases.sync_s
    with pytest.raises(ValueError, match=r"--gpus 1: .* less than one of each"):
        scaled(config, 1)


def test_text_and_picture_say_that_they_are_simulated() -> None:
    config = make(num_tasks=2, answer=40, engine=ONE_BY_ONE, name="a <b> & c")
    result = simulate(config)
    assert result.text().startswith("SIMULATED: a <b> & c")
    root = ElementTree.fromstring(draw(result))
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and (title.text or "").startswith("SIMULATED: a <b> & c")


def test_occupancy_is_the_mean_number_of_sequences() -> None:
    spans = [(0.0, 1.0, 4), (1.0, 2.5, 2), (3.0, 4.0, 1)]
    assert occupancy(spans, 4.0, 2) == pytest.approx([(4 + 2) / 2, (0.5 * 2 + 1) / 2])
    assert occupancy(spans, 4.0, 4) == pytest.approx([4, 2, 1, 1])


SLOW_UPDATE, SLOW_ENGINE = PhaseTimes(update_s=100.0), PhaseTimes(update_s=0.1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (make(engine=ONE_BY_ONE, phases=SLOW_UPDATE), "The trainer: it works"),
        (make(engine=ONE_BY_ONE, phases=replace(SLOW_ENGINE, sync_s=0.0)), "The engines"),
        (make(engine=ONE_BY_ONE), "Generation: 50 % of a step"),
        (make(num_tasks=9, engine=FAST, phases=PhaseTimes(update_s=0.1, sync_s=0)), "Taking"),
    ],
)
def test_the_bottleneck_is_named(config: SimulationConfig, words: str) -> None:
    assert words in simulate(config).bottleneck()
