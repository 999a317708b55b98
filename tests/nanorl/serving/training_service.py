"""A training service on a free port of this machine, in a thread, over a tiny model's folder; and
the official client that talks to it."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

pytest.importorskip("starlette", reason="needs the extra `serve`")
tinker = pytest.importorskip("tinker", reason="needs the package tinker, the official client")

from nanoinfer.config import InferConfig  # noqa: E402
from nanorl.serving.training_service.service_app import make_app  # noqa: E402
from nanorl.serving.training_service.service_config import ServiceConfig  # noqa: E402
from nanorl.serving.training_service.service_running import ServiceServer  # noqa: E402

KEY = "tml-the-key"
SIZES = InferConfig(num_blocks=256, max_num_seqs=16, max_batch_tokens=64)


class Served:
    """The service, its address, and a plain HTTP client."""

    def __init__(self, server: ServiceServer, config: ServiceConfig) -> None:
        self.url, self.config = server.url, config

    def client(self, key: str = KEY) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=key)

    def send(self, verb: str, body: Any, *, key: str = KEY, **headers: str) -> tuple[int, Any]:
        """(status, JSON or bytes) of a POST. `body` bytes are sent as they are."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        given = {"X-API-Key": key, "Content-Type": kind} | headers
        request = urllib.request.Request(f"{self.url}/api/v1/{verb}", raw, given, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _read(response)
        except urllib.error.HTTPError as error:
            return error.code, _read(error)


def let_go(client: Any) -> None:
    """End what a client does in the background: its service is gone, and it would ask for ever."""
    client.holder.close()


def _read(response: Any) -> Any:
    raw = response.read()
    is_json = raw and response.headers["content-type"] == "application/json"
    return json.loads(raw) if is_json else raw


@contextlib.contextmanager
def serve(folder: Path, root: Path, **options: Any) -> Iterator[Served]:
    """Serve the model in `folder`; checkpoints and the key lie below `root`."""
    root.mkdir(exist_ok=True)
    (root / "key").write_text(KEY)
    given: dict[str, Any] = {"port": 0, "api_key_file": root / "key", "infer": SIZES}
    given |= {"checkpoints": root / "checkpoints", "threads": 1, "names": ("tiny",)}
    config = ServiceConfig(model=folder, **(given | options))
    server = ServiceServer(make_app(config), config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, alive=thread.is_alive, told=lambda: "it did not start")
    try:
        yield Served(server, config)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
    assert not thread.is_alive(), "the service did not stop"
