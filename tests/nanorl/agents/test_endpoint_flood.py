"""One episode floods the recording endpoint: the others are answered as if it were not there."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from agent_doubles import EOS, output_of, tiny_tokenizer

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.dialects import all_dialects
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.agent_program import MAX_CONNECTIONS, Relay
from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits

SOON_S = 30.0  # far more than anything here takes
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENS = "/v1/messages/count_tokens", "/inference/v1/generate"
SMALL = Limits(max_turns=16, max_turn_tokens=40, max_context_tokens=500)
LARGE = Limits(max_turns=16, max_turn_tokens=40, max_context_tokens=100_000)


class Engine:
    """Says "a" to everybody; `gate` holds answers back, `prompts` keeps what it was asked."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.prompts: list[list[int]] = []
        self.is_asked = asyncio.Condition()

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.prompts.append(ids)
        async with self.is_asked:
            self.is_asked.notify_all()
        await self.gate.wait()
        return output_of([64, EOS])


class Encodes:
    """Of one tokenizer: how many characters it was given to encode."""

    def __init__(self, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_chars = 0
        plain = tokenizer._guard.encode_plain

        def counted(text: str) -> list[int]:
            self.num_chars += len(text)
            return plain(text)

        monkeypatch.setattr(tokenizer._guard, "encode_plain", counted)


def recording_of(
    engine: Any, limits: Limits = SMALL, tokenizer: ChatTokenizer | None = None
) -> Recording:
    own = tokenizer or tiny_tokenizer()
    return Recording(engine, own, limits=limits, sampling=SamplingParams(seed=1))


def serve(
    work: Callable[[RecordingServer, httpx.AsyncClient], Awaitable[None]], **options: Any
) -> None:
    async def run() -> None:
        dialects = all_dialects(tiny_tokenizer())
        server = RecordingServer(dialects, model="tiny", max_model_len=500, **options)
        pool = httpx.Limits(max_connections=None)
        try:
            async with httpx.AsyncClient(limits=pool, timeout=SOON_S) as client:
                await work(server, client)
        finally:
            await server.close()

    asyncio.run(run())


def body_of(path: str, text: str, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    if path == TOKENS:
        return {"token_ids": [1, 2, 3], "sampling_params": more}
    field = {"input": said} if path == RESPONSES else {"messages": said}
    limit = {"max_tokens": 30} if path == MESSAGES else {}
    return {"model": "any", **field, **limit, **more}


async def post(
    client: httpx.AsyncClient, session: ApiSession, path: str, body: dict[str, Any]
) -> httpx.Response:
    return await client.post(f"{session.keyed_url}{path}", json=body)


def told(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT])
def test_while_a_long_prompt_is_encoded_others_are_answered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tiny_tokenizer()
    is_encoding, go_on = threading.Event(), threading.Event()
    encode = slow.encode_chat

    def held(*given: Any, **options: Any) -> list[int]:
        is_encoding.set()
        assert go_on.wait(SOON_S), "the neighbour waited"
        return encode(*given, **options)

    monkeypatch.setattr(slow, "encode_chat", held)

    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        flooding, other = recording_of(Engine(), LARGE, slow), recording_of(Engine())
        async with server.episode(flooding) as one, server.episode(other) as two:
            long = asyncio.ensure_future(post(client, one, path, body_of(path, "ab " * 20_000)))
            assert await asyncio.to_thread(is_encoding.wait, SOON_S)
            try:
                answer = await post(client, two, CHAT, body_of(CHAT, "hi"))
            finally:
                go_on.set()
            assert answer.status_code == 200
            assert (await long).status_code == 200

    serve(work)


def longest_pause(tokenizer: ChatTokenizer, text: str) -> float:
    """Of another thread, as a share of the time that encoding `text` takes."""
    done = threading.Event()

    def encode() -> None:
        tokenizer.encode_chat([{"role": "user", "content": text}], add_generation_prompt=True)
        done.set()

    worst = 0.0
    start = last = time.perf_counter()
    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.0005):
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    worst = max(worst, time.perf_counter() - last)
    thread.join()
    return worst / (time.perf_counter() - start)


