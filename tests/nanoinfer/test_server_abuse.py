"""Many clients, clients that hang up, bad input: clear answers, no leaks, others unaffected."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import KEY, Served, serve
from tiny_text import make_text_engine

from nanoinfer.batch import StepInput
from nanoinfer.completions import HttpLimits
from nanoinfer.model_runner import ModelRunner, StepResult
from nanoinfer.sampling import SamplingParams

LIMITS = HttpLimits(max_body_bytes=20000, body_timeout_s=0.5, max_completions_per_request=4)
CHAT = {"messages": [{"role": "user", "content": "hel"}], "max_tokens": 3}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(limits=LIMITS) as running:
        yield running


def test_200_streaming_clients_of_which_every_fourth_hangs_up() -> None:
    engine = make_text_engine(num_blocks=512, max_num_seqs=64, max_batch_tokens=256)
    prompts = [[i % 250, 7, (3 * i) % 250] for i in range(200)]
    params = [{"max_tokens": 20 + i % 20, "seed": i, "ignore_eos": True} for i in range(200)]
    alone = make_text_engine()
    with serve(engine) as served:

        async def client(i: int) -> list[int]:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            body = json.dumps({"ids": prompts[i], "params": params[i], "stream": True})
            writer.write(
                f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            ids: list[int] = []
            async for line in reader:
                if line.startswith(b"data: {"):
                    ids += json.loads(line[6:])["ids"]
                if i % 4 == 3 and len(ids) >= i % 15:
                    writer.transport.abort()
                    return ids
            writer.close()
            return ids

        async def all_clients() -> list[list[int]]:
            return await asyncio.gather(*(client(i) for i in range(200)))

        results = asyncio.run(all_clients())
        served.wait_idle()
        counts = engine.metrics()  # some hung up before their request was read
        assert counts["num_aborted"] + counts["num_finished"] == counts["num_requests"] <= 200
        assert counts["num_finished"] >= 150 and counts["num_aborted"] > 20
    for i in (0, 1, 2, 50, 101, 198):
        assert results[i] == alone.generate([prompts[i]], SamplingParams(**params[i]))[0].ids
    assert all(len(results[i]) == 20 + i % 20 for i in range(200) if i % 4 != 3)


def test_a_client_that_hangs_up_before_its_answer_is_aborted(served: Served) -> None:
    served.send("/pause", {})
    before = served.engine.metrics()["num_aborted"]
    body = json.dumps(CHAT | {"n": 3}).encode()
    for stream in (b"", b"x"):
        raw = socket.create_connection(("127.0.0.1", served.port))
        sent = body[:-1] + (b', "stream": true}' if stream else b"}")
        raw.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + f"{KEY}\r\nContent-Length: {len(sent)}\r\n\r\n".encode()
            + sent
        )
        while served.engine.num_unfinished < 3:
            time.sleep(0.001)
        raw.close()
        served.wait_idle()
    served.send("/resume", {})
    assert served.engine.metrics()["num_aborted"] == before + 6
    assert served.send("/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[" * 10000, 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[1]", 400, "JSON object, not list"),
        (b"", 400, "not valid JSON"),
        (b'{"x": "' + b"a" * 20001 + b'"}', 413, "limit of 20000 bytes"),
        ({}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        (CHAT | {"temprature": 1}, 400, "temprature: unknown field"),
        (CHAT | {"temperature": -1}, 400, "temperature"),
        (CHAT | {"temperature": "hot"}, 400, "temperature"),
        (CHAT | {"max_tokens": 0}, 400, "max_tokens"),
        (CHAT | {"max_tokens": 1.5}, 400, "max_tokens"),
        (CHAT | {"max_tokens": 10**6}, 400, "max_tokens=1000000"),
        (CHAT | {"n": 5}, 400, "at most 4"),
        (CHAT | {"n": 10**9}, 400, "at most 4"),
        (CHAT | {"top_p": 0}, 400, "top_p"),
        (CHAT | {"stop": [""]}, 400, "stop"),
        (CHAT | {"logit_bias": {"x": 1}}, 400, "logit_bias"),
        (CHAT | {"logit_bias": {"99999": 1}}, 400, "logit_bias: token 99999"),
        (CHAT | {"top_logprobs": 21}, 400, "top_logprobs"),
        (CHAT | {"seed": 2**70}, 400, "seed"),
        (CHAT | {"model": "gpt"}, 404, "not served"),
        (CHAT | {"tool_choice": "required"}, 400, "tools is empty"),
        (CHAT | {"tools": [{"type": "other"}]}, 400, "tools.0.type"),
        ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, 400, "messages.0.y: unknown"),
        (CHAT | {"guided_regex": "a", "guided_choice": ["a"]}, 400, "exclude each other"),
        ({"messages": [{"role": "user", "content": "hello " * 300}]}, 400, "512 positions"),
    ],
)
def test_a_bad_chat_is_refused_by_name(
    served: Served, body: Any, status: int, message: str
) -> None:
    got, answer = served.send("/v1/chat/completions", body, method="POST")
    assert got == status, answer
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert served.engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": ""}, "empty prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "empty prompt"),
        ("/v1/completions", {"prompt": [300]}, "token 300 is outside"),
        ("/v1/completions", {"prompt": [-1]}, "token -1 is outside"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt"),
        ("/v1/completions", {"prompt": "a", "echo": True, "stream": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix: unknown"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "at most 4"),
        ("/generate", {"ids": []}, "empty prompt"),
        ("/generate", {"ids": [1], "params": {"temp": 1}}, "params.temp: unknown"),
        ("/generate", {"ids": [1], "params": {"max_tokens": "9"}}, "params.max_tokens='9'"),
        ("/generate", {"ids": [1], "params": {"max_tokens": True}}, "params.max_tokens=True"),
        ("/generate", {"ids": [1], "params": {"max_tokens": -1}}, "max_tokens=-1"),
        ("/generate", {"ids": [1], "params": {"n": 10**9}}, "at most 4"),
        ("/generate", {"ids": [1], "params": {"stop_token_ids": ["a"]}}, "params.stop_token_ids"),
        ("/generate", {"ids": [1], "params": {"logit_bias": [1]}}, "params"),
        ("/generate", {"ids": [1], "params": {"grammar": {"kind": "magic"}}}, "kind='magic'"),
        ("/generate", {"ids": [True]}, "ids.0"),
        ("/update_weights", {"path": "x"}, "version"),
    ],
)
def test_other_bad_requests_are_refused_by_name(
    served: Served, path: str, body: Any, message: str
) -> None:
    status, answer = served.send(path, body)
    assert status == 400, answer
    assert message in answer["error"]["message"]


def test_keys_routes_and_methods(served: Served) -> None:
    for key in (None, "wrong", KEY + "x", "ключ"):
        if key is None or key.isascii():
            assert served.send("/v1/chat/completions", CHAT, key=key)[0] == 401
            assert served.send("/metrics", key=key)[0] == 401
            assert served.send("/pause", {}, key=key)[0] == 401
    assert not served.engine.is_paused
    assert served.send("/nothing")[0] == 404
    assert served.send("/v1/chat/completions", method="GET")[0] == 405
    assert served.send("/update_weights", {"path": "x", "version": 1})[0] == 403


def test_without_a_key_web_pages_are_refused() -> None:
    with serve(api_key=None) as served:
        assert served.send("/v1/chat/completions", CHAT, key=None)[0] == 200
        connection = served.connect()
        connection.request("POST", "/pause", "{}", {"Origin": "http://elsewhere"})
        assert connection.getresponse().status == 403
        connection.close()
        assert not served.engine.is_paused


def test_a_body_that_does_not_arrive_is_not_waited_for(served: Served) -> None:
    raw = socket.create_connection(("127.0.0.1", served.port))
    raw.sendall(
        f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        "Content-Length: 1000\r\n\r\n{".encode()
    )
    raw.settimeout(20)
    assert b"408" in raw.recv(100)
    raw.close()


def test_a_chunked_body_over_the_limit_is_refused(served: Served) -> None:
    connection = served.connect()
    parts = [b"x" * 5000] * 6
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/generate", iter(parts), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_time_and_admission_limits() -> None:
    limits = HttpLimits(request_timeout_s=0.3, max_completions=2)
    with serve(limits=limits) as served:
        served.send("/pause", {})
        status, answer = served.send("/v1/chat/completions", CHAT)
        assert status == 504 and "0.3 s" in answer["error"]["message"]
        events = served.events("/v1/chat/completions", CHAT)
        assert "0.3 s" in events[-1]["error"]["message"]
        assert served.send("/v1/chat/completions", CHAT | {"n": 3})[0] == 429
        served.wait_idle()


def test_a_failing_engine_is_a_500_and_the_next_request_works() -> None:
    engine = make_text_engine()

    class Broken(ModelRunner):
        def run(self, step: StepInput) -> StepResult:
            raise ValueError("a bug of ours")

    with serve(engine) as served:
        sound = engine._runner
        engine._runner = Broken(engine.model, sound.cache)
        status, answer = served.send("/v1/chat/completions", CHAT)
        assert status == 500 and "a bug of ours" in answer["error"]["message"]
        assert (
            "a bug of ours" in served.events("/v1/chat/completions", CHAT)[-1]["error"]["message"]
        )
        engine._runner = sound
        assert served.send("/v1/chat/completions", CHAT)[0] == 200
