"""The sampling parameters of an `ApiCall`: where it ends, its grammar, and what a server goes by.

Left out: how a run draws tokens, which the client does not decide (endpoint/recording.py).
"""

from __future__ import annotations

from typing import Any

from nanoinfer.dialects.exchange import ApiCall
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Grammar, SamplingParams
from nanoinfer.server.tool_calls import call_schema

MAX_STOP_TEXTS = 16  # as OpenAI's API, which allows 4; the engine looks for each in every token
MAX_STOP_CHARS = 1000


def call_grammar(call: ApiCall) -> Grammar | None:
    """The grammar that the answer must match. `ValueError` where a tool is forced that is not
    offered."""
    if not call.has_bare_calls:
        return call.grammar
    # Where no call is forced, the schema is the answer's, and before it the model may call.
    answer = call.grammar.value if call.forced_tool is None and call.grammar else None
    return Grammar("json_schema", call_schema(call.tools, call.forced_tool or None, answer))


def check_stop(stop: tuple[str, ...]) -> None:
    """ApiError for texts that would cost the engine more than the answer."""
    longest = max(map(len, stop), default=0)
    if len(stop) > MAX_STOP_TEXTS:
        raise ApiError(400, f"stop: {len(stop)} texts; at most {MAX_STOP_TEXTS}", "stop")
    if longest > MAX_STOP_CHARS:
        raise ApiError(
            400, f"stop: a text of {longest} characters; at most {MAX_STOP_CHARS}", "stop"
        )


def call_params(call: ApiCall, room: int, seed: int, adapter: str = "") -> SamplingParams:
    """The parameters of a call whose prompt leaves `room`; a longer answer is not refused, since
    clients ask for as much as their own models may say. `ValueError` and ApiError name a field."""
    check_stop(call.stop)
    given = {name: _number(name, value) for name, value in call.sampling.items()}
    if given.get("top_k") == -1:  # off, as in vLLM
        given["top_k"] = 0
    most = room if call.max_tokens is None else min(call.max_tokens, room)
    return SamplingParams(
        max_tokens=most,
        min_tokens=min(call.min_tokens, most),
        ignore_eos=call.ignore_eos,
        stop=call.stop,
        stop_token_ids=call.stop_token_ids,
        grammar=call_grammar(call),
        top_logps=call.num_top or 0,
        adapter=adapter,
        **({"seed": seed} | given),
    )


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ApiError(400, f"{name}: must be a number, not {value!r}", name)
    return value
