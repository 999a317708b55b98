"""Many clients, clients that hang up, bad input: clear answers, no leaks, others unaffected."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h11
import pytest
from serving import KEY, Served, serve
from tiny_text import make_text_engine, make_tokenizer
from waiting import wait_until

from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.model_runner import ModelRunner
from nanoinfer.params import Output, SamplingParams
from nanoinfer.server.app import make_app
from nanoinfer.server.config import CompletionLimits, ServerConfig

LIMITS = CompletionLimits(max_body_bytes=20000, max_completions_per_request=4)
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
    step = engine.step

    def step_unless_one_may_hang_up() -> list[tuple[int, Output]]:
        """Whoever hangs up does it before the end, also where it stands still meanwhile."""
        running = engine._sequences.values()
        if any(seq.params.seed % 4 == 3 and seq.num_sampled >= 15 for seq in running):
            time.sleep(0.001)
            return []
        return step()

    engine.step = step_unless_one_may_hang_up  # type: ignore[method-assign]
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
        wait_until(lambda: served.engine.num_unfinished >= 3)
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
        (b'{"temperature": NaN}', 400, "NaN is no JSON"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "lone surrogate"),
        ({"\ud800": 1}, 400, "lone surrogate"),
        (CHAT | {"temperature": 1e-40}, 400, "temperature=1e-40"),
        (CHAT | {"top_k": 10**30}, 400, "top_k=1000000000000000000000000000000"),
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
        (
            "/v1/completions",
            {"prompt": "a", "suffix": "b"},
            "suffix: nothing is filled in",
        ),
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
    with serve(api_key=None, allowed_hosts=("box.lan",)) as served:
        assert served.send("/v1/chat/completions", CHAT, key=None)[0] == 200
        for path in ("/pause", "/abort", "/drain", "/sleep", "/update_weights"):
            status, answer = served.send(path, {}, key=None)
            assert status == 403 and "API key" in answer["error"]["message"]
        hosts = {"localhost:8000": 200, "[::1]": 200, "box.lan": 200, "evil.com": 403}
        for host, status in hosts.items():
            connection = served.connect()
            connection.request("GET", "/v1/models", headers={"Host": host})
            assert connection.getresponse().status == status, host
            connection.close()
        connection = served.connect()
        connection.request("POST", "/pause", "{}", {"Origin": "http://elsewhere"})
        assert connection.getresponse().status == 403
        connection.close()
        assert not served.engine.is_paused


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    with (
        serve(limits=CompletionLimits(body_timeout_s=0.5)) as served,
        socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw,
    ):
        raw.sendall(
            f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            "Content-Length: 1000\r\n\r\n{".encode()
        )
        assert b"408" in raw.recv(100)


def half_open(served: Served, count: int) -> list[socket.socket]:
    """Connections that begin a head, or not even that."""
    found = []
    for number in range(count):
        raw = socket.create_connection(("127.0.0.1", served.port), timeout=20)
        with suppress(OSError):  # its time may be over
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n"[: 3 * number])
        found.append(raw)
    return found


def is_healthy(served: Served) -> bool:
    with suppress(OSError):
        return bool(served.send("/health")[0] == 200)
    return False


def test_connections_that_ask_for_nothing_are_closed() -> None:
    with serve(limits=CompletionLimits(head_timeout_s=0.5)) as served:
        for raw in half_open(served, 20):
            with pytest.raises(ConnectionResetError):
                while not raw.recv(100):
                    raise ConnectionResetError
        wait_until(lambda: is_healthy(served))


def test_the_number_of_connections_is_limited() -> None:
    """Were the time for a head over meanwhile, there would be fewer."""
    with serve(limits=CompletionLimits(head_timeout_s=600, max_connections=20)) as served:
        kept = half_open(served, 20)
        assert not is_healthy(served)
        for raw in kept:
            raw.close()
        wait_until(lambda: is_healthy(served))


def test_heads_are_bounded_before_they_are_parsed(served: Served) -> None:
    """Whole or in pieces, first or behind another request."""
    start = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    many = b"".join(b"%x:\r\n" % number for number in range(40_000))
    heads = {
        "as many as there may be": (b"a: b\r\n" * 98, b"200"),
        "one more": (b"a: b\r\n" * 99, b"400"),
        "one more, of bare line feeds": (b"a: b\n" * 99, b"400"),
        "a long one": (b"a: " + b"b" * (17 << 10) + b"\r\n", b"400"),
        "a quarter of a megabyte at once": (many, b"400"),
    }
    for name, (lines, status) in heads.items():
        for before in (b"", start + b"\r\n"):
            head = start + lines + b"Connection: close\r\n\r\n"
            with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
                raw.sendall(before + head)
                answers = read_to_the_end(raw).count(b"HTTP/1.1 200")
            assert answers == bool(before) + (status == b"200"), name


def read_to_the_end(raw: socket.socket) -> bytes:
    """What came before the connection was closed, or reset, for it had more to say."""
    read = b""
    try:
        while part := raw.recv(1 << 16):
            read += part
    except ConnectionResetError:
        pass
    return read


def test_a_large_head_holds_up_nobody(served: Served) -> None:
    """Refusing one costs little of what parsing it would."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 50_000 + b"\r\n"

    def parsed_s() -> float:
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(head)
        before = time.process_time()
        assert isinstance(connection.next_event(), h11.Request)
        return time.process_time() - before

    def refused_s() -> float:
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
            before = time.process_time()
            raw.sendall(head)
            assert b" 200 " not in read_to_the_end(raw)
            return time.process_time() - before

    assert 10 * min(refused_s() for _ in range(3)) < min(parsed_s() for _ in range(3))


