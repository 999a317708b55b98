"""The params of a request that asks for more than a plain draw: what they want, what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import get_args

from nanoinfer.params import Grammar, GrammarKind, LogpsMode, SamplingParams

MAX_BIAS = 100.0  # as in the OpenAI API; finite, so that no bias can leave nothing to sample
MAX_REPETITION = 100.0  # and its inverse
MAX_TOP_K = 2**31 - 1  # an int32 on a GPU


def check_grammar(grammar: Grammar) -> None:
    """`ValueError` for a kind that there is not, or a grammar without its text."""
    if grammar.kind not in get_args(GrammarKind):
        raise ValueError(
            f"grammar kind={grammar.kind!r}: one of {', '.join(get_args(GrammarKind))}"
        )
    if grammar.kind == "choice" and (not grammar.choices or not all(grammar.choices)):
        raise ValueError(f"choices={grammar.choices}: give at least one text, none of them empty")
    if grammar.kind != "choice" and not grammar.value:
        raise ValueError(f"grammar {grammar.kind}: value is empty; give the {grammar.kind}")


def check_params(params: SamplingParams) -> None:
    """`ValueError` names the first option that cannot be, and why."""
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens}: must be from 0 (off) to "
            f"max_tokens={params.max_tokens}"
        )
    if not 0 <= params.top_k <= MAX_TOP_K:
        raise ValueError(f"top_k={params.top_k}: must be 0 (off) or from 1 to {MAX_TOP_K}")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p}: must be in (0, 1]")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p={params.min_p}: must be in [0, 1]")
    if not 1 / MAX_REPETITION <= params.repetition_penalty <= MAX_REPETITION:
        raise ValueError(
            f"repetition_penalty={params.repetition_penalty}: must be between "
            f"{1 / MAX_REPETITION:g} and {MAX_REPETITION:g}; 1 is off"
        )
    if params.top_logps < 0:
        raise ValueError(f"top_logps={params.top_logps}: must be 0 (off) or positive")
    if params.logps_mode not in get_args(LogpsMode):
        raise ValueError(
            f"logps_mode={params.logps_mode!r}: one of {', '.join(get_args(LogpsMode))}"
        )
    if params.logps_mode == "kept":
        from nanoinfer.options.kept_sampling import check_kept  # here: few requests need it

        check_kept(params)
    _check_edits(params)


def _check_edits(params: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise ValueError(f"{name}={value}: must be between -{MAX_BIAS:.0f} and {MAX_BIAS:.0f}")
    for token, bias in params.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"logit_bias[{token}]={bias}: must be between -{MAX_BIAS:.0f} and "
                f"{MAX_BIAS:.0f}; to forbid a token use allowed_token_ids"
            )
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids=(): allows nothing; give one token or None")
    if params.allowed_token_ids is not None and params.grammar is not None:
        raise ValueError(
            "allowed_token_ids and grammar: together they may allow nothing; give one of them"
        )
    if params.min_tokens and params.grammar is not None:
        raise ValueError(
            f"min_tokens={params.min_tokens}: a grammar says where an answer ends; put its "
            "length into the grammar"
        )
    if isinstance(params.stop, str) or not all(params.stop):
        raise ValueError(f"stop={params.stop!r}: must be a tuple of texts, none of them empty")


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """`ValueError` for a token that the model does not have."""
    for name, named in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token in named:
            if not isinstance(token, Integral):
                raise ValueError(f"{name}: token {token!r} must be an integer")
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name}: token {token} is outside the vocabulary of {vocab_size}")


def check_can_go_on(params: SamplingParams, eos_ids: Iterable[int]) -> None:
    """`ValueError` where only tokens that end the completion are allowed before it may end."""
    allowed = params.allowed_token_ids
    if params.min_tokens and allowed is not None and params.stop_ids(eos_ids) >= set(allowed):
        raise ValueError(
            f"min_tokens={params.min_tokens}: allowed_token_ids has no token that does not end "
            "the answer; add one"
        )


def logps_temperature(params: SamplingParams) -> float:
    """The temperature of the reported log-probs; 0 stands for 1, too."""
    return 1.0 if params.logps_mode == "raw" else params.temperature


def is_edited(params: SamplingParams) -> bool:
    """True where logits are changed before the temperature."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.grammar is not None
        or params.min_tokens
    )


def wants_text(params: SamplingParams) -> bool:
    """True where the request is read as text while it is sampled."""
    return params.detokenize or bool(params.stop)
