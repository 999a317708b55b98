"""`nanorl status` and `nanorl scale`: look at a run that goes on; change how many replicas it has.

    nanorl status --run runs/tiny-seed0
    nanorl scale --run runs/tiny-seed0 --replicas 3

The run must have been started with --monitor.port; its folder says where it listens
(monitor_access.py).
"""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich.console import Console

from nanoengine.command_line import program
from nanoinfer.http.http_client import HttpClient, HttpReply, NoReplyError
from nanorl.observability.monitor.monitor_access import MonitorAccess
from nanorl.observability.monitor.monitor_control import RoleStatus
from nanorl.observability.report.live import roles_table

_STATUS_LIMIT_S = 10.0


def status(*, run: Path, as_json: bool = False) -> None:
    """Show what a run does and how its roles are.

    Args:
        run: The run's folder.
        as_json: Print what the run answers, for programs.
    """
    answer = _request(run, "GET", "/status", limit_s=_STATUS_LIMIT_S)
    print(json.dumps(answer, indent=2)) if as_json else _show(answer)


def scale(
    *,
    run: Path,
    replicas: int | None = None,
    add: str | None = None,
    remove: str | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Start replicas, or drain and remove them, while the run goes on. Give one of the first three.

    Args:
        run: The run's folder.
        replicas: How many replicas the run itself should have.
        add: Address of a nanoinfer.server that is running, http://HOST:PORT.
        remove: Name of a replica to drain and let go.
        timeout_s: How long to wait for it. The run goes on with it afterwards, too.
    """
    given = [name for name in (replicas, add, remove) if name is not None]
    if len(given) != 1:
        raise ValueError("scale: give one of --replicas, --add and --remove")
    if replicas is not None:
        answer = _request(run, "POST", "/scale", {"replicas": replicas}, limit_s=timeout_s)
    elif add is not None:
        answer = _request(run, "POST", "/replicas", {"address": add}, limit_s=timeout_s)
    else:
        path = f"/replicas/{quote(remove or '', safe='')}"
        answer = _request(run, "DELETE", path, limit_s=timeout_s)
    _show(answer)


def _request(
    run: Path, method: str, path: str, body: dict[str, Any] | None = None, *, limit_s: float
) -> dict[str, Any]:
    """The run's answer. `ValueError` with its message if it refuses, or is not there."""
    access = MonitorAccess.read(run)
    client = HttpClient(access.url, access.token, limit_s)
    try:
        reply = client.ask_now(method, path, None if body is None else json.dumps(body).encode())
    except TimeoutError:
        raise ValueError(
            f"{access.url} did not answer within {limit_s:g} s; what it was asked goes on, see "
            f"{program()} status --run {run}"
        ) from None
    except NoReplyError as error:
        raise ValueError(
            f"{access.url} does not answer ({error}): the run of {run} has ended without "
            "removing monitor.json, or lies on a machine that this one cannot reach"
        ) from None
    if reply.status != HTTPStatus.OK:
        raise ValueError(_message(reply, access.url + path))
    answer: dict[str, Any] = json.loads(reply.body)
    return answer


def _message(reply: HttpReply, url: str) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{url} answered {reply.status} {reply.reason}; is that the run's monitor?"


def _show(answer: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False)
    step = "no step yet" if answer["step"] is None else f"step {answer['step']} is done"
    console.print(
        f"{answer['run']}: phase {answer['phase']}, {step}, "
        f"{answer['quiet_s']:.0f} s since anything was finished",
        soft_wrap=True,
    )
    roles = [RoleStatus(**role) for role in answer["roles"]]
    if roles:
        console.print(roles_table(roles))
    else:
        console.print("one process, no roles apart from it")