def ask_without_reading(served: Served, is_stream: bool, n: int = 4) -> socket.socket:
    """Of the answer, about 18 KB for each of n, little fits into the buffers of the sockets."""
    served.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(20)
    raw.connect(("127.0.0.1", served.port))
    asked = {
        "prompt": "hel",
        "max_tokens": 60,
        "n": n,
        "logprobs": 20,
        "ignore_eos": True,
        "seed": 7,
    }
    body = json.dumps(asked | {"stream": is_stream})
    raw.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return raw


@pytest.mark.parametrize(
    ("is_stream", "n", "request_timeout_s"),
    [(True, 4, 0.2), (True, 4, 30), (False, 4, 30), (False, 1, 30)],
)
def test_a_client_that_never_reads_holds_no_connection(
    is_stream: bool, n: int, request_timeout_s: float
) -> None:
    """Not even for the error that ends a stream after the time limit, nor for the last bytes, which
    the server has written without waiting."""
    limits = CompletionLimits(request_timeout_s=request_timeout_s, send_timeout_s=0.5)
    with serve(limits=limits) as served:
        raw = ask_without_reading(served, is_stream, n)
        wait_until(lambda: served.engine.metrics()["num_requests"])
        wait_until(
            lambda: not (served.state.connections or served.state.tasks),
            told=lambda: "the connection is kept",
        )
        raw.close()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_reads_slowly_gets_its_whole_answer(is_stream: bool) -> None:
    """It takes longer than the time within which it must have taken some. The clock of the server
    goes on with what is read, for either of them may stand still."""
    with serve(limits=CompletionLimits(send_timeout_s=1.0)) as served:
        served.send("/pause", {})
        raw = ask_without_reading(served, is_stream)
        wait_until(lambda: served.engine.num_unfinished)
        loop = next(iter(served.state.connections)).loop
        now, start, passed_s, answer = loop.time, loop.time(), 0.0, b""
        loop.time = lambda: start + passed_s
        served.send("/resume", {})
        while part := raw.recv(4096):
            answer += part
            passed_s += 0.2
        ahead_s = max(start + passed_s - now(), 0.0)  # what waits for a time is not left behind
        loop.time = lambda: now() + ahead_s
        assert passed_s > 1.0
        if is_stream:
            assert b"data: [DONE]" in answer
        else:
            head, body = answer.split(b"\r\n\r\n", 1)
            assert f"content-length: {len(body)}".encode() in head
        raw.close()


