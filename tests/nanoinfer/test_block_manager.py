"""The block manager: sharing, copies, eviction, and invariants under random workloads."""

import pytest
from cache_oracle import VOCAB, make_engine, replay, run_all
from drafts import PlantedDrafter, plant
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from nanoengine.formats.hf import export_state
from nanoinfer.block_manager import BlockManager
from nanoinfer.params import SamplingParams
from nanoinfer.sequence import Sequence
from nanoinfer.variants.invariants import check_blocks


def computed(manager: BlockManager, handle: int, ids: list[int]) -> Sequence:
    """A sequence whose tokens have all been computed."""
    seq = Sequence(handle, ids, SamplingParams())
    match = manager.match(seq)
    manager.take_match(seq, match)
    assert manager.extend(seq, len(ids))
    seq.num_computed_tokens = len(ids)
    manager.commit(seq)
    return seq


def fresh(ids: list[int]) -> Sequence:
    return Sequence(99, ids, SamplingParams())


def test_a_common_prefix_shares_full_blocks_and_copies_the_rest() -> None:
    manager = BlockManager(16, 4)
    first = computed(manager, 0, list(range(10)))
    match = manager.match(fresh([*range(10), 50]))
    assert match.block_table == first.block_table[:2]
    assert (match.copy_from, match.num_copied) == (first.block_table[2], 2)
    second = computed(manager, 1, [*range(10), 50])
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] not in first.block_table
    check_blocks(manager, [first, second])


def test_a_match_leaves_the_last_token_to_compute() -> None:
    manager = BlockManager(16, 4)
    computed(manager, 0, list(range(8)))
    assert manager.match(fresh(list(range(8)))).num_tokens(4) == 7
    assert manager.match(fresh([0])).num_tokens(4) == 0


def test_equal_blocks_after_different_prefixes_do_not_match() -> None:
    manager = BlockManager(16, 4)
    computed(manager, 0, [1, 1, 1, 1, 7, 7, 7, 7])
    match = manager.match(fresh([2, 2, 2, 2, 7, 7, 7, 7, 7]))
    assert match.num_tokens(4) == 0


def test_released_blocks_are_found_until_they_are_needed() -> None:
    manager = BlockManager(4, 4)
    seq = computed(manager, 0, list(range(8)))
    manager.release(seq)
    assert manager.num_free == 4
    assert manager.match(fresh(list(range(9)))).num_tokens(4) == 8
    computed(manager, 1, list(range(100, 114)))  # takes all four
    assert manager.match(fresh(list(range(9)))).num_tokens(4) == 0
    assert manager.num_evictions == 2


def test_eviction_takes_the_least_recently_used_and_ends_before_starts() -> None:
    manager = BlockManager(4, 4)
    old = computed(manager, 0, list(range(8)))
    manager.release(old)
    recent = computed(manager, 1, list(range(20, 28)))
    manager.release(recent)
    assert manager.match(fresh(list(range(9)))).num_tokens(4) == 8
    computed(manager, 2, [50, 51, 52])
    assert manager.match(fresh(list(range(9)))).num_tokens(4) == 4
    assert manager.match(fresh(list(range(20, 29)))).num_tokens(4) == 8


def test_a_block_that_was_copied_counts_as_used() -> None:
    """The oldest free block is the one to copy from; the copy goes to the next oldest, so that the
    tokens which only the original has are still found."""
    manager = BlockManager(4, 4)
    manager.release(computed(manager, 0, list(range(6))))
    manager.release(computed(manager, 1, list(range(20, 28))))
    second = computed(manager, 2, [*range(5), 50])
    assert manager.match(fresh([*range(6), 9])).num_tokens(4) == 6
    check_blocks(manager, [second])


def test_referenced_blocks_are_never_taken() -> None:
    manager = BlockManager(4, 4)
    first = computed(manager, 0, list(range(8)))
    second = computed(manager, 1, list(range(9)))
    manager.release(first)
    other = Sequence(2, list(range(50, 60)), SamplingParams())
    assert not manager.extend(other, 8)
    assert manager.extend(other, 4)
    assert not set(other.block_table) & set(second.block_table)
    check_blocks(manager, [second, other])


def test_a_flush_forgets_everything_even_blocks_in_use() -> None:
    manager = BlockManager(8, 4)
    seq = computed(manager, 0, list(range(8)))
    manager.flush(1)
    assert manager.match(fresh(list(range(9)))).num_tokens(4) == 0
    check_blocks(manager, [seq])


def test_prefix_caching_off_matches_nothing() -> None:
    manager = BlockManager(8, 4, prefix_caching=False)
    computed(manager, 0, list(range(8)))
    assert manager.match(fresh(list(range(8)))).num_tokens(4) == 0


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        BlockManager(0, 4)


