"""Which events of a run are worth a message, and when they are over.

    a role died or was restarted       over when it is ready again
    nothing was finished for N minutes over when something is
    a number of a step is not finite   over when all of a step's are
    success collapsed                  over when its mean is back at three quarters of the best
    the run ended with an error, or begins again after one (nanorl/run/restarts.py)

An event is told once when it begins and once when it is over. One that comes back within
`QUIET_S` of the last message about it stays silent: it is told after that time if it lasts, and
counted in the next message if it does not, so a role that crashes every minute gives six messages
an hour. Pure rules: who sends them is sender.py.
Left out: a driver whose event loop hangs, in which these rules run too; Prometheus' own alerts
(`up == 0`) are for that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nanorl.observability.monitor.monitor_control import RoleStatus
from nanorl.options.monitor_config import MonitorConfig

QUIET_S = 600.0
_LEAST_BEST = 0.1  # a best success below it is too close to noise to collapse
_COLLAPSED, _RECOVERED = 0.5, 0.75  # of the best; the gap keeps a success in between from flapping


@dataclass(frozen=True, kw_only=True)
class Alert:
    """A message to people. `is_problem` is False where what was wrong is over."""

    title: str
    text: str
    is_problem: bool = True


@dataclass(kw_only=True)
class Incident:
    """One thing that can be wrong. Times are of the caller's clock, in seconds."""

    begun_s: float | None = None  # None: all is well
    alert: Alert | None = None
    is_told: bool = False
    told_s: float = -math.inf  # when people last heard that it is wrong
    num_silent: int = 0  # how often it came and went unsaid since then


class Incidents:
    """Turns what is wrong now into messages at the right times."""

    def __init__(self) -> None:
        self._all: dict[str, Incident] = {}

    def begin(self, key: str, now_s: float, alert: Alert) -> list[Alert]:
        """`key` is wrong. Nothing if that was known."""
        incident = self._all.setdefault(key, Incident())
        if incident.begun_s is not None:
            return []
        incident.begun_s, incident.alert = now_s, alert
        return self._tell(incident, now_s)

    def end(self, key: str, now_s: float, text: str) -> list[Alert]:
        """`key` is well again. Nothing if nobody heard that it was not."""
        incident = self._all.get(key)
        if incident is None or incident.begun_s is None:
            return []
        lasted_s, incident.begun_s = now_s - incident.begun_s, None
        if not incident.is_told:
            incident.num_silent += 1
            return []
        incident.is_told = False
        return [Alert(title=text, text=f"After {_duration(lasted_s)}.", is_problem=False)]

    def overdue(self, now_s: float) -> list[Alert]:
        """Tell of the incidents that began silently and have lasted."""
        waiting = (one for one in self._all.values() if one.begun_s is not None and not one.is_told)
        return [alert for incident in waiting for alert in self._tell(incident, now_s)]

    def _tell(self, incident: Incident, now_s: float) -> list[Alert]:
        assert incident.alert is not None, "it has begun"
        if now_s - incident.told_s < QUIET_S:
            return []
        text = incident.alert.text
        if incident.num_silent:
            text += f" It came and went {incident.num_silent} more times since the last message."
        incident.is_told, incident.told_s, incident.num_silent = True, now_s, 0
        return [Alert(title=incident.alert.title, text=text)]


class SuccessWatch:
    """Says whether success has collapsed.

    The best is the highest mean over `num_steps` consecutive steps so far. Success has collapsed
    when each of the last `num_steps` steps lies below half of the best, if that is at least 0.1,
    and is back when their mean reaches three quarters of it. One bad step is therefore no collapse,
    and neither is a run that never got anywhere.
    """

    def __init__(self, num_steps: int) -> None:
        self._last: deque[float] = deque(maxlen=num_steps)
        self.best = 0.0
        self.is_collapsed = False

    @property
    def mean(self) -> float:
        return sum(self._last) / max(len(self._last), 1)

    def update(self, success: float) -> None:
        self._last.append(success)
        if len(self._last) < (self._last.maxlen or 0):
            return
        self.best = max(self.best, self.mean)
        if self.is_collapsed:
            self.is_collapsed = self.mean < _RECOVERED * self.best
        elif self.best >= _LEAST_BEST:
            self.is_collapsed = max(self._last) < _COLLAPSED * self.best