def test_a_large_grammar_is_refused_and_a_wrong_one_said_in_a_line(served: Served) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    many = [f"choice {i}" for i in range(2000)]
    for body, message in (
        ({"guided_choice": many}, "2000 choices"),
        ({"guided_regex": "(((" * 2}, "grammar regex: is not valid: unclosed group"),
        ({"guided_json": {"type": "foo"}}, "grammar json_schema: is not valid: Invalid type: foo"),
    ):
        status, answer = served.send("/v1/chat/completions", CHAT | body)
        assert status in (400, 413) and (status == 413 or message in answer["error"]["message"])
        assert "\n" not in answer["error"]["message"]
    for grammar in ({"kind": "lark", "value": "start: foo"}, {"kind": "lark", "value": "!!!"}):
        body = {"ids": [1], "params": {"grammar": grammar}}
        status, answer = served.send("/generate", body)
        assert status == 400 and "\n" not in answer["error"]["message"]


def test_a_grammar_that_compiles_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer to a health check does not wait for it."""
    engine = make_text_engine()
    is_compiling, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        is_compiling.set()
        assert go_on.wait(60), "the health check waited"

    with serve(engine) as served:
        monkeypatch.setattr(engine, "validate", slow)
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(served.send("/v1/chat/completions", CHAT))
        )
        thread.start()
        assert is_compiling.wait(60)
        assert served.send("/health")[0] == 200
        monkeypatch.undo()
        go_on.set()
        thread.join()
        assert answers[0][0] == 200, answers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}] * 3000}),
        ("/v1/completions", {"prompt": "x" * 200_000}),
        ("/v1/completions", {"prompt": ["a", "x" * 200_000]}),
        ("/v1/completions", {"prompt": ["x" * 1000] * 129}),
    ],
)
def test_what_cannot_fit_is_refused_without_encoding_it(
    path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 512 positions."""
    tokenizer = make_tokenizer()
    num_chars = []
    plain = tokenizer._guard.encode_plain
    monkeypatch.setattr(
        tokenizer._guard, "encode_plain", lambda text: num_chars.append(len(text)) or plain(text)
    )
    with serve(tokenizer=tokenizer) as served:
        status, answer = served.send(path, body)
        assert status == 400 and sum(num_chars) <= 1
        if isinstance(body.get("prompt"), list) and len(body["prompt"]) > 2:
            assert "at most 128" in answer["error"]["message"]
        else:
            assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_long_prompt_that_is_encoded_blocks_nobody(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do many of them at once: a short prompt waits in no queue of long ones."""
    engine = make_text_engine(num_blocks=512, max_num_seqs=32, max_batch_tokens=128)
    monkeypatch.setattr(engine, "room", lambda num_prompt: 100_000 - num_prompt)  # a long context
    tokenizer = make_tokenizer()
    is_encoding, go_on = threading.Semaphore(0), threading.Event()
    plain = tokenizer._guard.encode_plain

    def slow(text: str) -> list[int]:
        if len(text) > 10_000:
            is_encoding.release()
            assert go_on.wait(60), "the short prompt waited"
        return plain(text)

    monkeypatch.setattr(tokenizer._guard, "encode_plain", slow)
    text = "ab " * 10_000
    long: Any = {"prompt": text, "max_tokens": 3}
    if path == "/v1/chat/completions":
        long = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
    with serve(engine, tokenizer) as served:
        threads = [threading.Thread(target=served.send, args=(path, long)) for _ in range(40)]
        for thread in threads:
            thread.start()
        assert is_encoding.acquire(timeout=60)
        try:
            assert served.send("/v1/chat/completions", CHAT)[0] == 200
            assert served.send("/v1/completions", {"prompt": "hel", "max_tokens": 3})[0] == 200
        finally:
            go_on.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "box.lan"])
def test_a_server_without_a_key_listens_on_this_machine_alone(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="open to the network; give --api-key-file"):
        make_app(ServerConfig(model=tmp_path, host=host))


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_a_server_refuses_more_threads_than_cores_could_serve(threads: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"threads={threads}: must be 1 to"):
        make_app(ServerConfig(model=tmp_path, threads=threads))


def test_a_chunked_body_over_the_limit_is_refused(served: Served) -> None:
    connection = served.connect()
    parts = [b"x" * 5000] * 6
    headers = {"Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/generate", iter(parts), headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_time_and_admission_limits() -> None:
    limits = CompletionLimits(request_timeout_s=0.3, max_completions=2)
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
        def run(self, step: StepInput) -> RunnerOutput:
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
