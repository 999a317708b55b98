"""The command: `python -m nanoinfer.server --model FOLDER`. Its options are `ServerConfig`.

It needs the extra `serve` (starlette, uvicorn, pydantic); grammars need `grammar` (llguidance).
"""

from __future__ import annotations

import sys

import tyro

from nanoengine.command_line import plain_errors, run_command
from nanoengine.extras import missing
from nanoinfer.server.config import ServerConfig


def main(words: list[str]) -> int:
    with plain_errors(words):
        config = tyro.cli(ServerConfig, args=words, prog="python -m nanoinfer.server")
    try:
        from nanoinfer.server.running import run_server  # here: it imports torch
    except ModuleNotFoundError as error:
        raise missing("the server", error.name, extra="serve") from None
    run_server(config)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
