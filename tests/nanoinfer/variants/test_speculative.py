"""The drafter: what it guesses, when it thinks a guess pays, and what it keeps."""

import pytest
from cache_oracle import VOCAB, make_engine, replay, run_all
from drafts import PlantedDrafter, plant
from prometheus_client import generate_latest

from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.params import SamplingParams
from nanoinfer.scheduler import Step
from nanoinfer.sequence import Sequence
from nanoinfer.server.prometheus import HttpMetrics
from nanoinfer.variants import speculative
from nanoinfer.variants.speculative import Drafter


def sequence(handle: int, prompt: list[int], sampled: list[int] | None = None) -> Sequence:
    seq = Sequence(handle, prompt, SamplingParams())
    seq.ids += sampled or []
    return seq


def sure(max_drafts: int = 8) -> Drafter:
    """One that drafts whatever it can guess."""
    return Drafter(max_drafts, free_rows=10_000)


def test_a_guess_is_what_followed_the_last_time() -> None:
    seq = sequence(0, [5, 6, 7, 1, 2, 5, 6, 7, 3, 4, 5, 6, 7])
    assert sure(2).draft(seq, 8, 1) == [3, 4]


def test_three_equal_tokens_count_more_than_two_that_came_later() -> None:
    seq = sequence(0, [1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3])
    assert sure(1).draft(seq, 8, 1) == [70]


def test_one_equal_token_is_no_reason_to_guess() -> None:
    assert sure().draft(sequence(0, [1, 2, 3, 4, 2]), 8, 1) == []


def test_a_loop_is_drafted_round_and_round() -> None:
    seq = sequence(0, [9, 1, 2, 3, 1, 2, 3])
    assert sure().draft(seq, 8, 1) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert sure().draft(seq, 5, 1) == [1, 2, 3, 1, 2]


def test_what_a_sibling_sampled_is_a_guess_for_the_others() -> None:
    prompt = list(range(100, 120))
    drafter = sure(3)
    drafter.draft(sequence(0, prompt, [7, 8, 9, 10]), 8, 1)
    assert drafter.draft(sequence(1, prompt), 8, 1) == [7, 8, 9]
    assert drafter.draft(sequence(2, prompt, [5, 7, 8]), 8, 1) == [9, 10]
    stranger = sequence(3, [99, *prompt], [7, 8])
    assert drafter.draft(stranger, 8, 1) == []
    alone = Drafter(3, 10_000, use_siblings=False)
    alone.draft(sequence(0, prompt, [7, 8, 9, 10]), 8, 1)
    assert alone.draft(sequence(1, prompt), 8, 1) == []


def test_a_guess_must_be_likelier_than_it_costs() -> None:
    """Chances are 1/2, 1/4, 1/8, 1/16 before any test; S sequences and 8 free rows ask for more
    than S / (S + 8)."""
    prompt = [1, 2, 3] * 3
    for num_seqs, expected in ((1, 3), (2, 2), (3, 1), (7, 1), (8, 0), (64, 0)):
        assert len(Drafter(8, 8).draft(sequence(0, prompt), 8, num_seqs)) == expected, num_seqs


def test_hits_bring_drafts_and_misses_end_them() -> None:
    drafter = Drafter(8, 8, use_siblings=False)
    seq = sequence(0, [1, 2, 3] * 2)
    assert drafter.draft(seq, 8, 64) == []  # 64 sequences ask for 64 / 72
    seq.ids += [1, 2, 3] * 5
    assert len(drafter.draft(seq, 8, 64)) >= 1
    assert drafter._readers[0]._rates[0] == pytest.approx(1 - 0.5 * 0.8**15)
    for token in range(30):
        seq.ids += [1, 2, 3, 50 + token]  # after 1 2 3 comes what never came before
    seq.ids += [1, 2, 3]
    assert drafter.draft(seq, 8, 1) == []
    seq.ids += [1, 2, 3] * 6
    assert len(drafter.draft(seq, 8, 64)) >= 1


def test_a_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    put = speculative._Table.put
    monkeypatch.setattr(speculative._Table, "put", lambda *args: (calls.append(1), put(*args)))
    drafter = Drafter(2, use_siblings=False)
    seq = sequence(0, [i % 50 for i in range(1000)])
    for token in range(200):
        drafter.draft(seq, 2, 1)
        seq.ids.append(token % 7)
    assert len(calls) == 2 * 1199 - 2 - 3


def test_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "_MAX_GRAMS", 100)
    drafter = sure()
    seq = sequence(0, [0], list(range(1, 500)))
    drafter.draft(seq, 0, 1)
    for table in drafter._readers[0]._tables:
        assert 100 <= len(table._new) + len(table._old) <= 200
    seq.ids += [1, 2]  # long forgotten
    assert drafter.draft(seq, 8, 1) == []
    seq.ids += [480, 481]
    assert drafter.draft(seq, 2, 1) == [482, 483]


def test_a_group_is_forgotten_with_its_last_member() -> None:
    drafter = sure()
    members = [sequence(i, [1, 2, 3], [i, 5, 6]) for i in range(3)]
    for seq in members:
        drafter.draft(seq, 8, 3)
    drafter.check(members)
    for seq in members:
        assert len(drafter._groups) == 1
        drafter.forget(seq)
        drafter.forget(seq)  # it stopped running, then ended: once is enough
    drafter.check([])
    assert not drafter._groups


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="speculate=-1"):
        make_engine(num_blocks=4, max_num_seqs=2, speculate=-1)


