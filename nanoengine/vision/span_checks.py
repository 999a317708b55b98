"""Checks that spans of pictures can be, wherever a sequence gets some."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from nanoengine.spans import ImageSpan


def check_spans(
    tokens: Sequence[int], loss_mask: Sequence[int], images: Sequence[ImageSpan]
) -> None:
    """`ValueError` where spans are not in order, overlap, reach beyond the tokens, cover tokens
    that differ, or tokens that the policy sampled."""
    for span in images:
        if span.length < 1 or span.start < 0 or span.end > len(tokens):
            raise ValueError(f"{_named(span)} lies outside of {len(tokens)} tokens")
        if len(set(tokens[span.start : span.end])) > 1:
            raise ValueError(f"{_named(span)} covers tokens that differ: it takes placeholders")
        if any(loss_mask[span.start : span.end]):
            raise ValueError(f"{_named(span)} covers tokens with a loss mask: nobody sampled it")
    for before, after in pairwise(images):
        if after.start < before.end:
            raise ValueError(f"{_named(after)} begins before the end of {_named(before)}")


def check_types(images: Sequence[ImageSpan]) -> None:
    """`ValueError` for spans out of somebody's JSON whose fields are of other types: 9.0 equals 9,
    and cuts no list."""
    for span in images:
        numbers, texts = (span.start, span.length, *span.grid), (span.key, span.sha256)
        is_typed = all(type(one) is int for one in numbers)
        if not (is_typed and all(isinstance(one, str) for one in texts)):
            raise ValueError(
                f"images: {span!r:.300}: start, length and the three of grid are whole numbers, "
                "key and sha256 texts"
            )


def _named(span: ImageSpan) -> str:
    return f"the picture at tokens {span.start} to {span.end} ({span.sha256[:12]})"