class AlertRules:
    """The rules over one run. Every method returns the messages to send now."""

    def __init__(self, config: MonitorConfig, success_so_far: Sequence[float] = ()) -> None:
        """`success_so_far` is that of the steps before a resumption."""
        self._stall_s = 60.0 * config.stall_minutes
        self._incidents = Incidents()
        self._success = SuccessWatch(config.collapse_steps)
        self._restarts: dict[str, int] = {}
        for success in success_so_far:
            self._success.update(success)

    def observe_roles(self, roles: Sequence[RoleStatus], now_s: float) -> list[Alert]:
        """Take in how the roles are now, and return the alerts that follow. A role that is no
        longer listed was removed on purpose."""
        return [alert for role in roles for alert in self._of_role(role, now_s)]

    def _of_role(self, role: RoleStatus, now_s: float) -> Iterator[Alert]:
        key = f"role {role.name}"
        was_restarted = role.restarts > self._restarts.get(role.name, 0)
        self._restarts[role.name] = role.restarts
        if role.state == "dead" or was_restarted:
            what = "died" if role.state == "dead" else "was restarted"
            times = f"{role.restarts} restart{'s' * (role.restarts != 1)} so far"
            process = "" if role.pid is None else f" (process {role.pid})"
            where = f"The {role.kind} on {role.host}{process} is {role.state}; {times}."
            yield from self._incidents.begin(
                key, now_s, Alert(title=f"{role.name} {what}", text=where)
            )
        elif role.state == "ready":
            yield from self._incidents.end(key, now_s, f"{role.name} is ready again")

    def observe_quiet(self, quiet_s: float, phase: str, now_s: float) -> list[Alert]:
        """Nothing was finished for `quiet_s` seconds."""
        if quiet_s < self._stall_s:
            begun = self._incidents.end("stall", now_s, f"the run goes on ({phase})")
        else:
            title = f"nothing finished for {_duration(quiet_s)}"
            text = f"The run is in the phase {phase}."
            begun = self._incidents.begin("stall", now_s, Alert(title=title, text=text))
        return begun + self._incidents.overdue(now_s)

    def observe_step(self, step: int, metrics: Mapping[str, float], now_s: float) -> list[Alert]:
        """The numbers of a finished step, NaN included."""
        broken = [
            f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)
        ]
        if broken:
            alert = Alert(title=f"step {step} is not finite", text=f"{', '.join(broken)}.")
            found = self._incidents.begin("finite", now_s, alert)
        else:
            found = self._incidents.end("finite", now_s, f"step {step} is finite again")
        success = metrics.get("success", math.nan)
        return found + (self._of_success(step, success, now_s) if math.isfinite(success) else [])

    def _of_success(self, step: int, success: float, now_s: float) -> list[Alert]:
        watch = self._success
        watch.update(success)
        numbers = f"{watch.mean:.1%} on average, {watch.best:.1%} at best"
        if not watch.is_collapsed:
            return self._incidents.end("success", now_s, f"success is back ({numbers})")
        title = f"success collapsed at step {step}"
        text = f"It is {success:.1%}, {numbers}."
        return self._incidents.begin("success", now_s, Alert(title=title, text=text))

    def end_with(self, error: BaseException, *, goes_on: bool = False) -> list[Alert]:
        """The run has ended with `error`, or begins again by itself."""
        text = f"{type(error).__name__}: {error}"[:2000]
        again = "the run failed and begins again from its newest checkpoint"
        return [Alert(title=again if goes_on else "the run ended with an error", text=text)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