def test_a_long_text_that_is_encoded_leaves_the_interpreter_to_others() -> None:
    """Held throughout, it would do so in no try; the machine may hold the other thread in some."""
    tokenizer = tiny_tokenizer()
    assert any(longest_pause(tokenizer, "hello world " * 60_000) < 0.5 for _ in range(20))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT])
@pytest.mark.parametrize("size", [20_000, 300_000, 4_000_000])
def test_what_cannot_fit_the_context_is_refused_without_encoding_it(
    path: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 tokens are at most 6,500 bytes: no token of this vocabulary is longer than 13."""
    tokenizer = tiny_tokenizer()

    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        record = recording_of(Engine(), tokenizer=tokenizer)
        counted = Encodes(tokenizer, monkeypatch)
        async with server.episode(record) as session:
            answer = await post(client, session, path, body_of(path, "x" * size))
            assert answer.status_code == 400, answer.text
            assert "context length is 500" in told(answer)
            if path in (CHAT, RESPONSES):
                assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert counted.num_chars == 0
            assert (record.truncation, record.num_answers) == ("context", 0)
            good = await post(client, session, CHAT, body_of(CHAT, "hi"))
            assert good.status_code == 200 and record.truncation is None

    serve(work)


def test_what_may_fit_is_encoded_only_as_far_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million bytes could be 100,000 tokens of 13 bytes. They are not."""
    tokenizer = tiny_tokenizer()

    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        record = recording_of(Engine(), LARGE, tokenizer)
        counted = Encodes(tokenizer, monkeypatch)
        async with server.episode(record) as session:
            answer = await post(client, session, CHAT, body_of(CHAT, "x" * 1_000_000))
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert 200_000 <= counted.num_chars < 300_000, "to twice the context, and no further"

    serve(work)


def test_a_prompt_that_fits_is_taken_however_it_is_written() -> None:
    """Text of the longest tokens there are, every character of it as an escape of six."""
    tokenizer = tiny_tokenizer()
    record = recording_of(Engine(), tokenizer=tokenizer)

    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        async with server.episode(record) as session:
            text = "\x01" * 400
            raw = json.dumps(body_of(CHAT, text))
            assert len(raw) > 6 * 400
            answer = await client.post(f"{session.keyed_url}{CHAT}", content=raw)
            assert answer.status_code == 200, answer.text

    serve(work)


def test_more_messages_than_the_context_has_tokens_are_never_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A template may look at all messages for each of them."""
    tokenizer = tiny_tokenizer()

    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        record = recording_of(Engine(), tokenizer=tokenizer)
        rendered: list[int] = []
        monkeypatch.setattr(tokenizer, "encode_chat", lambda said, **_: rendered.append(len(said)))
        async with server.episode(record) as session:
            body = body_of(CHAT, "") | {"messages": [{"role": "user", "content": ""}] * 1500}
            answer = await post(client, session, CHAT, body)
            assert answer.status_code == 400 and "context length is 500" in told(answer)
            assert rendered == []

    serve(work)


def test_an_episode_has_so_many_calls_at_once_and_takes_none_of_its_neighbours() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        engine = Engine()
        engine.gate.clear()
        flooding, other = recording_of(engine), recording_of(Engine())
        async with server.episode(flooding) as one, server.episode(other) as two:
            asked = [
                asyncio.ensure_future(post(client, one, CHAT, body_of(CHAT, f"{i}")))
                for i in range(5)
            ]
            async with asyncio.timeout(SOON_S), engine.is_asked:
                await engine.is_asked.wait_for(lambda: len(engine.prompts) == 5)
            refused = await post(client, one, CHAT, body_of(CHAT, "one more"))
            assert refused.status_code == 429
            assert "5 calls at once" in told(refused) and refused.headers["retry-after"]
            assert (await post(client, two, CHAT, body_of(CHAT, "hi"))).status_code == 200
            engine.gate.set()
            assert {(await one_asked).status_code for one_asked in asked} == {200}
            assert (await post(client, one, CHAT, body_of(CHAT, "again"))).status_code == 200

    serve(work, max_calls_at_once=5)


def test_bodies_that_do_not_come_count_as_calls() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        async with server.episode(recording_of(Engine())) as one:
            port = int(one.url.rpartition(":")[2])
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {one.key}\r\n"
            halves = []
            for _ in range(5):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
                await writer.drain()
                halves.append(writer)
            statuses = set()
            async with asyncio.timeout(SOON_S):  # until the five heads have been read
                while 429 not in statuses:
                    statuses.add((await post(client, one, CHAT, body_of(CHAT, "x"))).status_code)
                    assert len(statuses) < 3
            for writer in halves:
                writer.transport.abort()
            async with asyncio.timeout(SOON_S):
                while (await post(client, one, "/episode", {})).status_code == 429:
                    pass

    serve(work, max_calls_at_once=5)


@pytest.mark.parametrize("path", [CHAT, TOKENS])
@pytest.mark.parametrize("n", [17, 1_000_000])
def test_more_answers_than_the_episode_has_calls_are_refused(path: str, n: int) -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        engine = Engine()
        record = recording_of(engine)
        async with server.episode(record) as session:
            answer = await post(client, session, path, body_of(path, "x", n=n))
            assert answer.status_code == 400 and "16 calls" in told(answer), answer.text
            assert engine.prompts == []

    serve(work)


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        (MESSAGES, {"stop_sequences": ["x"] * 100_00}, "stop: 10000 texts"),
        (MESSAGES, {"stop_sequences": ["x" * 5000]}, "stop: a text of 5000 characters"),
        (TOKENS, {"stop": ["x"] * 100}, "stop: 100 texts"),
        (TOKENS, {"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        (TOKENS, {"logprobs": 10**6}, "top_logps"),
        (CHAT, {"guided_choice": ["a"] * 2000}, "2000 choices"),
        (CHAT, {"guided_regex": "a" * 66_000}, "66000 characters"),
    ],
)
def test_what_would_cost_the_engine_more_than_an_answer_is_refused(
    path: str, more: dict[str, Any], message: str
) -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        engine = Engine()
        async with server.episode(recording_of(engine, LARGE)) as session:
            answer = await post(client, session, path, body_of(path, "x", **more))
            assert answer.status_code == 400 and message in told(answer), answer.text
            assert engine.prompts == []

    serve(work)


def test_a_boxed_program_has_so_many_connections_at_a_time() -> None:
    """Each is one of those that the endpoint has for all episodes."""

    async def run() -> None:
        far = 0
        changed = asyncio.Condition()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal far
            far += 1
            writer.write(b"x")
            async with changed:
                changed.notify_all()
            await reader.read()
            far -= 1
            writer.close()
            async with changed:
                changed.notify_all()

        endpoint = await asyncio.start_server(serve, "127.0.0.1", 0)
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        relay = Relay(listener, endpoint.sockets[0].getsockname())
        await relay.start()
        address = listener.getsockname()

        async def connected() -> tuple[bytes, asyncio.StreamWriter]:
            """The first byte of the far end; none where the connection was closed."""
            reader, writer = await asyncio.open_connection(*address)
            with suppress(ConnectionError):
                return await reader.read(1), writer
            return b"", writer

        async with asyncio.timeout(SOON_S):
            kept = [await connected() for _ in range(MAX_CONNECTIONS)]
            assert {first for first, _ in kept} == {b"x"} and far == MAX_CONNECTIONS
            more = [await connected() for _ in range(20)]
            assert {first for first, _ in more} == {b""} and far == MAX_CONNECTIONS
            kept.pop()[1].close()
            async with changed:
                await changed.wait_for(lambda: far < MAX_CONNECTIONS)
            while not (again := await connected())[0]:  # until the relay knows of it, too
                again[1].close()
            for _, writer in (*kept, *more, again):
                writer.close()
            relay.close()
            endpoint.close()
            async with changed:
                await changed.wait_for(lambda: far == 0)

    asyncio.run(run())


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


@pytest.mark.parametrize("depth", [50, 150, 300, 450])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT])
def test_deep_schemas_of_tools_are_read_or_refused(path: str, depth: int) -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        tool: dict[str, Any] = {"name": "add", "parameters": nested(depth)}
        if path == CHAT:
            tool = {"type": "function", "function": tool}
        elif path == RESPONSES:
            tool = {"type": "function", **tool}
        else:
            tool = {"name": "add", "input_schema": nested(depth)}
        async with server.episode(recording_of(Engine(), LARGE)) as session:
            answer = await post(client, session, path, body_of(path, "x", tools=[tool]))
            assert answer.status_code in (200, 400), answer.text

    serve(work)
