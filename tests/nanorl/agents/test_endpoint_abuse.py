"""The recording server under abuse: crowds, hang-ups, junk and stolen keys leave no trace."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from agent_doubles import EOS, output_of, tiny_tokenizer

from nanoinfer.dialects import all_dialects
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits

TOKENIZER = tiny_tokenizer()
LIMITS = Limits(max_turns=1000, max_turn_tokens=40, max_context_tokens=4000)
SOON_S = 20.0  # far more than anything here takes
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PATHS = (CHAT, RESPONSES, MESSAGES)


class Echo:
    """Says again what the prompt ends with. `gate` holds answers back; `num_active` counts them."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.gate = asyncio.Event()
        self.changed = asyncio.Condition()
        self.num_active = self.num_aborted = 0
        if is_open:
            self.gate.set()

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.num_active += 1
        await self._tell()
        try:
            await self.gate.wait()
            for _ in range(len(ids) % 5):  # answers end in another order than calls came
                await asyncio.sleep(0)
            name = re.findall(r"e\d+c\d+", TOKENIZER.decode(ids)) or ["nothing"]
            return output_of([*TOKENIZER.encode(name[-1]), EOS])
        except asyncio.CancelledError:
            self.num_aborted += 1
            raise
        finally:
            self.num_active -= 1
            await self._tell()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S), self.changed:
            await self.changed.wait_for(holds)


def recording_of(generator: Any) -> Recording:
    return Recording(generator, TOKENIZER, limits=LIMITS, sampling=SamplingParams(seed=1))


def serve(work: Callable[[RecordingServer, httpx.AsyncClient], Awaitable[None]]) -> None:
    """Run `work`; when the server is closed, no task and no session is left of it."""

    async def run() -> None:
        server = RecordingServer(all_dialects(TOKENIZER), model="tiny", max_model_len=4000)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        try:
            async with httpx.AsyncClient(limits=limits, timeout=SOON_S) as client:
                await work(server, client)
        finally:
            await server.close()
        assert not server.sessions
        left = asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]
        if left:  # those that end by themselves do so now
            await asyncio.wait(left, timeout=SOON_S)
        assert all(task.done() for task in left), left

    asyncio.run(run())


def body_of(path: str, text: str, **more: object) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    field = {"input": said} if path == RESPONSES else {"messages": said}
    limit = {"max_tokens": 30} if path == MESSAGES else {}
    return {"model": "any", **field, **limit, **more}


def headers_of(session: ApiSession) -> dict[str, str]:
    return {"authorization": f"Bearer {session.key}", "x-api-key": session.key}


def said_in(path: str, answer: dict[str, Any]) -> str:
    if path == CHAT:
        return answer["choices"][0]["message"]["content"]
    if path == RESPONSES:
        return answer["output"][0]["content"][0]["text"]
    return answer["content"][0]["text"]


def check_error(path: str, answer: httpx.Response) -> None:
    """The error is in the form of its own API."""
    told = answer.json()
    if path.endswith(("/messages", "/count_tokens")):
        assert told["type"] == "error", told
    else:
        assert "type" not in told, told
    error = told["error"]
    assert isinstance(error["type"], str) and isinstance(error["message"], str) and error["message"]


def test_two_hundred_clients_at_once_are_recorded_each_in_its_episode() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        echo = Echo(is_open=False)
        records = [recording_of(echo) for _ in range(20)]
        contexts = [server.episode(record) for record in records]
        sessions = [await context.__aenter__() for context in contexts]

        async def ask(episode: int, number: int) -> None:
            path = PATHS[number % 3]
            name = f"e{episode}c{number}"
            session = sessions[episode]
            answer = await client.post(
                session.url + path, json=body_of(path, name), headers=headers_of(session)
            )
            assert (answer.status_code, said_in(path, answer.json())) == (200, name)

        asked = [
            asyncio.ensure_future(ask(episode, number))
            for episode in range(20)
            for number in range(10)
        ]
        await echo.until(lambda: echo.num_active == 200)  # all of them wait for an answer
        echo.gate.set()
        await asyncio.gather(*asked)
        for episode, record in enumerate(records):
            names = set()
            for sequence in record.tree.sequences():
                found = re.findall(r"e\d+c\d+", TOKENIZER.decode(sequence.tokens))
                assert len(found) == 2 and len(set(found)) == 1, "its prompt and its answer"
                names.add(found[0])
            assert names == {f"e{episode}c{number}" for number in range(10)}
        for context in contexts:
            await context.__aexit__(None, None, None)

    serve(work)


