"""A call that its client gave up is no turn of the episode: real clients time out and try again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from agent_doubles import EOS, output_of, tiny_tokenizer
from tiny_text import make_text_engine
from waiting import until

from nanoinfer.async_engine import AsyncEngine
from nanoinfer.dialects import all_dialects
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits
from nanorl.types import InfrastructureError, Rollout

TOKENIZER = tiny_tokenizer()
SOON_S = 30.0  # far more than anything here takes
WHILE_S = 0.2  # in which something else has the time to happen that should not
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOKENS = "/inference/v1/generate"
PATHS = (CHAT, RESPONSES, MESSAGES, TOKENS)


class Engine:
    """Answers "a" so many times `num_tokens`. The first `num_held` calls are never answered; one
    that is given up is let go when `may_abort` is set."""

    def __init__(self, num_held: int = 0, num_tokens: int = 1) -> None:
        self.num_held, self.num_tokens = num_held, num_tokens
        self.num_asked = self.num_active = self.most_active = self.num_aborted = 0
        self.may_abort, self.changed = asyncio.Event(), asyncio.Condition()
        self.may_abort.set()

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.num_asked += 1
        self.num_active += 1
        self.most_active = max(self.most_active, self.num_active)
        is_held = self.num_asked <= self.num_held
        await self._tell()
        try:
            if is_held:
                await asyncio.Future()
            return output_of([*[64] * self.num_tokens, EOS])
        except asyncio.CancelledError:
            self.num_aborted += 1
            await self._tell()
            await self.may_abort.wait()
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


def recording_of(engine: Any, max_turns: int) -> Recording:
    limits = Limits(max_turns=max_turns, max_turn_tokens=2000, max_context_tokens=9000)
    return Recording(engine, TOKENIZER, limits=limits, sampling=SamplingParams(seed=1))


def serve(
    work: Callable[[ApiSession, httpx.AsyncClient], Awaitable[None]], record: Recording
) -> None:
    async def run() -> None:
        server = RecordingServer(all_dialects(TOKENIZER), model="tiny", max_model_len=9000)
        try:
            async with (
                httpx.AsyncClient(timeout=SOON_S) as client,
                server.episode(record) as session,
            ):
                await work(session, client)
        finally:
            await server.close()

    asyncio.run(run())


async def give_up(
    engine: Engine, client: httpx.AsyncClient, session: ApiSession, path: str
) -> None:
    """Ask, and hang up as soon as the engine has been asked."""
    num_before = engine.num_asked
    asking = asyncio.ensure_future(post(client, session, path))
    await engine.until(lambda: engine.num_asked > num_before)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def post(
    client: httpx.AsyncClient, session: ApiSession, path: str, text: str = "?", **options: Any
) -> httpx.Response:
    said = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": "any", "messages": said}
    if path == RESPONSES:
        body = {"model": "any", "input": said}
    elif path == TOKENS:
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}}
    elif path == MESSAGES:
        body["max_tokens"] = 30
    return await client.post(f"{session.keyed_url}{path}", json=body, **options)


def rollout_of(record: Recording) -> Rollout:
    empty = Rollout(
        task_id="t", group_id="g", rollout_id="r", tokens=[], loss_mask=[], logps=[], versions=[]
    )
    return record.rollout(empty)


def test_a_real_client_times_out_and_its_retry_is_the_episodes_one_turn() -> None:
    """It loses patience as soon as the engine holds its call, and not for a busy machine."""
    engine = Engine(num_held=2)
    record = recording_of(engine, max_turns=1)

    class Impatient(httpx.AsyncHTTPTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            num_before = engine.num_asked
            answer = asyncio.ensure_future(super().handle_async_request(request))
            if num_before < engine.num_held:
                await engine.until(lambda: engine.num_asked > num_before)
                answer.cancel()
                await asyncio.gather(answer, return_exceptions=True)
                raise httpx.ReadTimeout("it took too long")
            return await answer

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        async with openai.AsyncOpenAI(
            base_url=session.openai_url,
            api_key=session.key,
            max_retries=9,
            http_client=httpx.AsyncClient(transport=Impatient(), timeout=SOON_S),
        ) as real:
            answer = await real.chat.completions.create(
                model="x", messages=[{"role": "user", "content": "?"}]
            )
            assert answer.choices[0].message.content == "a"
            with pytest.raises(openai.BadRequestError, match="has had its 1 calls"):
                await real.chat.completions.create(
                    model="x", messages=[{"role": "user", "content": "more"}]
                )

    serve(work, record)
    assert engine.num_asked == 3 and engine.num_aborted == 2, "what was given up was aborted"
    played = rollout_of(record)
    assert len(played.turn_spans) == 1 and played.branches == []
    assert (played.metrics["num_calls"], played.metrics["calls_given_up"]) == (1.0, 2.0)


@pytest.mark.parametrize("path", PATHS)
def test_what_was_given_up_counts_nowhere_and_cuts_nothing(path: str) -> None:
    engine = Engine(num_held=3)
    record = recording_of(engine, max_turns=2)

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        for _ in range(3):
            await give_up(engine, client, session, path)
        assert (await post(client, session, path)).status_code == 200
        assert record.truncation is None and record.num_answers == 1
        assert (await post(client, session, path, "and")).status_code == 200
        assert (await post(client, session, path, "on")).status_code == 400

    serve(work, record)
    assert (engine.num_asked, engine.num_aborted, engine.num_active) == (5, 3, 0)
    assert record.truncation == "context" and record.num_answers == 2


def test_a_retry_that_is_faster_than_the_abort_waits_for_its_place() -> None:
    engine = Engine(num_held=1)
    record = recording_of(engine, max_turns=1)

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        engine.may_abort.clear()
        await give_up(engine, client, session, CHAT)
        again = asyncio.ensure_future(post(client, session, CHAT))
        await engine.until(lambda: engine.num_aborted == 1)
        await asyncio.wait({again}, timeout=WHILE_S)  # it asks meanwhile
        assert not again.done() and engine.num_asked == 1, "two are never in the engine"
        engine.may_abort.set()
        assert (await again).status_code == 200

    serve(work, record)
    assert record.truncation is None and record.num_answers == 1


def test_calls_at_once_never_exceed_the_limit_whoever_gives_up() -> None:
    """40 calls at once are all given up, in the engine or while they wait. Of 20 that follow as
    many are answered as the limit says, and the engine never had more at a time."""
    engine = Engine(num_held=1000)
    record = recording_of(engine, max_turns=7)

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        tasks = [
            asyncio.ensure_future(post(client, session, CHAT, f"{number}")) for number in range(40)
        ]
        await engine.until(lambda: engine.num_active == 7)
        for task in tasks:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(SOON_S):
            while session.num_open:  # the server hears of each
                await asyncio.sleep(0)
        engine.num_held = 0
        statuses = await asyncio.gather(
            *(post(client, session, CHAT, f"again {number}") for number in range(20))
        )
        got = sorted(one.status_code for one in statuses)
        assert got == [200] * 7 + [400] * 13

    serve(work, record)
    assert engine.most_active <= 7 and record.num_answers == 7


def test_an_answer_whose_client_left_while_it_was_written_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(num_tokens=1000)  # so long that it is written in a thread
    record = recording_of(engine, max_turns=1)
    is_writing, go_on = threading.Event(), threading.Event()
    chat = type(all_dialects(TOKENIZER)[0])
    write = chat.write

    def held(*given: Any) -> Any:
        is_writing.set()
        assert go_on.wait(SOON_S)
        return write(*given)

    monkeypatch.setattr(chat, "write", held)

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        asking = asyncio.ensure_future(post(client, session, CHAT))
        assert await asyncio.to_thread(is_writing.wait, SOON_S)
        (written,) = session.calls
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        again = asyncio.ensure_future(post(client, session, CHAT, "again"))
        await until(written.cancelling, SOON_S)  # the server has heard of the hang-up
        go_on.set()
        assert (await again).status_code == 200

    serve(work, record)
    (only,) = record.tree.sequences()
    assert "again" in TOKENIZER.decode(only.tokens)


class Failing(Engine):
    """Fails where it is asked first."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        if self.num_asked == 0:
            self.num_asked += 1
            raise InfrastructureError("the engine died")
        return await super().generate(ids, params)


