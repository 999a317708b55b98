"""The command: `python -m nanoinfer.server --model FOLDER`. Its options are `ServerConfig`.

It needs the extra `serve` (starlette, uvicorn, pydantic); grammars need `grammar` (llguidance).
"""

from __future__ import annotations

from nanoinfer.server.config import ServerConfig


def main() -> None:
    try:
        import tyro

        from nanoinfer.server.running import run_server
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the server needs the package {error.name}; run: pip install -e '.[serve]'"
        ) from None
    config = tyro.cli(ServerConfig, prog="python -m nanoinfer.server")
    try:
        run_server(config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
