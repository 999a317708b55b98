"""An MCP server that keeps notes, and writes its pid into a file: mcp_notes_program.py FILE [how].

It speaks the protocol by hand, so it starts in no time. how: `deaf` ends neither with its input nor
by a polite signal, `stuck` does so and never answers, and says in FILE.stuck that it is; `again` is
stuck when FILE has a line already, `marked` says of its tools that they only read, `silent` never
says which it has, and `short` ends when it is asked that.
"""

import json
import os
import signal
import sys
import time
from typing import Any

FILE, HOW = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
notes: list[str] = []


def tool(name: str, is_marked: bool) -> dict[str, Any]:
    marks = {"annotations": {"readOnlyHint": True}} if is_marked else {}
    return {"name": name, "inputSchema": {"type": "object"}, **marks}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        return {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "notes", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [tool("note", HOW == "marked"), tool("pid", True)]}
    if method == "tools/call":
        text = str(os.getpid())
        if params["name"] == "note":
            notes.append(params["arguments"]["text"])
            text = "; ".join(notes)
        return {"content": [{"type": "text", "text": text}], "isError": False}
    return None


def serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue
        if asked["method"] == "tools/list" and HOW == "short":
            return
        if asked["method"] == "tools/list" and HOW == "silent":
            continue
        said = answer(asked["method"], asked.get("params", {}))
        error = {"error": {"code": -32601, "message": "no such method"}}
        told = error if said is None else {"result": said}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **told}), flush=True)


def main() -> None:
    is_stuck = HOW == "stuck" or (HOW == "again" and os.path.exists(FILE))
    if HOW == "deaf" or is_stuck:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(FILE, "a") as file:
        print(os.getpid(), file=file, flush=True)
    if is_stuck:
        with open(f"{FILE}.stuck", "a") as file:
            print(os.getpid(), file=file, flush=True)
    else:
        serve()
    while HOW == "deaf" or is_stuck:
        time.sleep(60)


main()
