"""Content ids, and trees of rows over them: two pictures of one size are never one."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import asdict, replace

import pytest
from pictures import PLACEHOLDER, picture

from nanoengine.packing import Sample, make_micro_batches
from nanoengine.parallel.dealing import balanced_parts, deal
from nanoengine.parallel.layout import Layout
from nanoengine.spans import ImageSpan, content_ids
from nanoengine.vision.span_checks import check_spans

TOKENS = [5, *[PLACEHOLDER] * 4, 6, 7]
MASK = [0] * 6 + [1]


def test_without_pictures_the_tokens_are_the_content_ids() -> None:
    assert content_ids(TOKENS, ()) is TOKENS


def test_a_position_in_a_picture_has_an_id_of_its_key_and_its_place() -> None:
    ids = content_ids(TOKENS, [picture("a", 1)])
    # SHAKE-128 of the key, eight little-endian bytes a place, the highest bit set: negative.
    stream = hashlib.shake_128(b"a").digest(32)
    places = [int.from_bytes(stream[8 * j : 8 * j + 8], "little") | 1 << 63 for j in range(4)]
    assert ids == [5, *(place - (1 << 64) for place in places), 6, 7]
    assert TOKENS[1] == PLACEHOLDER, "the tokens stay as they are"


def test_the_first_rows_of_a_longer_picture_of_that_key_are_the_same() -> None:
    short = content_ids([PLACEHOLDER] * 8, [picture("a", 0, 5)])
    assert short[:5] == content_ids([PLACEHOLDER] * 8, [picture("a", 0, 8)])[:5]
    assert short[5:] == [PLACEHOLDER] * 3


def test_a_million_ids_of_ten_thousand_pictures_are_different() -> None:
    ids = {
        one
        for number in range(10_000)
        for one in content_ids([PLACEHOLDER] * 100, [picture(f"{number:x}", 0, 100)])
    }
    assert len(ids) == 1_000_000
    assert max(ids) < 0
    assert min(ids) >= -(1 << 63)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([picture("a", 4)], "outside of 7 tokens"),
        ([picture("a", -1)], "outside of 7 tokens"),
        ([picture("a", 1, 0)], "outside of 7 tokens"),
        ([picture("a", 0)], "tokens that differ"),
        ([picture("a", 6, 1)], "with a loss mask"),
        ([picture("a", 1, 2), picture("b", 2, 2)], "before the end of"),
        ([picture("b", 3, 2), picture("a", 1, 2)], "before the end of"),
    ],
)
def test_spans_that_cannot_be_are_refused(images: list[ImageSpan], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_spans(TOKENS, MASK, images)
    with pytest.raises(ValueError, match=said):
        Sample(tokens=TOKENS, loss_mask=MASK, images=images)


def test_pictures_that_touch_are_two() -> None:
    check_spans(TOKENS, MASK, [picture("a", 1, 2), picture("b", 3, 2)])
    ids = content_ids(TOKENS, [picture("a", 1, 2), picture("a", 3, 2)])
    assert ids[1:3] == ids[3:5]


def test_a_span_comes_back_from_json() -> None:
    span = picture("a", 1)
    assert ImageSpan.from_json(json.loads(json.dumps(asdict(span)))) == span


# -- trees of rows ---------------------------------------------------------------------------------


def sample(name: str, *more: int, start: int = 1) -> Sample:
    tokens = [5] * start + [PLACEHOLDER] * 4 + [6, *more]
    mask = [0] * (start + 5) + [1] * len(more)
    return Sample(tokens=tokens, loss_mask=mask, group="g", images=[picture(name, start)])


def test_members_that_saw_different_screens_share_no_row_from_the_picture_on() -> None:
    (micro,) = make_micro_batches([sample("a", 7), sample("b", 7)], 64, share_prefix=True)
    assert micro.ids_N.tolist() == [5, 9, 9, 9, 9, 6, 9, 9, 9, 9, 6], "the 5 before it is shared"
    assert micro.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    assert micro.prefix_of_S == [-1, 0, 0]


def test_members_that_saw_the_same_screen_share_its_rows() -> None:
    (micro,) = make_micro_batches([sample("a", 7, 8), sample("a", 8, 8)], 64, share_prefix=True)
    assert micro.ids_N.tolist() == [5, 9, 9, 9, 9, 6, 7, 8]
    assert micro.positions_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]


def test_what_the_model_reads_is_what_it_reads_without_trees() -> None:
    """For any pictures each sample's rows hold its own tokens, in its own context."""
    rng = random.Random(3)
    for _ in range(200):
        samples = []
        for _ in range(rng.randint(2, 6)):
            length = rng.randint(1, 3)
            tokens = [rng.choice((1, 2)), *[PLACEHOLDER] * length, rng.choice((1, 2)), 3]
            span = picture(rng.choice("ab"), 1, length)
            mask = [0] * (len(tokens) - 1) + [1]
            samples.append(Sample(tokens=tokens, loss_mask=mask, group="g", images=[span]))
        for micro in make_micro_batches(samples, 64, share_prefix=True):
            rows = micro.rows_T if micro.rows_T is not None else range(micro.num_rows)
            read = [int(micro.ids_N[row]) for row in rows]
            for i, index in enumerate(micro.index):
                place = slice(micro.starts[i], micro.starts[i + 1])
                assert read[place] == samples[index].tokens[:-1]
        seen = {tuple(content_ids(one.tokens, one.images)[:-1][:end]) for one in samples
                for end in range(1, len(one.tokens))}  # fmt: skip
        total = sum(one.num_rows for one in make_micro_batches(samples, 64, share_prefix=True))
        assert total == len(seen), "each distinct beginning is one row"


def test_ranks_are_dealt_rows_as_they_are_shared() -> None:
    """Equal tokens of two pictures: those of one picture share rows, so a rank has both."""
    samples = [sample(name, 7, 8) for name in "abab"]
    parts = deal(samples, Layout(dp=2), share_prefix=True).parts
    assert sorted(parts) == [(0, 2), (1, 3)]


def test_ranks_are_dealt_patches_beside_rows() -> None:
    """24 rows; 8 rows and a picture of 2 x 8 patches; twice 8 rows: 32 and 32 with a text each."""
    text = [Sample(tokens=[1] * n, loss_mask=[0] * n) for n in (25, 9, 9)]
    shows = Sample(
        tokens=[1, *[PLACEHOLDER] * 4, 1, 1, 1, 1], loss_mask=[0] * 9, images=[picture("a", 1)]
    )
    samples = [text[0], shows, *text[1:]]
    assert balanced_parts(samples, 2) == [[0, 2], [1, 3]]
    assert deal(samples, Layout(dp=2), share_prefix=True).parts == ((0, 2), (1, 3))
    blind = [text[0], replace(shows, images=()), *text[1:]]
    assert balanced_parts(blind, 2) == [[0], [1, 2, 3]]


def test_a_picture_counts_once_in_a_part() -> None:
    """Each of the first two is 8 rows and 16 patches, so they part; the third costs 8 more where
    its picture is, and 24 elsewhere."""
    shows = [
        Sample(tokens=[1, *[PLACEHOLDER] * 4, *[1] * 4], loss_mask=[0] * 9, images=[picture(n, 1)])
        for n in "aba"
    ]
    longer = Sample(tokens=[1] * 12, loss_mask=[0] * 12)
    assert balanced_parts([*shows, longer], 2) == [[0, 2], [1, 3]]
