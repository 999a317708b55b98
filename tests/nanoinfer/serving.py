"""A real server on a free port of this machine, in a thread, for tests of the HTTP side."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_text import make_text_engine, make_tokenizer
from waiting import wait_until

NEEDS = "needs the extra `serve` (starlette, uvicorn)"
pytest.importorskip("starlette", reason=NEEDS)
uvicorn = pytest.importorskip("uvicorn", reason=NEEDS)

from nanoengine.text.tokenizer import ChatTokenizer  # noqa: E402
from nanoinfer.async_engine import AsyncEngine  # noqa: E402
from nanoinfer.engine import LLMEngine  # noqa: E402
from nanoinfer.http.connection import server_config  # noqa: E402
from nanoinfer.server.access import Access  # noqa: E402
from nanoinfer.server.app import HttpApp  # noqa: E402
from nanoinfer.server.config import CompletionLimits  # noqa: E402

KEY = "the-key"


class Served:
    """The app, its port, and a plain HTTP client."""

    def __init__(self, app: HttpApp, engine: LLMEngine, server: Any) -> None:
        self.app, self.engine, self.state = app, engine, server.server_state
        self.listener = server.servers[0].sockets[0]
        self.port = self.listener.getsockname()[1]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def send(
        self, path: str, body: Any = None, key: str | None = KEY, method: str | None = None
    ) -> tuple[int, Any]:
        """(status, JSON or text). `body` bytes are sent as they are, other values as JSON."""
        connection = self.connect()
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        method = method or ("GET" if body is None else "POST")
        connection.request(method, path, None if body is None else raw, headers)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, json.loads(text) if is_json else text

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream; checks that it ends with [DONE]."""
        status, text = self.send(path, body | {"stream": True})
        assert status == 200, text
        *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def wait_idle(self) -> None:
        """Until nothing is in flight; fails if something stays."""
        wait_until(
            lambda: not (self.engine.num_unfinished or self.app.metrics.num_active),
            told=lambda: f"{self.engine.num_unfinished} requests leaked",
        )
        assert self.engine._blocks.num_free == self.engine._blocks.num_blocks
        assert not self.app.client._callers
        self.engine.check()


@contextlib.contextmanager
def slow_steps(engine: LLMEngine) -> Iterator[None]:
    """To the end of the block each step takes its time: a request of hundreds of tokens is under
    way still when the next one comes, also where whoever sends that is late."""
    is_over, step = threading.Event(), engine.step

    def slow() -> Any:
        is_over.wait(0.05)
        return step()

    engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        is_over.set()
        engine.step = step  # type: ignore[method-assign]


@contextlib.contextmanager
def serve(
    engine: LLMEngine | None = None, tokenizer: ChatTokenizer | None = None, **options: Any
) -> Iterator[Served]:
    engine = engine or make_text_engine(num_blocks=512, max_num_seqs=32, max_batch_tokens=128)
    given: dict[str, Any] = {"model_name": "tiny", "limits": CompletionLimits(), "api_key": KEY}
    given["admin_key"] = options.get("api_key", KEY)  # one key for all, unless told otherwise
    given["allowed_hosts"] = ()
    given |= options
    access = Access(*(given.pop(name) for name in ("api_key", "admin_key", "allowed_hosts")))
    app = HttpApp(AsyncEngine(engine), tokenizer or make_tokenizer(), access=access, **given)
    limits = given["limits"]
    server = uvicorn.Server(server_config(app.starlette(), limits, access_log=True))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, alive=thread.is_alive, told=lambda: "it did not start")
    served = Served(app, engine, server)
    try:
        yield served
        served.wait_idle()
    finally:
        server.should_exit = True
        thread.join(timeout=30)
    assert not thread.is_alive(), "the server did not stop"
