"""Two pictures of one size under equal tokens: no block, copy, wait or draft is shared by them."""

from __future__ import annotations

import pytest
from pictures import PLACEHOLDER, picture
from test_block_manager import computed

from nanoinfer.block_manager import BlockManager
from nanoinfer.options.full_sequence import FullSequence
from nanoinfer.params import SamplingParams
from nanoinfer.scheduler import BatchScheduler
from nanoinfer.sequence import Sequence
from nanoinfer.variants.speculative import Drafter

SIZE = 4  # tokens a block


def prompt_of(start: int, length: int) -> list[int]:
    return [*range(20, 20 + start), *[PLACEHOLDER] * length, 6, 7]


def seen(handle: int, name: str, start: int = 1, length: int = 9) -> FullSequence:
    params = SamplingParams(images=(picture(name, start, length),))
    return FullSequence(handle, prompt_of(start, length), params)


def compute(manager: BlockManager, seq: Sequence) -> Sequence:
    manager.take_match(seq, manager.match(seq))
    assert manager.extend(seq, len(seq.ids))
    seq.num_computed_tokens = len(seq.ids)
    manager.commit(seq)
    return seq


@pytest.mark.parametrize("start", range(9))
def test_another_picture_of_that_size_shares_no_more_than_what_stands_before_it(start: int) -> None:
    """Wherever the picture begins in a block: not a whole block, and not a part by a copy."""
    manager = BlockManager(16, SIZE)
    compute(manager, seen(0, "a", start))
    assert manager.match(seen(1, "b", start)).num_tokens(SIZE) == start
    same = seen(2, "a", start)
    assert manager.match(same).num_tokens(SIZE) == len(same.ids) - 1


def test_a_picture_matches_no_text_of_placeholders() -> None:
    """A policy may sample the placeholder's id: that is a token like others."""
    manager = BlockManager(16, SIZE)
    computed(manager, 0, prompt_of(1, 9))
    assert manager.match(seen(1, "a")).num_tokens(SIZE) == 1


def test_what_is_sampled_after_a_picture_is_found_again() -> None:
    manager = BlockManager(16, SIZE)
    first = seen(0, "a")
    for token in (3, 4, 5):
        first.append(token, -0.5, 0)
    compute(manager, first)
    params = SamplingParams(images=(picture("a", 1, 9),))
    next_turn = FullSequence(1, [*prompt_of(1, 9), 3, 4, 5, 8], params)
    assert manager.match(next_turn).num_tokens(SIZE) == len(first.ids)
    assert first.ids == [*prompt_of(1, 9), 3, 4, 5]


@pytest.mark.parametrize("length", [1, 9])  # a prompt of less than a block, and of several
def test_nobody_waits_for_blocks_of_another_picture(length: int) -> None:
    """A prompt waits for a running one that computes its next block: of its own picture alone."""
    for name, num_started in (("b", 2), ("a", 1)):
        scheduler = BatchScheduler(BlockManager(64, SIZE), 64, 8)
        scheduler.add(seen(0, "a", start=0, length=length))
        scheduler.add(seen(1, name, start=0, length=length))
        assert len(scheduler.schedule().seqs) == num_started


def test_drafts_follow_what_was_seen_and_never_reach_into_a_picture() -> None:
    """Behind 1 2 3 stood a picture once: nothing is drafted there, though placeholders could be.
    What was said after one picture is no guess for what is said after another."""
    ids = [1, 2, 3, *[PLACEHOLDER] * 3, 4, 5, 1, 2, 3]
    params = SamplingParams(images=(picture("a", 3, 3),))
    drafter = Drafter(8, free_rows=10_000)
    assert drafter.draft(FullSequence(0, ids, params), 8, 1) == []
    assert Drafter(8, free_rows=10_000).draft(Sequence(1, ids, SamplingParams()), 8, 1)[:3] == [
        PLACEHOLDER, PLACEHOLDER, PLACEHOLDER
    ]  # fmt: skip
    two = [*[PLACEHOLDER] * 3, 4, 5, *[PLACEHOLDER] * 3]
    other = SamplingParams(images=(picture("a", 0, 3), picture("b", 5, 3)))
    same = SamplingParams(images=(picture("a", 0, 3), picture("a", 5, 3)))
    assert Drafter(2, free_rows=10_000).draft(FullSequence(2, two, other), 8, 1) == []
    assert Drafter(2, free_rows=10_000).draft(FullSequence(3, two, same), 8, 1) == [4, 5]
