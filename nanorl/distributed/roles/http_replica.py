"""A replica that somebody else started: a `nanoinfer.server` at an address, as a client of it.

    replica = HttpReplica(url="http://127.0.0.1:8000", api_key=key)
    router.set_replicas({"r0": ActorClient(handle), "outside": replica})

It has the calls of a `Replica` that a run needs, so whoever drives replicas drives it as well. Each
call is a connection of its own on the running event loop; closing that aborts the request there.
Weights reach the server through a folder below its --weights-root: the `disk` transport, in full.

Left out: starting and ending the server, and a server that hangs
while it keeps its connections: that is found out after `timeout_s`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from time import perf_counter
from typing import Any, ClassVar
from urllib.parse import urlsplit

from nanoinfer.http.http_client import HttpClient, NoReplyError
from nanoinfer.options.outputs import output_from_json
from nanoinfer.params import Output, SamplingParams
from nanorl.bounds import check_number
from nanorl.distributed.roles.replica_clients import ReplicaLost
from nanorl.distributed.weights.disk import DiskOffer
from nanorl.distributed.weights.offer import (
    BaseVersionMissing,
    Offer,
    WeightReceiver,
    WeightsRefused,
)

ELSEWHERE = frozenset(
    {HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT}
)


class ServerRefusedError(ValueError):
    """The server answered that the request cannot be served: its status, and what it says."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class HttpReplica:
    """A server's address. It can be pickled."""

    engine: ClassVar[str] = "nanoinfer.server"
    """What answers there, for people."""
    note: ClassVar[str] = ""
    """What a run says when it begins to use one."""
    gone: ClassVar[frozenset[int]] = ELSEWHERE
    """Answers with which another server may serve the call; a 503 is of one that drains."""

    url: str
    """http://host:port, or https."""
    api_key: str | None = None
    """What the server's --admin-key-file holds; without it weights and drains are refused."""
    timeout_s: float = 600.0
    """A call that takes longer counts as lost."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={self.url!r}: must look like http://127.0.0.1:8000")
        check_number("timeout_s=", self.timeout_s, 0, is_open=True)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        """See `ReplicaClient`. A drained server hands `sampled` back as it is."""
        body = {
            "request_id": name,
            "token_ids": ids,
            "sampling_params": asdict(params),
            "return_output": True,
        }
        if sampled is not None:
            body["sampled"] = asdict(sampled)
        try:
            answer = await self._call("/inference/v1/generate", body)
        except ServerRefusedError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return sampled if sampled is not None else Output(finish_reason="abort")
        return output_from_json(answer["choices"][0]["output"])

    async def load_weights(self, receiver: WeightReceiver, offer: Offer) -> float:
        """As of `Replica`; the offer must be of a folder that the server can read."""
        start = perf_counter()
        if not isinstance(offer, DiskOffer):
            raise WeightsRefused(
                f"{self.url}: a server at an address takes weights from a folder; choose the "
                f"transport disk, not {type(offer).__name__}"
            )
        if offer.base_version is not None:
            raise BaseVersionMissing(f"{self.url}: a server takes whole versions")
        # A seal is the checksum under an XOR, so sealing it again uncovers that.
        checksums = {entry.name: entry.sealed(entry.seal).seal for entry in offer.entries}
        body = {"path": offer.folder, "version": offer.version, "checksums": checksums}
        try:
            await self._call("/update_weights", body)
        except ServerRefusedError as error:
            raise WeightsRefused(f"{self.url}: {error}") from error
        return perf_counter() - start

    async def drain(self) -> None:
        """As of `Replica`, but the server's owner can `/resume` it."""
        await self._call("/drain", {})

    async def sleep(self) -> None:
        await self._call("/sleep", {})

    async def wake(self) -> None:
        await self._call("/wake", {})

    async def heartbeat(self) -> dict[str, float]:
        """As of `Replica`."""
        beat: dict[str, float] = await self._call("/heartbeat", {})
        return beat

    async def ready(self, temperature: float) -> None:
        """ValueError, or whatever a call raises, unless rollouts can be drawn here at this
        temperature."""
        await self.heartbeat()

    async def _call(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        """The JSON answer, None where it is empty. `ReplicaLost` if there is none."""
        payload = b"" if method == "GET" else json.dumps(body).encode()
        try:
            client = HttpClient(self.url, self.api_key, self.timeout_s)
            status, _, raw = await client.ask(method, path, payload)
        except TimeoutError as error:
            limit = f"{self.timeout_s:g} s"
            raise ReplicaLost(f"{self.url}{path}: no answer within {limit}") from error
        except NoReplyError as error:
            raise ReplicaLost(f"{self.url}{path}: {error}") from error
        told = f"{self.url}{path} answered {status}: {_shown(raw)}"
        if status in self.gone:
            raise ReplicaLost(told)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise RuntimeError(told)
        if status != HTTPStatus.OK:
            raise ServerRefusedError(status, told)
        try:
            return json.loads(raw) if raw.strip() else None
        except ValueError as error:
            raise ReplicaLost(f"{self.url}{path}: {error}") from error


def _shown(raw: bytes) -> str:
    """The message of an error, whichever form it has: at most 300 characters."""
    try:
        told: Any = json.loads(raw)
    except ValueError:
        return raw[:300].decode(errors="replace")
    while isinstance(told, Mapping):
        inner = next((told[key] for key in ("error", "message", "detail") if key in told), None)
        if inner is None:
            break
        told = inner
    return str(told)[:300]
