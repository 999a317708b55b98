"""A cluster that exists on paper, a run around it in one event loop, and a client for its HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from nanorl.observability.monitor.monitor import RunMonitor
from nanorl.observability.monitor.monitor_control import RoleStatus
from nanorl.observability.report.live import LiveView
from nanorl.options.monitor_config import MonitorConfig


def role(name: str, kind: Any = "replica", **changes: Any) -> RoleStatus:
    given = {"state": "ready", "restarts": 0, "pid": hash(name) % 9999, "host": "here"}
    return RoleStatus(**{"metrics": {}, **given, **changes}, name=name, kind=kind)


class PaperCluster:
    """Implements `ClusterControl`; at most three replicas of its own fit."""

    def __init__(self) -> None:
        self.listed = [role("policy-0", "policy"), role("replica-0")]

    def roles(self) -> list[RoleStatus]:
        return list(self.listed)

    def change(self, name: str, **changes: Any) -> None:
        self.listed = [replace(r, **changes) if r.name == name else r for r in self.listed]

    async def scale(self, replicas: int) -> None:
        await asyncio.sleep(0)
        if not 1 <= replicas <= 3:
            raise ValueError(f"replicas={replicas}: must be 1 to 3, there are 3 cores")
        others = [r for r in self.listed if r.kind != "replica"]
        self.listed = others + [role(f"replica-{i}") for i in range(replicas)]

    async def add_replica(self, address: str) -> str:
        if "nobody" in address:
            raise ConnectionRefusedError(111, f"{address} refused the connection")
        name = f"external-{len(self.listed)}"
        self.listed.append(role(name, pid=None, host=address))
        return name

    async def remove_replica(self, name: str) -> None:
        self.listed = [r for r in self.listed if r.name != name]


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]["message"]


async def ask(
    url: str, method: str = "GET", body: object = None, token: str | None = None, **headers: str
) -> Answer:
    """One request, from a thread as any other process would ask."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(url, method=method, data=data)
    for name, value in headers.items():
        request.add_header(name, value)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")

    def send() -> Answer:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read())

    return await asyncio.to_thread(send)


class Watched:
    """A monitor over a paper cluster; what is said goes into `log`."""

    def __init__(self, folder: Path, cluster: PaperCluster | None = None, **options: Any) -> None:
        self.cluster = cluster
        self.out = io.StringIO()
        live = LiveView("a run", console=Console(file=self.out, width=300))
        self.monitor = RunMonitor(MonitorConfig(**options), folder, live, cluster)

    @property
    def log(self) -> str:
        return self.out.getvalue()
