"""One request inside the engine: its tokens, its blocks, and how far its KV cache is computed."""

from __future__ import annotations

from enum import Enum, auto

from nanoinfer.sampling import FinishReason, Output, SamplingParams


class SequenceState(Enum):
    """WAITING holds no blocks; RUNNING holds blocks for every computed token."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """`tokens` is prompt plus completion; KV of the first `num_computed` lies in the cache."""

    def __init__(self, request_id: int, prompt: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.params = params
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.logps: list[float] = []
        self.versions: list[int] = []
        self.state = SequenceState.WAITING
        self.block_table: list[int] = []
        self.num_computed = 0
        self.num_cached = 0  # prompt tokens that came from the prefix cache, at first admission
        self.num_registered = 0  # leading blocks that the prefix cache knows
        self.chain = 0  # prefix-cache key of the last registered block
        self.finish_reason: FinishReason | None = None

    @property
    def num_completion(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    def append(self, token: int, logp: float, version: int, eos_ids: frozenset[int]) -> None:
        """Take a sampled token and decide whether it ends the completion."""
        self.tokens.append(token)
        self.logps.append(logp)
        self.versions.append(version)
        is_eos = token in eos_ids and not self.params.ignore_eos
        if is_eos or token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        elif self.num_completion >= self.params.max_tokens:
            self.finish_reason = "length"

    def drop_cache(self) -> None:
        """Forget everything computed; the tokens stay, so the next prefill rebuilds it."""
        self.block_table = []
        self.num_computed = 0
        self.num_registered = 0
        self.chain = 0
        self.state = SequenceState.WAITING

    def output(self) -> Output:
        return Output(
            ids=self.tokens[self.num_prompt :],
            logps=list(self.logps),
            versions=list(self.versions),
            finish_reason=self.finish_reason or "abort",
            num_cached_tokens=self.num_cached,
        )
