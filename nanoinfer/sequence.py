"""One request on its way through the engine: its tokens, and how many of them are in the cache.

Everything a sequence must remember across a preemption or a weight update (tokens, log-probs,
versions) is here; everything it may lose (blocks, row) is cleared by `forget_cache`. A request that
asks for more than tokens and their log-probs is an options/full_sequence.py `FullSequence`.
Next: block_manager.py (where `block_table` come from), scheduler.py (who runs when).
"""

from __future__ import annotations

from typing import ClassVar

from nanoinfer.params import FinishReason, Output, SamplingParams


class Sequence:
    """A request. `ids` is the prompt followed by what was sampled so far.

    A prompt of 10 tokens that has sampled 2, in blocks of 4: `len(ids) == 12`, `num_prompt == 10`,
    `num_computed_tokens == 11` (the last token is computed when it is fed) and
    `block_table == [0, 1, 2]`. `num_cached_tokens` counts what the cache had of the prompt at first
    admission."""

    is_plain: ClassVar[bool] = True
    """True where its params ask for no more than tokens and their log-probs."""

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
        self.keys = self.ids  # content ids (nanoengine/spans.py): what caches compare
        self.num_prompt = len(ids)
        self.logps: list[float] = []
        self.sampled_logps: list[float] = []
        self.versions: list[int] = []
        self.cache_versions: list[int] = []
        self.stop_ids = params.stop_ids(eos_ids)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None  # None: not yet admitted
        self.cache_key = b""  # tells the cache of an adapter from others'
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
    def rank(self) -> tuple[int, int]:
        """The order of service: lower priority numbers first, then earlier arrivals."""
        return (self.priority, self.handle)

    @property
    def cache_limit(self) -> int:
        """The most tokens that may come from the prefix cache: not the last, whose logits are
        wanted."""
        return len(self.ids) - 1

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
        # Weights may change between two tokens of a request. An off-policy correction needs to know
        # which policy drew each of them, and whether its keys and values were still an older one's.
        self.versions.append(version)
        if cache_version is None:
            cache_version = version if self.oldest_version is None else self.oldest_version
        self.cache_versions.append(cache_version)
        if token in self.stop_ids:
            self.finish("stop", token)
        elif self.num_sampled >= self.params.max_tokens:
            self.finish("length")

    def finish(self, reason: FinishReason, cause: int | str | None = None) -> None:
        """No token follows; `cause` is the token or text that ended the request."""
        self.finish_reason, self.stop_reason = reason, cause

    def start_version(self) -> None:
        """New weights have come; of what it has so far a plain request loses nothing."""

    def output(self) -> Output:
        """The answer of a request that has finished."""
        assert self.finish_reason is not None, f"request {self.handle} has not finished"
        return Output(
            ids=self.ids[self.num_prompt :],
            logps=self.logps,
            versions=self.versions,
            cache_versions=self.cache_versions,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            sampled_logps=self.sampled_logps,
            stop_reason=self.stop_reason,
        )
