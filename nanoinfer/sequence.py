"""One request on its way through the engine: its tokens, and how many of them are in the cache.

Everything a sequence must remember across a preemption or a weight update (tokens, log-probs,
versions) is here; everything it may lose (blocks, row) is cleared by `forget_cache`.
Next: block_manager.py (where `block_table` come from), scheduler.py (who runs when).
"""

from __future__ import annotations

from nanoinfer.options.logit_edits import LogitEdits
from nanoinfer.options.text import TextStream
from nanoinfer.params import FinishReason, Output, SamplingParams


class Sequence:
    """A request. `ids` is the prompt followed by what was sampled so far.

    A prompt of 10 tokens that has sampled 2, in blocks of 4: `len(ids) == 12`, `num_prompt == 10`,
    `num_computed_tokens == 11` (the last token is computed when it is fed) and
    `block_table == [0, 1, 2]`. `num_cached_tokens` counts what the cache had of the prompt at first
    admission."""

    __slots__ = (
        "adapter_key",
        "block_table",
        "cache_versions",
        "digests",
        "drafts",
        "edits",
        "finish_reason",
        "handle",
        "ids",
        "keeps_old_cache",
        "logps",
        "num_blocks_in_row",
        "num_cached_tokens",
        "num_committed_tokens",
        "num_computed_tokens",
        "num_prompt",
        "oldest_version",
        "params",
        "pending_keys",
        "priority",
        "prompt_logps",
        "prompt_top_logps",
        "row",
        "salt",
        "sampled_logps",
        "stop_ids",
        "stop_reason",
        "text",
        "top_logps",
        "versions",
        "waits_for",
    )

    def __init__(
        self,
        handle: int,
        ids: list[int],
        params: SamplingParams,
        eos_ids: tuple[int, ...] = (),
        priority: int = 0,
    ) -> None:
        self.handle = handle
        self.priority = priority
        self.params = params
        self.ids = list(ids)
        self.num_prompt = len(ids)
        self.edits: LogitEdits | None = None  # set by the engine where `params.is_edited`
        self.text: TextStream | None = None  # set by the engine where `params.wants_text`
        self.logps: list[float] = []
        self.sampled_logps: list[float] = []
        self.top_logps: list[list[tuple[int, float]]] = []  # where `params.top_logps`
        self.prompt_logps: list[float] = []  # where `params.prompt_logps`
        self.prompt_top_logps: list[list[tuple[int, float]]] = []  # where both
        self.versions: list[int] = []
        self.cache_versions: list[int] = []
        self.stop_ids = params.stop_ids(eos_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = (
            None  # prompt tokens found in the cache at first admission
        )
        self.adapter_key = b""  # tells its adapter's cache from others'; set by the engine
        self.salt = b""  # what `digests` were chained from
        self.digests: list[bytes] = []  # of the leading full blocks of `ids`
        self.forget_cache()

    def forget_cache(self) -> None:
        """Back to the state of a request that never ran, but for its sampled tokens."""
        self.block_table: list[int] = []
        self.num_computed_tokens = 0  # tokens whose keys and values are in `block_table`
        self.num_committed_tokens = 0  # of those, how many the prefix cache has been told of
        self.row = -1  # in the batch; -1 while waiting
        self.num_blocks_in_row = 0  # of `block_table`, how many are written to that row
        self.pending_keys: list[bytes] = []  # blocks this sequence is about to compute
        self.drafts: list[int] = []  # guesses computed after `ids` in the step under way
        self.keeps_old_cache = False  # some of it is older weights', so nobody else may find it
        self.oldest_version: int | None = None  # of them, where it does
        self.waits_for = -1  # handle of a running sequence that computes our prefix

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.ids) - self.num_computed_tokens

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def max_len(self) -> int:
        return self.num_prompt + self.params.max_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """The order of service: lower priority numbers first, then earlier arrivals."""
        return (self.priority, self.handle)

    @property
    def cache_limit(self) -> int:
        """The most tokens that may come from the prefix cache: not the last, whose logits are
        wanted, nor any that are still to be scored."""
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
        """Take a sampled token, and decide whether it was the last. `cache_version` is given where
        it was sampled over another cache than this one."""
        self.ids.append(token)
        self.logps.append(logp)
        self.sampled_logps.append(logp if sampled_logp is None else sampled_logp)
        self.versions.append(version)
        if cache_version is None:
            cache_version = version if self.oldest_version is None else self.oldest_version
        self.cache_versions.append(cache_version)
        if token in self.stop_ids:
            self._finish("stop", token)
            if self.text is not None and self.params.include_stop:
                self.text.push(token)
        elif self.text is not None and (text := self.text.push(token)) is not None:
            self._finish("stop", text)
        elif self.num_sampled >= self.params.max_tokens:
            self._finish("length")
        if self.edits is not None and self.edits.matcher is not None:
            self._follow_grammar(token)

    def resume(self, sampled: Output) -> None:
        """Take tokens that were sampled elsewhere as if they had been sampled here. `ValueError` if
        they could not be this request's."""
        num_tokens = len(sampled.ids)
        tops = sampled.top_logps if self.params.top_logps else [[]] * num_tokens
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
            if self.finish_reason is not None:
                raise ValueError(
                    f"sampled: the request ended after {at} of its {num_tokens} tokens "
                    f"({self.finish_reason}); give what an abort left"
                )
            if self.params.top_logps:
                self.top_logps.append(top)
            self.append(token, logp, version, sampled_logp, cache_version)
        if self.finish_reason is not None:
            raise ValueError(
                f"sampled: its last token ended the request ({self.finish_reason}); there is "
                "nothing to continue"
            )

    def _follow_grammar(self, token: int) -> None:
        assert self.edits is not None and self.edits.matcher is not None
        matcher = self.edits.matcher
        if token not in self.stop_ids:
            matcher.accept(token)
        if matcher.error:
            self._finish("abort", matcher.error)
        elif self.finish_reason != "stop" and matcher.is_done:
            self._finish("stop")

    def _finish(self, reason: FinishReason, cause: int | str | None = None) -> None:
        self.finish_reason, self.stop_reason = reason, cause

    def output(self) -> Output:
        assert self.finish_reason is not None, f"request {self.handle} has not finished"
        is_cut = self.finish_reason == "stop" and isinstance(self.stop_reason, str)
        if self.text is not None and not is_cut:
            text = self.text.finish()
            if text is not None and self.finish_reason != "abort":
                self._finish("stop", text)
        return Output(
            ids=self.ids[self.num_prompt :],
            logps=self.logps,
            versions=self.versions,
            cache_versions=self.cache_versions,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            sampled_logps=self.sampled_logps,
            stop_reason=self.stop_reason,
            text=self.text.text if self.text is not None else None,
            top_logps=self.top_logps,
            prompt_logps=self.prompt_logps,
            prompt_top_logps=self.prompt_top_logps,
        )
