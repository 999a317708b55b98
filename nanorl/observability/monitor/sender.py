"""Messages to apprise addresses (e-mail, chat rooms, pagers, HTTP), beside the run.

A message has a thread of its own for each address, a daemon, and a time limit. A service that is
slow or away costs the run nothing and cannot keep it from ending; the first failure of an address
is said in the run's log. The text names an address without its password.
Needs the package apprise, of the extra `alerts`. Left out: repeating what was not delivered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanoengine.extras import missing
from nanorl.observability.monitor.alerts import Alert

LIMIT_S = 20.0
_MOST_UNDER_WAY = 8  # of one address; more are dropped, and that is a failure too


class AlertSender:
    """Sends to every address. One event loop only; `limit_s` is for one message."""

    def __init__(
        self,
        addresses: Sequence[str],
        run_name: str,
        *,
        say: Callable[[str], None],
        limit_s: float = LIMIT_S,
    ) -> None:
        """`ValueError` for an address that apprise does not know, or without apprise."""
        self._targets = [Target(address) for address in _read_files(addresses)]
        self._run_name = run_name
        self._say = say
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, alert: Alert) -> None:
        """Start sending and return at once."""
        for target in self._targets:
            task = asyncio.create_task(self._deliver(target, alert))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for what is under way, within its time limit."""
        await asyncio.gather(*self._tasks)

    async def _deliver(self, target: Target, alert: Alert) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                failure = await target.send(f"{self._run_name}: {alert.title}", alert)
        except TimeoutError:
            failure = f"no answer within {self._limit_s:g} s"
        if failure and not target.has_failed:
            target.has_failed = True
            self._say(
                f"an alert did not reach {target.shown} ({failure}): {alert.title}. The run goes "
                "on, and further failures of this address are not said"
            )


class Target:
    """One address."""

    def __init__(self, address: str) -> None:
        try:
            import apprise  # here: an extra
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            raise missing("--monitor.alerts", package, extra="alerts") from None
        # It works in the thread that calls it: a pool of its own, which it takes for several
        # addresses or for a time limit, has threads that hold the process until they are answered.
        asset = apprise.AppriseAsset(app_id="nanorl", async_mode=False, service_timeout=0)
        self._client = apprise.Apprise(asset=asset)
        if not self._client.add(address):
            raise ValueError(
                f"--monitor.alerts {address.split('://')[0]}://...: apprise does not understand "
                "this address; https://appriseit.com lists the services and how they are written"
            )
        self.shown = self._client[0].url(privacy=True).split("?")[0]
        self.has_failed = False
        self._num_under_way = 0

    async def send(self, title: str, alert: Alert) -> str:
        """Wait for one message; why it failed, "" if it did not."""
        if self._num_under_way >= _MOST_UNDER_WAY:
            return f"{self._num_under_way} messages before it are not answered"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def settle(failure: str) -> None:
            self._num_under_way -= 1
            if not answer.done():  # it may have taken too long
                answer.set_result(failure)

        def work() -> None:
            failure = self._notify(title, alert)
            try:
                loop.call_soon_threadsafe(settle, failure)
            except RuntimeError:  # the loop is closed: the run ended meanwhile
                return

        try:
            threading.Thread(target=work, name="nanorl-alert", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            return str(error)
        self._num_under_way += 1
        return await answer

    def _notify(self, title: str, alert: Alert) -> str:
        kind: Any = "failure" if alert.is_problem else "success"
        try:
            is_sent = self._client.notify(body=alert.text, title=title, notify_type=kind)
        except Exception as error:  # of a plug-in that we do not know; the caller records it
            return f"{type(error).__name__}: {error}"
        return "" if is_sent else "the service refused it or cannot be reached"


def _read_files(addresses: Sequence[str]) -> list[str]:
    """Addresses as they are, and those of files: one on each line, # begins a comment."""
    found: list[str] = []
    for address in addresses:
        if "://" in address:
            found.append(address)
            continue
        try:
            lines = Path(address).expanduser().read_text("utf-8").splitlines()
        except OSError as error:
            raise ValueError(
                f"--monitor.alerts {address}: neither an address (scheme://...) nor a file that "
                f"can be read ({error.strerror})"
            ) from None
        found += [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
    return found
