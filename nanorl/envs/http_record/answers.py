"""`Answers`: what a request is answered with, by the mode, and how often each thing happened.

    record   what is in the record, else the network's answer, which is recorded
    replay   what is in the record, and nothing else
    live     the network's answer

Equal requests get one answer: the first. Two that come at the same time wait for one another, so
that both have it. Answers that a server's bad minute gave (5xx, 408, 425, 429) go to the client and
not into the record: a later request should not have to live with them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from urllib.parse import urlsplit

from nanorl.envs.http_record.allow import AllowList
from nanorl.envs.http_record.http_exchange import WebAnswer, WebRequest
from nanorl.envs.http_record.record import DamagedRecordError, HttpRecord
from nanorl.envs.http_record.record_config import HttpConfig
from nanorl.envs.http_record.refusal import NoAnswerError, not_allowed
from nanorl.envs.http_record.upstream import Upstream

COUNTED = (
    *("requests", "recorded", "replayed", "passed_on"),
    *("host_not_allowed", "not_in_record", "failed"),
)
"""What is counted; `passed_on` are answers of a bad minute."""


class Answers:
    """Answers requests, and counts."""

    def __init__(self, config: HttpConfig, record: HttpRecord | None) -> None:
        """`record` is None in the mode live."""
        self._config, self._record = config, record
        self._allow = AllowList(config.allow)
        self._upstream: Upstream | None = None
        if config.mode != "replay":
            self._upstream = Upstream(
                self._allow,
                ca_file=config.ca_file,
                timeout_s=config.timeout_s,
                max_bytes=int(config.max_body_mb * (1 << 20)),
            )
        self._under_way: dict[str, asyncio.Lock] = {}
        self._counts: Counter[str] = Counter()

    async def answer(self, request: WebRequest) -> WebAnswer:
        """The answer, or the error that says why there is none."""
        self._counts["requests"] += 1
        try:
            self._check(request)
            if self._record is None:
                return await self._ask(request)
            return await self._from_record(request, self._record)
        except NoAnswerError as refused:
            self._counts[refused.kind if refused.kind in COUNTED else "failed"] += 1
            return refused.answer(request.url)
        except (DamagedRecordError, OSError) as error:
            self._counts["failed"] += 1
            return NoAnswerError(502, "record_failed", f"has no answer: {error}").answer(
                request.url
            )

    def take_counts(self) -> dict[str, int]:
        """Count how often each thing happened since the last call."""
        taken = {name: self._counts[name] for name in COUNTED}
        self._counts.clear()
        return taken

    def _check(self, request: WebRequest) -> None:
        parts = urlsplit(request.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        is_listed = self._allow.allows(host, port)
        if not is_listed and (self._config.allow or self._upstream is not None):
            raise not_allowed(host, port, "is not on the list", host)

    async def _from_record(self, request: WebRequest, record: HttpRecord) -> WebAnswer:
        key = request.key(record.salt, self._config.key_headers)
        lock = self._under_way.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if (known := record.get(key)) is not None:
                    self._counts["replayed"] += 1
                    return known
                answer = await self._ask(request)
                if not answer.is_lasting:
                    self._counts["passed_on"] += 1
                    return answer
                self._counts["recorded"] += 1
                return record.put(key, request, answer)
        finally:
            if not lock.locked():
                self._under_way.pop(key, None)

    async def _ask(self, request: WebRequest) -> WebAnswer:
        if self._upstream is None:
            raise NoAnswerError(
                504,
                "not_in_record",
                f"is not in the record ({request.method}, {len(request.body)} bytes of body); to "
                "record it, run with --http.mode record and --http.allow "
                f"{urlsplit(request.url).netloc}",
            )
        return await self._upstream.ask(request)
