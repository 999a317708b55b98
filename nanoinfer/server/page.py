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
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, JSONResponse, Response

from nanoinfer.http.page_headers import page_headers


@dataclass(frozen=True, kw_only=True)
class PageTool:
    """A tool of the agent, as the page names it."""

    name: str
    description: str = ""


@dataclass(frozen=True, kw_only=True)
class PageAbout:
    """The page's account of the model, before anything is said."""

    title: str = ""
    """Empty: the model's name."""
    system: str = ""
    """The system prompt that the model was trained with; the page begins with it."""
    example: str = "Explain in two sentences what reinforcement learning is."
    """A message to try."""
    tools: tuple[PageTool, ...] = ()
    note: str = ""
    """A line about the tools: this page shows calls, and runs none."""


def about_response(about: PageAbout, model: str) -> Response:
    """The facts as JSON, for the page's script."""
    return JSONResponse({**asdict(about), "title": about.title or model})


@cache
def page_response() -> Response:
    html = (files("nanoinfer.server") / "page.html").read_text(encoding="utf-8")
    return HTMLResponse(
        html, headers=page_headers(script=_hash(html, "script"), style=_hash(html, "style"))
    )


def _hash(html: str, tag: str) -> str:
    """The one element of that name, as a policy names it."""
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
