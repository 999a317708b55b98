"""What an answer tells of its prompt: the log-probs of its tokens, beside the answer or without it.

An engine reports as many likeliest tokens of the prompt as of the answer. Where a request asks for
more of one than of the other, the rest is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import Output

Json = dict[str, Any]


def without_answer(output: Output) -> Output:
    """The scores of the prompt alone: of a request for no tokens, for which one was sampled."""
    return replace(
        output,
        ids=[],
        logps=[],
        sampled_logps=[],
        versions=[],
        top_logps=[],
        text="",
        finish_reason="length",
        stop_reason=None,
    )


def with_top(output: Output, count: int) -> Output:
    """The output with at most `count` likeliest tokens at each position of the answer."""
    return replace(output, top_logps=[row[:count] for row in output.top_logps] if count else [])


def prompt_scores(
    tokenizer: ChatTokenizer, ids: Sequence[int], output: Output, count: int
) -> list[Json | None]:
    """As vLLM's `prompt_logprobs`: nothing for the first token, then {token id: what is known of
    it} of each, and of `count` likeliest beside it. A rank is told of those alone."""
    rows: list[Json | None] = [None]
    tops = output.prompt_top_logps or [[]] * len(output.prompt_logps)
    for token, logp, likeliest in zip(ids[1:], output.prompt_logps, tops, strict=True):
        shown = {token: (logp, None)} | {
            likely: (its, place)
            for place, (likely, its) in enumerate(likeliest, 1)
            if place <= count or likely == token
        }
        rows.append(
            {
                str(one): {"logprob": its, "rank": rank, "decoded_token": tokenizer.decode([one])}
                for one, (its, rank) in shown.items()
            }
        )
    return rows
