"""One request on its way through the engine: its tokens, and how many of them are in the cache.

Everything a sequence must remember across a preemption or a weight update (tokens, log-probs,
versions) is here; everything it may lose (blocks, row) is cleared by `forget_cache`.
Next: block_manager.py (where `block_ids` come from), scheduler.py (who runs when).
"""

from __future__ import annotations

from nanoinfer.sampling import FinishReason, Output, SamplingParams


class Sequence:
    """A request. `ids` is the prompt followed by what was sampled so far."""

    __slots__ = (
        "block_ids",
        "digests",
        "finish_reason",
        "handle",
        "ids",
        "logps",
        "num_cached",
        "num_committed",
        "num_computed",
        "num_in_row",
        "num_prompt",
        "params",
        "pending_keys",
        "row",
        "salt",
        "stop_ids",
        "versions",
        "waits_for",
    )

    def __init__(
        self, handle: int, ids: list[int], params: SamplingParams, eos_ids: tuple[int, ...] = ()
    ) -> None:
        self.handle = handle
        self.params = params
        self.ids = list(ids)
        self.num_prompt = len(ids)
        self.logps: list[float] = []
        self.versions: list[int] = []
        self.stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_ids)
        )
        self.finish_reason: FinishReason | None = None
        self.num_cached: int | None = None  # prompt tokens found in the cache at first admission
        self.salt = b""  # what `digests` were chained from
        self.digests: list[bytes] = []  # of the leading full blocks of `ids`
        self.forget_cache()

    def forget_cache(self) -> None:
        """Back to the state of a request that never ran, but for its sampled tokens."""
        self.block_ids: list[int] = []
        self.num_computed = 0  # tokens whose keys and values are in `block_ids`
        self.num_committed = 0  # of those, how many the prefix cache has been told of
        self.row = -1  # in the batch; -1 while waiting
        self.num_in_row = 0  # of `block_ids`, how many are written to that row
        self.pending_keys: list[bytes] = []  # blocks this sequence is about to compute
        self.waits_for = -1  # handle of a running sequence that computes our prefix

    @property
    def num_uncomputed(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def max_len(self) -> int:
        return self.num_prompt + self.params.max_tokens

    def append(self, token: int, logp: float, version: int) -> None:
        """Take a sampled token, and decide whether it was the last."""
        self.ids.append(token)
        self.logps.append(logp)
        self.versions.append(version)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif self.num_sampled >= self.params.max_tokens:
            self.finish_reason = "length"

    def output(self) -> Output:
        assert self.finish_reason is not None, f"request {self.handle} has not finished"
        return Output(
            ids=self.ids[self.num_prompt :],
            logps=self.logps,
            versions=self.versions,
            finish_reason=self.finish_reason,
            num_cached_tokens=self.num_cached or 0,
        )
