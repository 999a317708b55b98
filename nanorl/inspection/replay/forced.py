"""A rollout whose tokens are of several policy versions, played again as far as time had no say.

With staleness the clock decides which weights sample which token, so such a rollout is not sampled
again: the stored turns are said once more in the environment, which gives its observations and its
reward, and each sampled token is scored by the weights that sampled it.
Left out: whether the same seed gives those tokens again; no single policy does. Log-probs of tokens
that were sampled over keys and values of older weights (`--engine.in-flight keep`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from nanoengine.packing import Sample
from nanoengine.spans import content_ids
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.context import Generator
from nanorl.types import Branch, Rollout

_OLD_CACHE = "old_cache_tokens"
"""The metric of a rollout that counts its tokens over keys and values of older weights."""


def has_old_cache(rollout: Rollout) -> bool:
    """Say whether some of its log-probs are no single policy's."""
    return rollout.metrics.get(_OLD_CACHE, 0) > 0


def versions_of(rollout: Rollout) -> set[int]:
    return {version for one in rollout.sequences for version in one.versions if version >= 0}


class StoredTurns:
    """A generator that says what the rollout's policy said after the same tokens."""

    def __init__(self, rollout: Rollout, eos_ids: Collection[int]) -> None:
        self._sequences, self._eos_ids = rollout.sequences, eos_ids

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        """The stored turn. After tokens that are not stored, an output without any, which ends the
        episode: the difference lies before it."""
        begin, keys = len(ids), content_ids(ids, params.images)
        for sequence in self._sequences:
            if begin < len(sequence.tokens) and sequence.keys[:begin] == keys:
                end = _end_of_turn(sequence, begin)
                # A turn may end by itself with the last token that it was allowed.
                is_ended = sequence.tokens[end - 1] in params.stop_ids(self._eos_ids)
                is_cut = not is_ended and end - begin == params.max_tokens
                return Output(
                    ids=sequence.tokens[begin:end],
                    logps=sequence.logps[begin:end],
                    versions=sequence.versions[begin:end],
                    top_logps=[[(one, 0.0) for one in ids] for ids in sequence.kept[begin:end]],
                    finish_reason="length" if is_cut else "stop",
                )
        return Output(ids=[], logps=[], versions=[], finish_reason="length")


def _end_of_turn(sequence: Branch, begin: int) -> int:
    rest = sequence.loss_mask[begin:]
    return begin + (rest.index(0) if 0 in rest else len(rest))


def samples_of(rollout: Rollout) -> list[Sample]:
    """Its sequences, to be scored."""
    return [
        Sample(tokens=one.tokens, loss_mask=one.loss_mask, kept=one.kept or None, images=one.images)
        for one in rollout.sequences
    ]


async def sampler_scores(
    generator: Generator, rollout: Rollout, temperature: float
) -> list[list[float]]:
    """Log-probs of all tokens of each sequence up to the last sampled one, by the engine that
    samples: the trainer does not have its weights where they are quantised."""

    async def scores_of(one: Branch) -> list[float]:
        last = max((at for at, version in enumerate(one.versions) if version >= 0), default=0)
        if not last:
            return []
        params = SamplingParams(
            max_tokens=1,
            temperature=temperature,
            prompt_logps=True,
            allowed_token_ids=(one.tokens[last],),  # in place of one prompt token more, for which
            images=tuple(span for span in one.images if span.end <= last),  # there may be no room
        )
        output = await generator.generate(one.tokens[:last], params)
        return [0.0, *output.prompt_logps, *output.logps]

    return list(await asyncio.gather(*map(scores_of, rollout.sequences)))


def with_scores(rollout: Rollout, scores: Mapping[int, Sequence[Sequence[float]]]) -> None:
    """Put in each sampled token's log-prob by the version that sampled it; `scores` has those of
    all tokens of each sequence, by version."""
    for number, sequence in enumerate(rollout.sequences):
        for place, version in enumerate(sequence.versions):
            if version >= 0:
                sequence.logps[place] = float(scores[version][number][place])
