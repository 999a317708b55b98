"""A hub on this machine: the few addresses that huggingface_hub's own client asks for an upload.

What a repository holds afterwards is in `HubDouble.files`: small files come in the commit itself,
weights by git-lfs, as the real one wants them.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from web_servers import serving


class HubDouble(http.server.ThreadingHTTPServer):
    """Takes one repository. A `status` of 400 or more is what it answers to everything."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Pages)
        self.status = status
        self.asked: list[str] = []
        self.tokens: dict[str, str] = {}
        self.repo: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Pages(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubDouble

    def do_GET(self) -> None:
        self._note()
        if "/revision/" in self.path or self.path.startswith("/api/models/"):
            self._send({"id": "me/agent", "sha": "0" * 40, "siblings": []})
        else:
            self._send({"error": "not here"}, 404)

    def do_PUT(self) -> None:
        self._note()
        body = self._body()
        with self.server.lock:
            self.server.blobs[hashlib.sha256(body).hexdigest()] = body
        self._send({})

    def do_POST(self) -> None:
        self._note()
        path, body = self.path.partition("?")[0], self._body()
        if path == "/api/repos/create":
            self.server.repo = json.loads(body)
            self._send({"url": f"{self.server.address}/me/agent"})
        elif path.endswith("/validate-yaml"):
            self._send({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            self._send({"files": [_mode(one) for one in json.loads(body)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            self._send(self._uploads(json.loads(body)["objects"]), kind="vnd.git-lfs+json")
        elif "/commit/" in path:
            self._take(body)
            address = f"{self.server.address}/me/agent/commit/{'1' * 40}"
            self._send({"success": True, "commitUrl": address, "commitOid": "1" * 40})
        else:
            self._send({"error": "not here"}, 404)

    def _uploads(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "transfer": "basic",
            "objects": [
                {
                    "oid": one["oid"],
                    "size": one["size"],
                    "actions": {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}},
                }
                for one in objects
            ],
        }

    def _take(self, body: bytes) -> None:
        """The lines of a commit: a header, then files, as text or as the digest of a blob."""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.blobs[value["oid"]]

    def _note(self) -> None:
        with self.server.lock:
            self.server.asked.append(f"{self.command} {self.path}")
            place = self.path.partition("?")[0]
            self.server.tokens[place] = self.headers.get("Authorization", "")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, answer: Any, status: int = 200, kind: str = "json") -> None:
        status = max(status, self.server.status)
        body = json.dumps(answer if status < 400 else {"error": "it is refused"}).encode()
        self.send_response(status)
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    is_large = file["path"].endswith(".safetensors")
    return {
        "path": file["path"],
        "uploadMode": "lfs" if is_large else "regular",
        "shouldIgnore": False,
    }


@contextmanager
def hub(status: int = 200) -> Iterator[HubDouble]:
    with HubDouble(status) as server, serving(server):
        yield server
