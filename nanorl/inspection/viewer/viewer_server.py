"""The viewer over HTTP: a page and what it asks for. Nothing here changes anything.

    GET /                 the page, and its files below /static/
    GET /api/runs         what there is
    GET /api/facets       ?run= &phase=
    GET /api/rollouts     ?run= &phase= [outcome kind task steps order text offset limit]
    GET /api/rollout      ?run= &phase= &id=
    GET /api/text         ?run= &phase= &id= &place= &start= &end=
    GET /api/tokens       ?run= &phase= &id= &place= &start= &end=
    GET /api/group        ?run= &phase= &group=
    GET /api/attempts     ?task=
    GET /api/picture      ?run= &sha256=  the file
    GET /api/changes      ?a=RUN &a_phase= &a_id= &b= &b_phase= &b_id=
    GET /overview         ?run=  or for all of them: HTML without scripts

Everything but the page itself needs the key, which the printed address carries behind its `#`,
where no log sees it: other users of this machine reach its ports, too. On this machine's own
address the request must also be for that address: another web page's name that was made to lead
here is refused.
The page's policy lets it run its own files alone, and never lets text become markup.
Left out: TLS (put a proxy in front).
"""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from nanoinfer.http.api_error import ApiError
from nanoinfer.http.callers import check_host, check_key
from nanoinfer.http.connection import server_config
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.http.listening import is_loopback, listen, url_of
from nanoinfer.http.page_headers import page_headers
from nanoinfer.http.serving import ProgramServer
from nanorl.inspection.viewer.overview import comparison_html, overview_html
from nanorl.inspection.viewer.pages import (
    RolloutPlace,
    attempts,
    changes,
    facets,
    group_page,
    list_page,
    run_page,
)
from nanorl.inspection.viewer.runs import ViewedRun
from nanorl.inspection.viewer.stored import Selection
from nanorl.observability.store import StoreError

HEADERS = page_headers(script="'self'", style="'self'", images="data: blob:")
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
_CLOSE_S = 1
MOST_CONNECTIONS = 128
"""At a time; more are closed at once."""
Query = Mapping[str, str]


