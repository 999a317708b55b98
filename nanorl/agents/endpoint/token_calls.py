"""`POST /inference/v1/generate` of a recording: token ids in, token ids out, as vLLM's.

The project's own server has the same route (nanoinfer/server/app.py); here the tokens are recorded,
and the run decides how they are drawn.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from nanoinfer.dialects.exchange import Json
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import read_json_body
from nanoinfer.params import Output, SamplingParams
from nanoinfer.server.requests import TokenGenerate
from nanoinfer.server.responses import token_choice, usage
from nanorl.agents.endpoint.recording import Recording


@dataclass(frozen=True)
class TokenCall:
    """One request: `params.n` completions of `token_ids`."""

    name: str
    token_ids: list[int]
    params: SamplingParams


def read_token_call(body: Json, recording: Recording) -> TokenCall:
    """ApiError 400 names the field that cannot be."""
    asked = read_json_body(body, TokenGenerate)
    if not asked.token_ids:
        raise ApiError(400, "token_ids: give at least one", "token_ids")
    size = recording.tokenizer.vocab_size
    wrong = [token for token in asked.token_ids if not 0 <= token < size]
    if wrong:
        raise ApiError(
            400, f"token_ids: {wrong[0]} is outside the vocabulary of {size}", "token_ids"
        )
    try:
        params = asked.sampling(recording.limits.max_turn_tokens, 0)
    except ValueError as error:
        raise ApiError(400, str(error)) from None
    return TokenCall(asked.request_id or uuid.uuid4().hex, asked.token_ids, params)


def token_answer(asked: TokenCall, outputs: Sequence[Output]) -> Json:
    """The body of the answer; `versions` has the policy version of each token."""
    return {
        "request_id": asked.name,
        "choices": [token_choice(i, output, False) for i, output in enumerate(outputs)],
        "prompt_logprobs": None,
        "usage": usage(len(asked.token_ids), outputs, max(1, len(outputs))),
    }