async def hang_up(
    session: ApiSession, text: str, length: int | None = None
) -> asyncio.StreamWriter:
    """Send a request, of which the body is `length` long where that is given, and wait for nothing;
    the connection is returned open."""
    port = int(session.url.rpartition(":")[2])
    body = json.dumps(body_of(CHAT, text)).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    writer.write(f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    return writer


def test_clients_that_hang_up_leave_nothing_running_and_nothing_recorded() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        echo = Echo(is_open=False)
        record = recording_of(echo)
        async with server.episode(record) as session:
            writers = [await hang_up(session, f"e0c{number}") for number in range(60)]
            halves = [await hang_up(session, "half", length=10_000) for _ in range(20)]
            await echo.until(lambda: echo.num_active == 60)
            for writer in (*writers, *halves):
                writer.transport.abort()
            await echo.until(lambda: echo.num_active == 0)
            assert (echo.num_aborted, record.num_answers) == (60, 0)
            echo.gate.set()
            answer = await client.post(
                session.url + CHAT, json=body_of(CHAT, "e0c99"), headers=headers_of(session)
            )
            assert said_in(CHAT, answer.json()) == "e0c99"
            (only,) = record.tree.sequences()
            assert "e0c99" in TOKENIZER.decode(only.tokens)

    serve(work)


def test_a_stream_of_which_little_is_read_is_recorded_once() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        record = recording_of(Echo())
        async with server.episode(record) as session:
            for number, path in enumerate(PATHS * 5):
                asked = body_of(path, f"e0c{number}", stream=True)
                async with client.stream(
                    "POST", session.url + path, json=asked, headers=headers_of(session)
                ) as answer:
                    await anext(answer.aiter_raw())  # the first bytes, and away
            assert record.num_answers == 15

    serve(work)


DEEP = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}"
JUNK: list[bytes] = [
    b"",
    b"\x00\xff\xfe",
    b"null",
    b"[]",
    b'"text"',
    b"{",
    b'{"messages": 1}',
    b'{"model": "m", "max_tokens": 5, "messages": [1], "input": [1]}',
    b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user"}], "input": [{"role": "user"}]}',
    b'{"model": "m", "max_tokens": 5, "messages": [], "input": []}',
    b'{"model": "m", "max_tokens": "many", "messages": [{"role": "user", "content": "x"}],'
    b' "input": 7}',
    b'{"model": "m", "max_tokens": NaN, "messages": [{"role": "user", "content": "x"}],'
    b' "input": {}}',
    b'{"model": "m", "max_tokens": -1, "messages": [{"role": "user", "content": "x"}],'
    b' "max_output_tokens": -1, "input": "x"}',
    b'{"model": "m", "max_tokens": 5, "messages": [{"role": "king", "content": "x"}],'
    b' "input": [{"role": "king", "content": "x"}]}',
    b'{"model": "m", "max_tokens": 5, "tools": [{}], "messages": [{"role": "user", "content": "x"}]'
    b', "input": "x"}',
    b'{"model": "m", "max_tokens": 5, "tools": "all", "messages": [{"role": "user", "content": "x"}'
    b'], "input": "x"}',
    b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": {"a": 1}}],'
    b' "input": [{"role": "user", "content": {"a": 1}}]}',
    b'{"model": "m", "n": 1e999, "max_tokens": 1e999, "max_output_tokens": 1e999,'
    b' "messages": [{"role": "user", "content": "x"}], "input": "x"}',
    json.dumps({"messages": [{"role": "assistant", "content": "x"}], "max_tokens": 5}).encode(),
    DEEP.encode(),
]
HALF_A_CHARACTER = (
    b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "\\ud800"}],'
    b' "input": "\\ud800"}'
)
ALL_PATHS = (*PATHS, "/v1/messages/count_tokens", "/inference/v1/generate", "/episode")