class ViewerServer:
    """Answers for some runs who has the `key`; if it `is_local`, under this machine's own names
    alone."""

    def __init__(self, runs: Mapping[str, ViewedRun], *, key: str, is_local: bool) -> None:
        self._runs = runs
        self._key, self._is_local = key, is_local
        self._files = _static_files()

    def starlette(self) -> Starlette:
        questions: dict[str, Callable[[Query], Any]] = {
            "/api/runs": lambda _: [run_page(run) for run in self._runs.values()],
            "/api/facets": lambda query: facets(self._run(query), query["phase"]),
            "/api/rollouts": self._rollouts,
            "/api/rollout": lambda query: self._place(query).document().build(),
            "/api/text": self._text,
            "/api/tokens": self._tokens,
            "/api/picture": self._picture,
            "/api/group": lambda q: group_page(self._run(q), q["phase"], q["group"]),
            "/api/attempts": lambda query: attempts(list(self._runs.values()), query["task"]),
            "/api/changes": self._changes,
            "/overview": self._overview,
        }
        routes = [Route("/", self._file), Route("/static/{name}", self._file)]
        routes += [Route(path, self._answered(answer)) for path, answer in questions.items()]
        return Starlette(routes=routes)

    def _answered(self, answer: Callable[[Query], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                self._check(request)
                found = await run_in_threadpool(answer, request.query_params)
            except ApiError as error:
                return _json({"error": error.message}, error.status)
            except KeyError as error:
                return _json({"error": f"not there: {error.args[0]}"}, 404)
            except (ValueError, StoreError) as error:
                return _json({"error": str(error)}, 400)
            if isinstance(found, Response):
                return found
            return HTMLResponse(found, headers=HEADERS) if isinstance(found, str) else _json(found)

        return endpoint

    def _check(self, request: Request) -> None:
        if self._is_local:
            check_host(request)
        told = "wrong or missing key: open the address that was printed"
        check_key(request, [self._key], told)

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "page.html")
        if name not in self._files:
            return _json({"error": f"no file {name!r}"}, 404)
        kind = _TYPES[name[name.rindex(".") :]]
        return Response(self._files[name], media_type=kind, headers=HEADERS)

    # -- questions -------------------------------------------------------------------------------

    def _run(self, query: Query, name: str = "run") -> ViewedRun:
        return self._runs[query[name]]

    def _place(self, query: Query) -> RolloutPlace:
        return RolloutPlace(run=self._run(query), phase=query["phase"], rollout_id=query["id"])

    def _rollouts(self, query: Query) -> Any:
        run, phase = self._run(query), query["phase"]
        options: dict[str, Any] = {
            name: query[name]
            for name in ("outcome", "kind", "task", "slice", "order")
            if name in query
        }
        options |= {name: _number(query, name) for name in ("offset", "limit") if name in query}
        if query.get("steps"):
            options["steps"] = _steps(query["steps"])
        selection: Selection = run.selection(phase, **options)
        return list_page(run, selection, phase, query.get("text", ""))

    def _text(self, query: Query) -> Any:
        place, start, end = (_number(query, name) for name in ("place", "start", "end"))
        return self._place(query).document().text_part(place, start, end)

    def _tokens(self, query: Query) -> Any:
        place, start, end = (_number(query, name) for name in ("place", "start", "end"))
        return self._place(query).tokens(place, start, end)

    def _picture(self, query: Query) -> Response:
        pictures = self._run(query).pictures
        if pictures is None:
            raise KeyError(f"a picture: the model of {query['run']} reads text alone")
        from nanoengine.vision.picture_files import media_type  # here: few runs have pictures

        data = pictures.data(query["sha256"])
        return Response(data, media_type=media_type(data), headers=HEADERS)

    def _changes(self, query: Query) -> Any:
        old, new = (
            RolloutPlace(
                run=self._run(query, side),
                phase=query[f"{side}_phase"],
                rollout_id=query[f"{side}_id"],
            )
            for side in ("a", "b")
        )
        return changes(old, new)

    def _overview(self, query: Query) -> str:
        if "run" in query:
            return overview_html(self._run(query))
        return comparison_html(list(self._runs.values()))


def serve_viewer(
    runs: Mapping[str, ViewedRun], *, host: str, port: int, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. `say` is told the address, once connections are taken and the
    signals are answered. ValueError for an address that cannot be had."""
    listener = listen(host, port)
    key = secrets.token_urlsafe(24)
    config = server_config(
        ViewerServer(runs, key=key, is_local=is_loopback(host)).starlette(),
        HttpLimits(max_connections=MOST_CONNECTIONS),
        log_level="error",
        close_s=_CLOSE_S,
    )
    address = f"{url_of(listener, host)}/#key={key}"
    try:
        ProgramServer(config, lambda _: say(address)).run(sockets=[listener])
    except KeyboardInterrupt:  # uvicorn raises again what it was stopped with
        pass
    finally:
        listener.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _static_files() -> dict[str, bytes]:
    """The files of the page, and the style sheet that it shares with report.html."""
    found = {
        one.name: one.read_bytes()
        for one in (files("nanorl.inspection.viewer") / "static").iterdir()
    }
    report = files("nanorl.observability.report") / "style.css"
    return {**found, "report.css": report.read_bytes()}


def _number(query: Query, name: str) -> int:
    try:
        return int(query[name])
    except ValueError:
        raise ValueError(f"{name}={query[name]}: is not a whole number") from None


def _steps(given: str) -> tuple[int, int]:
    """`12`, `3-8`, `3-` or `-8`."""
    first, dash, last = given.partition("-")
    try:
        low = int(first or 0)
        return low, int(last or 2**62) if dash else low
    except ValueError:
        raise ValueError(f"steps {given!r}: give one step, 12, or a range, 3-8") from None


def _json(data: Any, status: int = 200) -> Response:
    """ASCII alone: half of a character, which UTF-8 does not have, travels as an escape."""
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return Response(content, status, media_type="application/json", headers=HEADERS)
