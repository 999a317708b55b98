"""Whatever a client sends, the answer is its result or a 4xx that says why, and no other request
notices."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serving import Served, serve
from tiny_text import make_text_engine

from nanoinfer.params import SamplingParams
from nanoinfer.server.config import CompletionLimits

NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 21, 300, 512, 2**31 - 1, 2**31, 2**63, -(2**63), 2**64, 10**30]),
    st.sampled_from([0.0, 0.5, 1e-320, 1e-40, 1e-6, 2.0, 1e10, 1e38, 1e300, -0.0, -1e300, 1.5]),
    st.sampled_from(["", "a", "hello", "\ud800", "x\udfff", "\0", "auto", "<|end|>", "required"]),
    st.sampled_from(["{", "(((", "[", "^$", "[a-z]{1,3}", "a{99999}", "start: start", '{"a": 1}']),
    st.sampled_from([[], {}, [[]], [None], ["a"], ["\ud800"], [1, 2], [1.5], [10**30], {"1": 1}]),
    st.sampled_from([{"5": 1e300}, {"-1": 1}, {"x": 1}, {"type": "object"}, {"$ref": "#"}]),
    st.sampled_from([{"type": "json_object"}, {"type": "json_schema"}, {"include_usage": True}]),
    st.sampled_from(
        [[{"role": "user", "content": "\ud800"}], [{"role": "tool"}], [{}], [[1], [2]]]
    ),
    st.sampled_from([[{"type": "function", "function": {"name": "f", "parameters": {"a": None}}}]]),
)
SHARED = (
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop",
    "stop_token_ids", "ignore_eos", "stream", "stream_options", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "guided_json",
    "guided_regex", "guided_choice", "priority", "user", "logprobs", "echo", "prompt",
    "logprobs_mode",
)  # fmt: skip
ROUTES = {
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "hel"}], "max_tokens": 2},
        (*SHARED, "messages", "tools", "tool_choice", "response_format", "top_logprobs"),
    ),
    "/v1/completions": ({"prompt": "hel", "max_tokens": 2}, SHARED),
    "/generate": ({"ids": [1, 2], "params": {"max_tokens": 2}}, ("ids", "stream", "priority")),
    "/inference/v1/generate": (
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2}},
        ("token_ids", "stream", "priority", "sampled", "return_output", "model", "request_id"),
    ),
}
PARAMS = tuple(SamplingParams.__dataclass_fields__)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(ROUTES)))
    valid, names = ROUTES[path]
    body: dict[str, Any] = json.loads(json.dumps(valid))
    for name in draw(st.lists(st.sampled_from(names), max_size=3)):
        body[name] = draw(NASTY)
    nested = {"/generate": "params", "/inference/v1/generate": "sampling_params"}.get(path)
    if nested is not None:
        for name in draw(st.lists(st.sampled_from((*PARAMS, "logprobs")), max_size=3)):
            body[nested][name] = draw(NASTY)
    return path, body


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = CompletionLimits(max_completions_per_request=4, request_timeout_s=20)
    engine = make_text_engine(num_blocks=512, max_num_seqs=32, max_batch_tokens=128)
    with serve(engine, limits=limits) as running:
        yield running


def test_no_request_is_a_500_and_none_touches_another(served: Served) -> None:
    params = {"max_tokens": 60, "ignore_eos": True, "top_p": 0.9, "top_logps": 2}
    expected = make_text_engine().generate([[5, 6]], SamplingParams(**params))[0].ids
    is_over = threading.Event()
    wrong: list[Any] = []

    def steady() -> None:
        while not is_over.is_set():
            status, answer = served.send("/generate", {"ids": [5, 6], "params": params})
            if status != 200 or answer["outputs"][0]["ids"] != expected:
                wrong.append(answer)

    @settings(
        max_examples=100,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    @example(("/generate", {"ids": [1], "params": {"top_k": 10**30}}))
    @example(("/v1/completions", {"prompt": "a", "temperature": 1e-40}))
    @example(("/v1/completions", {"prompt": "\ud800"}))
    def fuzz(request: tuple[str, dict[str, Any]]) -> None:
        path, body = request
        status, answer = served.send(path, body)
        shown = f"{path} {body!r}: {status} {answer!r}"
        assert status in (200, 400, 404), shown
        if status == 200 and isinstance(answer, str):  # a stream
            assert '"server_error"' not in answer, shown
        if status != 200:
            message = answer["error"]["message"]
            assert 5 < len(message) < 600 and "Traceback" not in message, shown

    thread = threading.Thread(target=steady)
    thread.start()
    try:
        fuzz()
    finally:
        is_over.set()
        thread.join()
    assert not wrong, wrong[0]
