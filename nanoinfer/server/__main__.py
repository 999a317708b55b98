"""The command: `python -m nanoinfer.server --model FOLDER`. Its options are `ServerConfig`.

It needs the extra `serve` (starlette, uvicorn, pydantic); grammars need `grammar` (llguidance).
"""

from __future__ import annotations

from nanoinfer.server.config import ServerConfig


def main() -> None:
    try:
        import tyro
        import uvicorn

        from nanoinfer.server.app import make_app
        from nanoinfer.server.connection import server_config
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the server needs the package {error.name}; run: pip install -e '.[serve]'"
        ) from None
    config = tyro.cli(ServerConfig, prog="python -m nanoinfer.server")
    try:
        app = make_app(config)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    connections = server_config(app.starlette(), config.limits, config.host, config.port)
    uvicorn.Server(connections).run()


if __name__ == "__main__":
    main()
