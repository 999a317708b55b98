"""The page at `/`: a chat with the model in a browser, one file that asks nobody but this server.

Its policy lets it run the script and the style that stand in it, told by their hashes, and send
requests to where it came from; whatever a model writes is shown as text. The page holds no key: it
asks for one where the server wants it, and keeps it until the tab is closed.
Left out: running tools (nanorl chat does), files and pictures, a history on the server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, Response


def page_response() -> Response:
    html, policy = _page()
    return HTMLResponse(
        html,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


@cache
def _page() -> tuple[str, str]:
    """The page and its Content-Security-Policy."""
    html = (files("nanoinfer.server") / "page.html").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(html, 'script')}; style-src {_hash(html, 'style')};"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return html, policy


def _hash(html: str, tag: str) -> str:
    """The one element of that name, as a policy names it."""
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
