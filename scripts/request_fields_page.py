"""Writes the tables of docs/request_fields.md: what becomes of each field of a request.

    python scripts/request_fields_page.py            # says whether the page is what the code does
    python scripts/request_fields_page.py --write

They are read from the classes of the bodies, so a field cannot be on the page otherwise than it is
treated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from generated_part import GeneratedPart

from nanoinfer.dialects.chat import RecordedChat
from nanoinfer.dialects.messages import MessageRequest
from nanoinfer.dialects.responses import ResponseRequest
from nanoinfer.http.strict_body import Refused, StrictBody
from nanoinfer.server.requests import ChatCompletion, Completion

PAGE = Path(__file__).parents[1] / "docs" / "request_fields.md"
FIELDS = GeneratedPart("fields", "request_fields_page.py")
REFUSED = GeneratedPart("refused", "request_fields_page.py")
APIS: dict[str, type[StrictBody]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": ResponseRequest,
    "/v1/messages": MessageRequest,
}


def fields_table() -> str:
    """Done and without effect, for each API."""
    lines = ["| API | done | without effect |", "|---|---|---|"]
    for path, body in APIS.items():
        done = sorted(body.own_names() - body.refused.keys())
        lines.append(f"| `{path}` | {_code(done)} | {_code(sorted(body.ignored))} |")
    return "\n".join(lines)


def refused_table() -> str:
    """What is refused, why, and where."""
    rows: dict[tuple[str, str], list[str]] = {}
    named = {"chat": ChatCompletion, "completions": Completion, "responses": ResponseRequest}
    for where, body in (named | {"messages": MessageRequest}).items():
        _collect(rows, body.refused, where)
    own = {n: r for n, r in RecordedChat.refused.items() if n not in ChatCompletion.refused}
    _collect(rows, own, "chat of a run")
    lines = ["| field | what the error says | where |", "|---|---|---|"]
    for (name, why), where in sorted(rows.items()):
        lines.append(f"| `{name}` | {why} | {', '.join(where)} |")
    return "\n".join(lines)


def _collect(
    rows: dict[tuple[str, str], list[str]], refused: Mapping[str, Refused], where: str
) -> None:
    for name, one in refused.items():
        rows.setdefault((name, one.why), []).append(where)


def _code(names: Sequence[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def written(page: str) -> str:
    """The page with both tables as they are now."""
    return REFUSED.put(FIELDS.put(page, fields_table()), refused_table())


def main(arguments: Sequence[str]) -> int:
    page = PAGE.read_text("utf-8")
    if "--write" in arguments:
        PAGE.write_text(written(page), "utf-8")
        return 0
    if written(page) != page:
        print("docs/request_fields.md is not what the code does; call this with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