@pytest.mark.parametrize("path", ALL_PATHS)
def test_junk_is_a_typed_error_of_the_client(path: str) -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        record = recording_of(Echo())
        async with server.episode(record) as session:
            for junk in [*JUNK, HALF_A_CHARACTER]:
                answer = await client.post(
                    session.url + path, content=junk, headers=headers_of(session)
                )
                told = (junk[:120], answer.status_code, answer.text[:200])
                assert answer.status_code < 500, told
                if answer.status_code != 200:
                    check_error(path, answer)
                    continue
                assert junk == HALF_A_CHARACTER or path == "/episode", told
            answer = await client.post(
                session.url + CHAT, json=body_of(CHAT, "e0c1"), headers=headers_of(session)
            )
            assert said_in(CHAT, answer.json()) == "e0c1"

    serve(work)


@pytest.mark.parametrize("path", PATHS)
def test_a_body_too_large_is_refused_unread(path: str) -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        async with server.episode(recording_of(Echo())) as session:
            answer = await client.post(
                session.url + path, content=b"x" * (5 << 20), headers=headers_of(session)
            )
            assert answer.status_code == 400 and "context length is 4000" in answer.text
            check_error(path, answer)

    serve(work)


def test_no_key_but_the_episodes_own_leads_anywhere() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        one, two = recording_of(Echo()), recording_of(Echo())
        async with server.episode(one) as session:
            old = session
            assert (await ask(client, session, session.key, CHAT)).status_code == 200
        async with server.episode(two) as session:
            stolen = [old.key, session.key[:-1], f"{session.key}x", session.key.upper(), "x"]
            for key in (*stolen, "../" + session.key, "é", "x" * 5000):
                for path in ALL_PATHS:
                    answer = await ask(client, session, key, path)
                    assert answer.status_code == 401, (key, path, answer.text)
                    check_error(path, answer)
            for path in PATHS:  # in the path of the URL, too
                answer = await client.post(
                    f"{session.url}/{old.key}{path}", json=body_of(path, "e1c1")
                )
                assert answer.status_code == 401
                check_error(path, answer)
            assert two.num_answers == 0 and one.num_answers == 1
            assert (await ask(client, session, session.key, CHAT)).status_code == 200
        assert (one.num_answers, two.num_answers) == (1, 1)

    serve(work)


async def ask(
    client: httpx.AsyncClient, session: ApiSession, key: str, path: str
) -> httpx.Response:
    sent = key.encode()
    headers = [(b"authorization", b"Bearer " + sent), (b"x-api-key", sent)]
    return await client.post(session.url + path, json=body_of(path, "e0c0"), headers=headers)


def test_the_server_keeps_nothing_of_an_episode_that_has_ended() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        kept = []
        for number in range(30):
            record = recording_of(Echo())
            async with server.episode(record) as session:
                answer = await ask(client, session, session.key, PATHS[number % 3])
                assert answer.status_code == 200
            kept.append(weakref.ref(record))
            del record, session
        answer = None
        for _ in range(20):  # handlers that have answered end in the next turns of the loop
            await asyncio.sleep(0)
        gc.collect()
        assert [one for one in kept if one() is not None] == [] and not server.sessions

    serve(work)


def test_a_call_whose_body_comes_after_the_end_of_its_episode_is_refused() -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        record = recording_of(Echo())
        begun, rest = asyncio.Event(), asyncio.Event()
        body = json.dumps(body_of(CHAT, "e0c0")).encode()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:5]
            begun.set()
            await rest.wait()
            yield body[5:]

        async with server.episode(record) as session:
            url, headers = session.url + CHAT, headers_of(session)
            asked = asyncio.ensure_future(client.post(url, content=slowly(), headers=headers))
            await begun.wait()
            # By the time of this answer the head that was sent before it has been read.
            answer = await client.post(url, json=body_of(CHAT, "e0c1"), headers=headers)
            assert answer.status_code == 200
        rest.set()
        assert (await asked).status_code == 401
        assert record.num_answers == 1

    serve(work)


@pytest.mark.parametrize("path", PATHS)
def test_a_call_under_way_ends_with_its_episode_and_is_not_recorded(path: str) -> None:
    async def work(server: RecordingServer, client: httpx.AsyncClient) -> None:
        echo = Echo(is_open=False)
        record = recording_of(echo)
        async with server.episode(record) as session:
            asked = asyncio.ensure_future(ask(client, session, session.key, path))
            await echo.until(lambda: echo.num_active == 1)
        assert (echo.num_active, record.num_answers) == (0, 0), "as soon as the episode has ended"
        answer = await asked
        assert answer.status_code == 401
        check_error(path, answer)

    serve(work)
