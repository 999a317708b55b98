"""Real HTTP and HTTPS servers on this machine, which count what they are asked."""

from __future__ import annotations

import gzip
import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import BaseServer

from nanorl.envs.http_record.authority import RunAuthority

BINARY = bytes(range(256)) * 40
EVENTS = [b"data: one\n\n", b"data: two\n\n", b"data: [DONE]\n\n"]
SECRETS = ("secret-of-authorization", "secret-of-cookie", "secret-of-query", "secret-set-cookie")


class Pages(http.server.BaseHTTPRequestHandler):
    """Every page says how often it was asked, so a second answer differs from the first."""

    protocol_version = "HTTP/1.1"
    server: CountingServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        count = self.server.count(f"{self.command} {self.path}")
        if path == "/gzip":
            is_wanted = "gzip" in self.headers.get("Accept-Encoding", "")
            body = gzip.compress(b"packed " * 500) if is_wanted else b"packed " * 500
            self._send(body, **({"Content-Encoding": "gzip"} if is_wanted else {}))
        elif path == "/binary":
            self._send(BINARY, **{"Content-Type": "application/octet-stream"})
        elif path == "/events":
            self._stream(EVENTS)
        elif path == "/away":
            self._send(b"", 302, Location="http://off-the-list.example/page")
        elif path == "/busy":
            self._send(b"later", 503 if count == 1 else 200)
        elif path == "/slow":
            time.sleep(2)
            self._send(b"late")
        elif path == "/large":
            self._send(b"x" * (3 << 20))
        elif path == "/missing":
            self._send(b"no such page", 404)
        else:
            self._send(
                f"{self.command} {self.path}, {count}".encode(),
                **{"Set-Cookie": f"id={SECRETS[3]}"},
            )

    do_HEAD = do_GET

    def do_POST(self) -> None:
        count = self.server.count(f"POST {self.path}")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(b"got " + data + f", {count}".encode())

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self, parts: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (*parts, b""):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class CountingServer(http.server.ThreadingHTTPServer):
    """Knows how often each page was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Pages)
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, what: str) -> int:
        with self._lock:
            self.asked[what] += 1
            return self.asked[what]


@contextmanager
def web_server(ca_file: Path | None = None) -> Iterator[CountingServer]:
    """A server until the end of the block; with `ca_file` it speaks HTTPS as "localhost", and the
    certificate to be trusted is written there."""
    with CountingServer() as server:
        if ca_file is not None:
            authority = RunAuthority()
            ca_file.write_bytes(authority.pem)
            context = authority.context("localhost")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        with serving(server):
            yield server


@contextmanager
def serving(server: BaseServer) -> Iterator[None]:
    """A thread answers until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
