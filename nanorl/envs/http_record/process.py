"""The process of the recording proxy: python -m nanorl.envs.http_record.process.

On its stdin comes a line of JSON, `{"config": ..., "store": path, "token": text}`; on its stdout it
answers `{"port": ..., "pem": text}`, or `{"error": text}` and ends. Every further line is answered
with what was counted since the last. It ends when stdin does: with the run, however that ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanorl.envs.http_record.answers import Answers
from nanorl.envs.http_record.authority import RunAuthority
from nanorl.envs.http_record.record import HttpRecord
from nanorl.envs.http_record.record_config import HttpConfig
from nanorl.envs.http_record.record_server import ProxyServer


def config_of(data: Mapping[str, Any]) -> HttpConfig:
    """The options from their JSON."""
    paths = {name: data[name] and Path(data[name]) for name in ("store", "ca_file")}
    lists = {name: tuple(data[name]) for name in ("allow", "key_headers")}
    return HttpConfig(**{**data, **paths, **lists})


async def serve(order: Mapping[str, Any]) -> None:
    """Do what the first line says, until stdin ends."""
    config = config_of(order["config"])
    record = None
    if config.mode != "live":
        record = HttpRecord(Path(order["store"]), must_exist=config.mode == "replay")
    authority, answers = RunAuthority(), Answers(config, record)
    max_bytes = int(config.max_body_mb * (1 << 20))
    server = ProxyServer(answers, authority, token=order["token"], max_bytes=max_bytes)
    say({"port": await server.start(), "pem": authority.pem.decode()})
    while await asyncio.to_thread(sys.stdin.readline):
        say(answers.take_counts())
    server.close()
    if record is not None:
        record.close()


def say(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    try:
        asyncio.run(serve(json.loads(sys.stdin.readline())))
    except (ValueError, OSError) as error:
        say({"error": str(error)})


if __name__ == "__main__":
    main()
