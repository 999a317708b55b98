"""A request that asks for more than tokens and their log-probs: edits, text, scores, an adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from nanoengine.spans import content_ids
from nanoinfer.options.logit_edits import LogitEdits, Matcher
from nanoinfer.options.param_checks import is_edited
from nanoinfer.options.text import TextStream
from nanoinfer.params import Output, SamplingParams
from nanoinfer.sequence import Sequence
from nanoinfer.variants.adapters import AdapterPool


class FullSequence(Sequence):
    """A request, with what it asks for beside its tokens."""

    is_plain: ClassVar[bool] = False

    def __init__(
        self,
        handle: int,
        ids: list[int],
        params: SamplingParams,
        eos_ids: tuple[int, ...] = (),
        priority: int = 0,
    ) -> None:
        super().__init__(handle, ids, params, eos_ids, priority)
        self.keys = content_ids(self.ids, params.images)
        self.edits: LogitEdits | None = None
        self.text: TextStream | None = None
        self.adapters: AdapterPool | None = None  # where `params.adapter`
        self.top_logps: list[list[tuple[int, float]]] = []  # where `params.top_logps`
        self.prompt_logps: list[float] = []  # where `params.prompt_logps`
        self.prompt_top_logps: list[list[tuple[int, float]]] = []  # where both

    def bring(
        self, matcher: Matcher | None, text: TextStream | None, adapters: AdapterPool | None
    ) -> None:
        """Give it the grammar, the text and the adapters that its params name."""
        if is_edited(self.params):
            self.edits = LogitEdits(self.ids, self.num_prompt, self.params, matcher, self.stop_ids)
        self.text, self.adapters = text, adapters
        if adapters is not None:
            self.cache_key = adapters.key(self.params.adapter)

    @property
    def cache_limit(self) -> int:
        """As of every request, but no token of the prompt that is still to be scored."""
        limit = len(self.ids) - 1
        if self.params.prompt_logps and len(self.prompt_logps) < self.num_prompt - 1:
            return min(limit, len(self.prompt_logps))
        return limit

    def unscored(self, num_new: int) -> range:
        """Positions among the next `num_new` tokens whose successor in the prompt is to be
        scored."""
        if not self.params.prompt_logps:
            return range(0)
        first = max(self.num_computed_tokens, len(self.prompt_logps))
        return range(first, min(self.num_computed_tokens + num_new, self.num_prompt - 1))

    def append(
        self,
        token: int,
        logp: float,
        version: int,
        sampled_logp: float | None = None,
        cache_version: int | None = None,
    ) -> None:
        """Take a sampled token. Its text may end the request, and its grammar."""
        super().append(token, logp, version, sampled_logp, cache_version)
        if self.keys is not self.ids:
            self.keys.append(token)
        if token in self.stop_ids:
            if self.text is not None and self.params.include_stop:
                self.text.push(token)
        elif self.text is not None and (text := self.text.push(token)) is not None:
            self.finish("stop", text)
        if self.edits is not None and self.edits.matcher is not None:
            self._follow_grammar(token, self.edits.matcher)

    def _follow_grammar(self, token: int, matcher: Matcher) -> None:
        if token not in self.stop_ids:
            matcher.accept(token)
        if matcher.error:
            self.finish("abort", matcher.error)
        elif self.finish_reason != "stop" and matcher.is_done:
            self.finish("stop")

    def start_version(self) -> None:
        """New weights have come: the scores of the prompt were the old ones'."""
        self.prompt_logps.clear()
        self.prompt_top_logps.clear()

    def output(self) -> Output:
        """The answer, with what was asked for."""
        is_cut = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        if self.text is not None and not is_cut:
            text = self.text.finish()
            if text is not None and self.finish_reason != "abort":
                self.finish("stop", text)
        return replace(
            super().output(),
            text=self.text.text if self.text is not None else None,
            top_logps=self.top_logps,
            prompt_logps=self.prompt_logps,
            prompt_top_logps=self.prompt_top_logps,
        )


def resume(seq: Sequence, sampled: Output) -> None:
    """Take tokens that were sampled elsewhere as if they had been sampled here. `ValueError` if
    they could not be this request's."""
    num_tokens = len(sampled.ids)
    has_tops = bool(seq.params.top_logps) or seq.params.logps_mode == "kept"
    tops = sampled.top_logps if has_tops else [[]] * num_tokens
    # older engines have none, and clients that know no such column do not cut it
    cached = (sampled.cache_versions or sampled.versions)[:num_tokens]
    columns = (sampled.logps, sampled.versions, sampled.sampled_logps, tops, cached)
    if any(len(column) != num_tokens for column in columns):
        raise ValueError(
            f"sampled: {num_tokens} ids, but logps, versions, sampled_logps, top_logps and "
            f"cache_versions have {', '.join(str(len(column)) for column in columns)}; give "
            "one for each id"
        )
    rows = zip(sampled.ids, *columns, strict=True)
    for at, (token, logp, version, sampled_logp, top, cache_version) in enumerate(rows):
        if seq.finish_reason is not None:
            raise ValueError(
                f"sampled: the request ended after {at} of its {num_tokens} tokens "
                f"({seq.finish_reason}); give what an abort left"
            )
        if isinstance(seq, FullSequence) and has_tops:
            seq.top_logps.append(top)
        seq.append(token, logp, version, sampled_logp, cache_version)
    if seq.finish_reason is not None:
        raise ValueError(
            f"sampled: its last token ended the request ({seq.finish_reason}); there is "
            "nothing to continue"
        )
