"""The scheduler: budget, order, group prefill, preemption, admission."""

import pytest
from cache_oracle import make_engine, replay, run_all

from nanoinfer.params import SamplingParams
from nanoinfer.scheduler import Step


def params(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


def test_a_group_prefills_its_prompt_once() -> None:
    engine, runner = make_engine(num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=64)
    prompt = [i % 7 for i in range(22)]
    handles = [engine.add(prompt, params(1)) for _ in range(8)]
    outputs = run_all(engine)
    assert runner.num_computed == 22 + 7  # the others compute their last token only
    assert [outputs[h].ids for h in handles] == [replay(prompt, [0])] * 8
    assert [outputs[h].num_cached_tokens for h in handles] == [0] + [21] * 7


def test_a_group_prefills_once_also_in_chunks_and_with_short_prompts() -> None:
    for length, budget in ((30, 8), (3, 8), (1, 8), (4, 8), (33, 11)):
        engine, runner = make_engine(
            num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=budget
        )
        for _ in range(4):
            engine.add([i % 5 for i in range(length)], params(1))
        run_all(engine)
        assert runner.num_computed == length + 3, length


def test_groups_with_a_common_start_share_it() -> None:
    engine, runner = make_engine(num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=64)
    common = [i % 7 for i in range(16)]
    engine.add([*common, 1, 2, 3], params(1))
    engine.add([*common, 4, 5, 6], params(1))
    run_all(engine)
    assert runner.num_computed == 19 + 3


def test_the_next_turn_computes_only_what_is_new() -> None:
    engine, runner = make_engine(num_blocks=64, block_size=4, max_num_seqs=8, max_batch_tokens=64)
    prompt = [i % 7 for i in range(10)]
    output = engine.generate([prompt], params(9))[0]
    before = runner.num_computed
    observation = [1, 2, 3, 4, 5]
    again = engine.generate([prompt + output.ids + observation], params(1))[0]
    assert runner.num_computed - before == 1 + 5  # the last sampled token was never computed
    assert again.num_cached_tokens == 10 + 8


def test_decodes_are_not_starved_by_prefills() -> None:
    engine, _ = make_engine(num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=8)
    first = engine.add([1, 2], params(20))
    engine.step()
    engine.add([i % 7 for i in range(60)], params(1))
    for _ in range(5):
        before = engine._sequences[first].num_sampled
        engine.step()
        assert engine._sequences[first].num_sampled == before + 1


def test_the_budget_bounds_a_step() -> None:
    engine, runner = make_engine(num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=10)
    for i in range(6):
        engine.add([(i + j) % 7 for j in range(17)], params(3))
    while engine.num_unfinished:
        before = runner.num_computed
        engine.step()
        assert 0 < runner.num_computed - before <= 10


def test_preempted_requests_finish_with_the_same_tokens() -> None:
    engine, _ = make_engine(num_blocks=12, block_size=2, max_num_seqs=4, max_batch_tokens=16)
    prompts = [[i, i + 1, i + 2] for i in range(4)]
    handles = [engine.add(p, params(16)) for p in prompts]
    outputs = run_all(engine)
    assert engine.metrics()["num_preemptions"] > 0
    for handle, prompt in zip(handles, prompts, strict=True):
        assert outputs[handle].ids == replay(prompt, [0] * 16)


def test_a_decode_that_makes_room_for_a_prefill_leaves_the_step() -> None:
    """An urgent prompt of three chunks arrives beside a decode. Its last chunk needs a block more
    than there are, and by then the decode is in the step already."""
    engine, _ = make_engine(num_blocks=8, block_size=4, max_num_seqs=2, max_batch_tokens=8)
    schedule = engine._scheduler.schedule

    def checked() -> Step:
        step = schedule()
        assert all(seq.row >= 0 for seq in step.seqs), "a preempted sequence is in the step"
        return step

    engine._scheduler.schedule = checked  # type: ignore[method-assign]
    decoding, urgent = [5 - i % 5 for i in range(10)], [i % 7 for i in range(22)]
    first = engine.add(decoding, params(12))
    for _ in range(3):
        engine.step()
    second = engine.add(urgent, params(2), priority=-1)
    outputs = run_all(engine)
    assert engine.metrics()["num_preemptions"] == 1
    assert outputs[first].ids == replay(decoding, [0] * 12)
    assert outputs[second].ids == replay(urgent, [0] * 2)


def test_nobody_is_admitted_into_blocks_that_a_running_request_needs_next() -> None:
    """The first fills two of four blocks and grows into a third; the second would take the other
    two, and one of them would be preempted at once."""
    engine, _ = make_engine(num_blocks=4, block_size=4, max_num_seqs=2, max_batch_tokens=16)
    first = engine.add([1, 2, 3, 4, 5, 6], params(6))
    engine.step()
    second = engine.add([6, 5, 4, 3, 2, 1, 0], params(4))
    outputs = run_all(engine)
    assert engine.metrics()["num_preemptions"] == 0
    assert [len(outputs[handle].ids) for handle in (first, second)] == [6, 4]


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    engine, _ = make_engine(num_blocks=4, block_size=4, max_num_seqs=2, max_batch_tokens=8)
    with pytest.raises(ValueError, match=r"needs 5 cache blocks.*there are 4"):
        engine.add([1] * 10, params(7))
    engine.add([1] * 10, params(6))
    assert len(run_all(engine)) == 1


def test_the_token_budget_must_cover_all_sequences() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens=4"):
        make_engine(num_blocks=4, max_num_seqs=8, max_batch_tokens=4)


def test_aborting_one_that_others_wait_for_lets_them_go_on() -> None:
    engine, _ = make_engine(num_blocks=64, block_size=4, max_num_seqs=4, max_batch_tokens=8)
    prompt = [i % 7 for i in range(40)]
    first = engine.add(prompt, params(2))
    second = engine.add(prompt, params(2))
    engine.step()
    assert engine.abort(first) is not None
    outputs = run_all(engine)
    assert outputs[second].ids == replay(prompt, [0, 0])


def test_a_finished_request_cannot_be_aborted() -> None:
    engine, _ = make_engine(num_blocks=8, max_num_seqs=4)
    handle = engine.add([1], params(1))
    run_all(engine)
    assert engine.abort(handle) is None