class RandomWorkload(RuleBasedStateMachine):
    """Requests with common prefixes and priorities come, go, are aborted, preempted, continued, and
    outlive weight updates and sleep, with drafts of any quality or without; every token must be the
    one computed without a cache."""

    num_steps = 0  # of all runs together
    num_accepted = 0
    num_rejected = 0

    @initialize(
        num_blocks=st.integers(6, 24),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 5),
        extra=st.integers(0, 12),
        prefix_caching=st.booleans() | st.just(True),
        speculate=st.integers(0, 5),
        is_right=st.none() | st.sampled_from((0.0, 0.5, 0.9, 1.0)),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        extra: int,
        prefix_caching: bool,
        speculate: int,
        is_right: float | None,
    ) -> None:
        self.engine, self.runner = make_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_num_seqs + extra,
            prefix_caching=prefix_caching,
            speculate=speculate,
            speculate_free_rows=100,
        )
        if is_right is not None:
            drafter = PlantedDrafter(self._future, VOCAB, is_right=is_right, max_drafts=speculate)
            plant(self.engine, drafter)
        self.capacity = num_blocks * block_size
        self.prompts: dict[int, list[int]] = {}
        self.ended: list[list[int]] = []

    @rule(
        length=st.integers(1, 14),
        tail=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        max_tokens=st.integers(1, 10),
        copies=st.integers(1, 4),
        priority=st.just(0) | st.integers(-1, 1),
    )
    def add_group(
        self, length: int, tail: list[int], max_tokens: int, copies: int, priority: int
    ) -> None:
        prompt = [(3 * i) % VOCAB for i in range(length)] + tail
        for _ in range(copies):
            self._add(prompt, max_tokens, priority)

    @rule(tail=st.lists(st.integers(0, VOCAB - 1), max_size=5), max_tokens=st.integers(1, 6))
    def next_turn(self, tail: list[int], max_tokens: int) -> None:
        if self.ended:
            self._add(self.ended[-1] + tail, max_tokens)

    def _add(self, prompt: list[int], max_tokens: int, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        if len(prompt) + max_tokens > self.capacity:
            with pytest.raises(ValueError, match="cache blocks"):
                self.engine.add(prompt, params)
            return
        self.prompts[self.engine.add(prompt, params, priority)] = prompt

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            queues = self.engine._scheduler
            first = min([*queues.running, *queues.waiting], key=lambda seq: seq.rank, default=None)
            was_running = first is not None and first.row >= 0
            finished = self.engine.step()
            if first is not None and was_running:
                has_ended = first.handle in dict(finished)
                assert has_ended or first.row >= 0, "the first in rank was preempted"
            for handle, output in finished:
                self._end(handle, output)
            self.engine.check()

    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        if self.prompts:
            handle = sorted(self.prompts)[which % len(self.prompts)]
            output = self.engine.abort(handle)
            assert output is not None and output.finish_reason == "abort"
            self._end(handle, output)

    @rule(which=st.integers(0, 50))
    def preempt(self, which: int) -> None:
        running = self.engine._scheduler.running
        if running:
            self.engine._scheduler.preempt(running[which % len(running)])

    @rule()
    def sleep_and_wake(self) -> None:
        self.engine.sleep()
        self.runner.cells[:] = 0
        assert self.engine.step() == []
        self.engine.wake()

    @rule()
    def new_weights(self) -> None:
        self.runner.version += 1
        self.engine.update_weights(export_state(self.engine.model), self.runner.version)

    def _future(self, seq: Sequence, count: int) -> list[int]:
        return replay(seq.ids, [self.runner.version] * count)

    def _end(self, handle: int, output) -> None:
        prompt = self.prompts.pop(handle)
        assert output.ids == replay(prompt, output.versions)
        self.ended.append(prompt + output.ids)

    @invariant()
    def engine_is_sound(self) -> None:
        if hasattr(self, "engine"):
            RandomWorkload.num_steps += 1
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for handle, output in run_all(self.engine).items():
            self._end(handle, output)
        assert not self.prompts, "a request never ended"
        assert self.engine._blocks.num_free == self.engine._blocks.num_blocks, "a block leaked"
        assert not self.engine._scheduler.drafter._groups, "a group of drafts leaked"
        counts = self.engine.metrics()
        RandomWorkload.num_accepted += int(counts["accepted_tokens"])
        RandomWorkload.num_rejected += int(counts["drafted_tokens"] - counts["accepted_tokens"])


@pytest.mark.slow
def test_random_workloads_of_10000_steps_compute_every_token_right_and_leak_nothing() -> None:
    run_state_machine_as_test(
        RandomWorkload,
        settings=settings(
            derandomize=True,  # the counts below hold for every run or for none
            max_examples=360,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert RandomWorkload.num_steps >= 10_000
    assert RandomWorkload.num_accepted >= 1_000 and RandomWorkload.num_rejected >= 1_000