def test_a_call_that_the_engine_failed_is_given_back() -> None:
    record = recording_of(Failing(), max_turns=1)

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        assert (await post(client, session, CHAT)).status_code == 503
        assert (await post(client, session, CHAT)).status_code == 200

    serve(work, record)
    assert rollout_of(record).metrics["num_calls"] == 1.0


def test_where_one_of_several_answers_fails_the_others_are_aborted() -> None:
    class OneFails(Engine):
        async def generate(self, ids: list[int], params: SamplingParams) -> Output:
            if self.num_asked == 2:
                await self.until(lambda: self.num_active == 2)
                raise InfrastructureError("the engine died")
            return await super().generate(ids, params)

    engine = OneFails(num_held=2)
    record = recording_of(engine, max_turns=3)

    async def work() -> None:
        with pytest.raises(InfrastructureError):
            await record.complete([1, 2], SamplingParams(max_tokens=9, n=3))
        await engine.until(lambda: engine.num_active == 0)
        assert engine.num_aborted == 2

    asyncio.run(work())


def test_a_real_engine_samples_no_more_for_a_client_that_timed_out() -> None:
    async def work() -> None:
        async with AsyncEngine(make_text_engine()) as engine:
            tokenizer = engine.engine.tokenizer
            limits = Limits(max_turns=1, max_turn_tokens=200, max_context_tokens=250)
            sampling = SamplingParams(seed=1, ignore_eos=True)
            record = Recording(engine, tokenizer, limits=limits, sampling=sampling)
            server = RecordingServer(all_dialects(tokenizer), model="tiny", max_model_len=250)
            try:
                async with (
                    server.episode(record) as session,
                    httpx.AsyncClient(timeout=30) as client,
                ):
                    asking = asyncio.ensure_future(post(client, session, TOKENS))
                    async with asyncio.timeout(SOON_S):
                        while engine.engine.metrics()["num_running"] == 0:
                            await asyncio.sleep(0)
                    asking.cancel()
                    await asyncio.gather(asking, return_exceptions=True)
                    assert (await post(client, session, TOKENS)).status_code == 200
                    assert engine.engine.metrics()["num_running"] == 0
            finally:
                await server.close()
        assert len(record.tree.nodes) == 1

    asyncio.run(work())
