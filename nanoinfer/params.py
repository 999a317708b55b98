"""A request's parameters (`SamplingParams`) and its answer (`Output`).

Options of the engine itself are in config.py; how a token is drawn from them, in sampler.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pkgutil import resolve_name
from typing import Literal

from nanoengine.spans import ImageSpan

FinishReason = Literal["stop", "length", "abort"]
GrammarKind = Literal["json_schema", "regex", "choice", "lark"]
LogpsMode = Literal["tempered", "raw", "kept"]

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # logits over it stay far inside fp32
_CHECK_GRAMMAR = "nanoinfer.options.param_checks:check_grammar"
_CHECK_PARAMS = "nanoinfer.options.param_checks:check_params"
_GOLDEN = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class Grammar:
    """A language that a completion must match: `value` holds a JSON schema (as text), a regular
    expression or a Lark grammar; kind "choice" takes one of the texts in `choices`.

    `Grammar("regex", r"\\d{3}-\\d{4}")`, `Grammar("choice", choices=("yes", "no"))`."""

    kind: GrammarKind
    value: str = ""
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        resolve_name(_CHECK_GRAMMAR)(self)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The way one request is decoded: `SamplingParams(max_tokens=256, temperature=0.7, seed=3)` is
    what a rollout asks for, `SamplingParams(temperature=0)` is greedy.

    Log-probs of a greedy request are those of temperature 1.
    Logits are changed in this order: repetition penalty, presence and frequency penalty, bias,
    allowed tokens, grammar or `min_tokens`, temperature, then top-k, top-p and min-p of the rest.
    """

    max_tokens: int = 64
    min_tokens: int = 0  # before so many no stop token can be sampled, and no stop text counts
    temperature: float = 1.0
    top_k: int = 0  # 0 keeps every token
    top_p: float = 1.0
    min_p: float = 0.0  # keeps tokens at least this likely relative to the likeliest
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of seen ids
    presence_penalty: float = 0.0  # subtracted from the logits of sampled ids
    frequency_penalty: float = 0.0  # the same, times how often they were sampled
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    seed: int = 0  # the sampled tokens depend on (seed, position) alone, never on the batch
    n: int = 1  # completions of one prompt, see `members`
    stop: tuple[str, ...] = ()  # texts that end the completion; they are not part of `Output.text`
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # `Output.text` ends with the stop text or token, not before it
    detokenize: bool = False  # fill `Output.text`; implied by `stop`
    skip_special: bool = True  # control tokens are left out of `Output.text`
    top_logps: int = 0  # so many likeliest tokens are reported at each position
    prompt_logps: bool = False  # score the prompt too; it is then never taken from the cache
    logps_mode: LogpsMode = "tempered"  # what a trainer needs; see `Output.logps`
    adapter: str = ""  # a LoRA adapter that the engine has loaded; empty: the model alone
    images: tuple[ImageSpan, ...] = ()  # the pictures among the tokens of the prompt, in order

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed", "n", "top_logps"):
            value = getattr(self, name)
            if not isinstance(value, Integral):
                raise ValueError(f"{name}={value!r}: must be an integer")
            object.__setattr__(self, name, int(value))  # numpy's would wrap or overflow later
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature}: must be 0 (greedy) or between "
                f"{MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}"
            )
        if self.n < 1:
            raise ValueError(f"n={self.n}: must be at least 1")
        if not self.is_plain:
            resolve_name(_CHECK_PARAMS)(self)

    @property
    def is_plain(self) -> bool:
        """True for a draw from the whole distribution that ends by its length or by a token."""
        asked = ((name, value) for name, value in vars(self).items() if name not in _PLAIN)
        return all(value == _DEFAULTS[name] for name, value in asked)

    def stop_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end the completion, with a model's own."""
        return frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else eos_ids)

    def members(self, place: int = 0) -> list[SamplingParams]:
        """The `n` requests this one stands for. `place` is that of the prompt among those that
        share these parameters: no two of all their requests share a seed, so equal prompts are
        sampled anew. The very first keeps the seed, the others' are derived from it, far from the
        small numbers that callers count up."""
        if self.n == 1 and place == 0:
            return [self]
        places = range(place * self.n, (place + 1) * self.n)
        seeds = [(self.seed + i * _GOLDEN) & _U64 if i else self.seed for i in places]
        return [replace(self, n=1, seed=seed) for seed in seeds]


_PLAIN = ("max_tokens", "temperature", "seed", "n", "stop_token_ids", "ignore_eos")
_DEFAULTS = {one.name: one.default for one in fields(SamplingParams)} | {"logit_bias": {}}


@dataclass(kw_only=True)
class Output:
    """The completion alone, never the prompt. `ids`, `logps`, `versions` have one entry a token.

    Two tokens, the second a stop token, with new weights between them:
    `Output(ids=[50, 2], logps=[-0.4, -1.1], versions=[3, 4], finish_reason="stop", stop_reason=2)`.

    A stop token that ended the completion is its last id (finish_reason "stop"); the tokens of a
    stop text are in `ids` too, whose text goes on to where the engine stopped sampling.
    """

    ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    """Nats, fp32, of the whole vocabulary before any edit or truncation: of the tempered
    distribution, of the model's own where `logps_mode` is "raw"; after truncation where "kept"."""
    versions: list[int] = field(default_factory=list)  # policy version that sampled each token
    cache_versions: list[int] = field(default_factory=list)
    """For each token the oldest policy version among the keys and values that it was sampled over:
    that of the prompt's cached part. Other than `versions` only where caches are kept
    (`InferConfig.in_flight`); such tokens are no policy's own."""
    finish_reason: FinishReason = "length"
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    sampled_logps: list[float] = field(default_factory=list)
    """Log-probs of the distribution that was sampled from, after every penalty, mask and
    truncation; the same as tempered `logps` where there was none, 0 where temperature is 0."""
    stop_reason: int | str | None = None  # the token id or text that ended it
    text: str | None = None  # where asked for; without the stop token or text
    top_logps: list[list[tuple[int, float]]] = field(default_factory=list)
    """(token, logp) of the likeliest, most likely first, of the distribution of `logps`."""
    prompt_logps: list[float] = field(default_factory=list)
    """Log-probs of the prompt's second token and on, each given those before it, in the same mode
    as `logps`; all by one version of the weights, the latest under which the request ran."""
    prompt_top_logps: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest at the positions of `prompt_logps`, where both were asked for."""
