"""The benchmarks' bounds, against counts made one token and one pair at a time."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import roofline
from roofline import BODY, HEAD, KV_ELEMENTS, PAIR_FLOPS, Generation

FAST = {"flops": 1e15, "bytes": 1e15}


def count(sequences: list[list[tuple[str, bool]]]) -> tuple[int, int, int]:
    """Distinct tokens forwarded, tokens sampled, distinct query-key pairs. A sequence is a list of
    (name of the token, was it sampled); tokens of one name at one place are forwarded once. The
    last sampled token is never forwarded."""
    forwarded, pairs, sampled = set(), set(), 0
    for tokens in sequences:
        names = [name for name, _ in tokens]
        sampled += sum(was_sampled for _, was_sampled in tokens)
        for i in range(len(names) - 1):
            query = tuple(names[: i + 1])
            forwarded.add(query)
            pairs |= {(query, j) for j in range(i + 1)}
    return len(forwarded), sampled, len(pairs)


def flops(forwarded: int, sampled: int, pairs: int) -> float:
    return 2.0 * BODY * forwarded + 2.0 * HEAD * sampled + PAIR_FLOPS * pairs


def test_the_floor_of_requests_counts_every_token_and_pair_once() -> None:
    prompts, outputs = [3, 5], [4, 2]
    sequences = [
        [(f"p{i}", False)] * p + [(f"s{i}", True)] * n
        for i, (p, n) in enumerate(zip(prompts, outputs, strict=True))
    ]
    sequences = [
        [(f"{name}.{at}", drawn) for at, (name, drawn) in enumerate(tokens)] for tokens in sequences
    ]
    work = roofline.requests(prompts, outputs)
    assert work.num_sampled == 6
    assert [step.rows for step in work.steps] == [2, 2, 1, 1]
    assert work.flops() == flops(*count(sequences))


def test_the_floor_of_groups_forwards_a_shared_prompt_once() -> None:
    groups, members, prompt, turns, sampled, observed = 2, 3, 4, 3, 2, 3
    sequences = []
    for g in range(groups):
        for m in range(members):
            tokens = [(f"g{g}.{i}", False) for i in range(prompt)]
            for turn in range(turns):
                tokens += [(f"g{g}m{m}t{turn}s{i}", True) for i in range(sampled)]
                if turn < turns - 1:
                    tokens += [(f"g{g}m{m}t{turn}o{i}", False) for i in range(observed)]
            sequences.append(tokens)
    work = roofline.group_rollouts(groups, members, prompt, turns, sampled, observed)
    forwarded, drawn, pairs = count(sequences)
    assert work.num_sampled == drawn == groups * members * turns * sampled
    from_one_row = groups * (members - 1)  # the prompt's logits give every member its first token
    assert work.flops() == flops(forwarded, drawn - from_one_row, pairs)
    assert work.steps[0].keys == groups * prompt
    assert work.steps[-1].keys == groups * prompt + groups * members * (5 + 2 * observed)


def test_a_step_takes_the_longer_of_arithmetic_and_memory() -> None:
    step = roofline.DecodeStep(rows=2, pairs=10, keys=7)
    work = Generation(4, 0, 0, [step, step])
    assert step.bytes(2) == 2 * (BODY + HEAD + 7 * KV_ELEMENTS)
    slow_memory = {"flops": 1e15, "bytes": 1e9}
    assert work.seconds(slow_memory, 2) == pytest.approx(2 * step.bytes(2) / 1e9)
    slow_processor = {"flops": 1e9, "bytes": 1e15}
    assert work.seconds(slow_processor, 2) == pytest.approx(2 * step.flops() / 1e9)
    assert work.seconds(slow_memory, 2, is_drafted=True) == pytest.approx(2 * step.flops() / 1e15)


def test_prefill_may_fill_what_a_step_leaves_of_the_processor() -> None:
    step = roofline.DecodeStep(rows=1, pairs=1, keys=1)
    small, large = Generation(1, 1, 1, [step]), Generation(1, 10**6, 1, [step])
    rates = {"flops": 1e11, "bytes": 1e9}
    assert small.seconds(rates, 2) == pytest.approx(step.bytes(2) / 1e9)
    assert large.seconds(rates, 2) == pytest.approx(large.flops() / 1e11)


def test_the_weights_of_the_model_are_what_the_floor_counts() -> None:
    products = sum(a * b for a, b in roofline.PRODUCTS) * roofline.NUM_LAYERS
    norms = (2 * roofline.NUM_LAYERS + 1) * roofline.HIDDEN
    assert products + norms == BODY
    assert 49152 * roofline.HIDDEN == HEAD


def test_training_is_three_times_the_forward_pass() -> None:
    forward = 2.0 * BODY * 100 + 2.0 * HEAD * 40 + PAIR_FLOPS * 300
    assert roofline.training_flops(100, 40, 300) == 3 * forward


def test_rates_of_two_moments_give_the_better_of_each() -> None:
    rates = roofline.best_of([{"flops": 2.0, "bytes": 5.0}, {"flops": 3.0, "bytes": 4.0}])
    assert rates == {"flops": 3.0, "bytes": 5.0}


def test_a_bound_that_was_beaten_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    from model_bench import make_row

    def row(unit: str, bound: float) -> dict:
        return make_row("x", unit, dtype=None, threads=1, value=10.0, bound=bound)

    assert row("tokens/s", 9.0)["bound"] is None
    assert row("s", 11.0)["bound_ratio"] is None
    assert "beats the bound" in capsys.readouterr().err
    assert row("tokens/s", 12.0)["bound_ratio"] == pytest.approx(10 / 12)
    assert row("s", 8.0)["bound_ratio"] == pytest.approx(0.8)