def planted(is_right: float, max_drafts: int = 4, **options: int):
    """An engine whose drafts are what the oracle will say, or not."""
    engine, runner = make_engine(**options)

    def future(seq: Sequence, count: int) -> list[int]:
        return replay(seq.ids, [runner.version] * count)

    plant(engine, PlantedDrafter(future, VOCAB, is_right=is_right, max_drafts=max_drafts))
    return engine, runner


def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    sizes = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_batch_tokens": 64}
    steps = {}
    for is_right in (1.0, 0.0):
        engine, _ = planted(is_right, **sizes)
        handles = [engine.add([i, 3, 1], SamplingParams(max_tokens=40)) for i in range(4)]
        outputs = run_all(engine)
        for i, handle in enumerate(handles):
            assert outputs[handle].ids == replay([i, 3, 1], [0] * 40)
        counts = engine.metrics()
        steps[is_right] = counts["num_steps"]
        assert counts["sampled_tokens"] == 160
        assert 0 <= counts["accepted_tokens"] <= counts["drafted_tokens"]
        if is_right:
            assert counts["accepted_tokens"] == counts["drafted_tokens"] > 80
    assert steps[1.0] < 25 < steps[0.0] <= 40


def test_drafts_take_what_is_left_of_the_budget() -> None:
    engine, runner = planted(1.0, num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=10)
    for i in range(6):
        engine.add([(i + j) % 7 for j in range(17)], SamplingParams(max_tokens=12))
    while engine.num_unfinished:
        before = runner.num_computed
        engine.step()
        assert 0 < runner.num_computed - before <= 10
        engine.check()
    assert engine.metrics()["accepted_tokens"] > 0


def test_drafts_leave_a_block_for_every_running_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = planted(0.0, num_blocks=30, block_size=2, max_num_seqs=4, max_batch_tokens=64)
    queues, draft, num_taken = engine._scheduler, engine._scheduler._draft, []

    def watched(step: Step) -> None:
        before = engine._blocks.num_free
        draft(step)
        after = engine._blocks.num_free
        assert after == before or after >= len(queues.running)
        num_taken.append(before - after)

    monkeypatch.setattr(queues, "_draft", watched)
    for i in range(4):
        engine.add([i, 2, 3], SamplingParams(max_tokens=17))
    run_all(engine)
    assert sum(num_taken) > 5


def test_nothing_is_computed_beyond_the_last_token_that_may_be_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, runner = planted(0.5, num_blocks=64, block_size=4, max_num_seqs=4)
    run, positions = runner.run, []

    def watched(step: StepInput) -> RunnerOutput:
        positions.extend(step.positions_T.tolist())
        return run(step)

    monkeypatch.setattr(runner, "run", watched)
    engine.generate([[seed % VOCAB, 1, 2] for seed in range(20)], SamplingParams(max_tokens=9))
    assert engine.metrics()["drafted_tokens"] > 50
    assert max(positions) == 3 + 9 - 2


def test_only_accepted_tokens_are_found_by_the_next_turn() -> None:
    """The cache of a turn whose drafts were all wrong holds exactly its tokens."""
    for is_right in (0.0, 0.6, 1.0):
        engine, runner = planted(
            is_right, num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=64
        )
        prompt = [i % 7 for i in range(10)]
        (output,) = engine.generate([prompt], SamplingParams(max_tokens=9))
        turn = prompt + output.ids + [1, 2, 3, 4, 5]
        before = runner.num_computed
        (again,) = engine.generate([turn], SamplingParams(max_tokens=1))
        assert runner.num_computed - before == 1 + 5  # the last sampled token was never computed
        assert again.ids == replay(turn, [0])


def test_blocks_of_accepted_runs_are_shared_while_the_request_still_runs() -> None:
    engine, _ = planted(1.0, num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=64)
    handle = engine.add([1, 2, 3], SamplingParams(max_tokens=60))
    for _ in range(12):
        engine.step()
        seq = engine.peek(handle)
        assert seq is not None
        match = engine._blocks.match(sequence(99, seq.ids))
        assert len(match.block_table) == seq.num_computed_tokens // 4


def test_a_failed_step_takes_its_drafts_along(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = planted(1.0, num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=64)
    handle = engine.add([1, 2, 3], SamplingParams(max_tokens=30))
    for _ in range(4):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", None)
        with pytest.raises(TypeError):
            engine.step()
    engine.check()
    assert run_all(engine)[handle].ids == replay([1, 2, 3], [0] * 30)


def test_drafts_are_counted_for_prometheus() -> None:
    engine, _ = planted(1.0, num_blocks=16, block_size=4, max_num_seqs=4)
    engine.generate([[1, 2]], SamplingParams(max_tokens=20))
    lines = generate_latest(HttpMetrics(engine.metrics).registry).decode().splitlines()
    counted = engine.metrics()["accepted_tokens"]
    assert counted > 0
    assert f"nanoinfer_accepted_tokens_total {float(counted)}" in lines
    assert "# TYPE nanoinfer_drafted_tokens_total counter" in lines
