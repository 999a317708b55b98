"""The options of the monitor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanorl.bounds import COUNT, NATURAL, Bound, check_record


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Watch the run from outside, and be told when something is wrong. All of it is off by
    default."""

    port: int | None = None
    """Serve Prometheus' /metrics, /status and the control verbs on this port; 0: any free one.
    The run writes the real one, and the token that all of them need, to monitor.json."""
    host: str = "127.0.0.1"
    """Address to listen on; the default is this machine alone."""
    api_key_file: Path | None = None
    """File with a key that reads /metrics and /status and does nothing else, such as the
    credentials_file of Prometheus; without one the token of monitor.json alone does."""
    alerts: tuple[str, ...] = ()
    """Where alerts go: apprise addresses, or files with one on each line. Use a file for addresses
    that hold a password: options are recorded in config.json and in the report."""
    stall_minutes: float = 30.0
    """Alert when nothing was finished for so long: no step, no evaluated task."""
    collapse_steps: int = 5
    """Alert when each of so many steps has less than half of the best success, which is a mean
    over as many steps."""

    restarts: int = 10
    """So often the run may begin again by itself, from its newest checkpoint, where processes of
    it died and new ones did not help; 0: never. It ends where it fails three times at one step,
    and at once where a restart would not help: a wrong option, a full disk, Ctrl-C."""

    def __post_init__(self) -> None:
        check_record(
            self,
            "monitor.",
            port=Bound(0, 65535, "the highest port"),
            stall_minutes=Bound(0, 1e6, is_open=True),
            collapse_steps=COUNT,
            restarts=NATURAL,
        )
        for name in ("host", "api_key_file"):
            value = getattr(self, name)
            if self.port is None and value != getattr(type(self), name):
                raise ValueError(
                    f"--monitor.{name.replace('_', '-')} {value}: nothing listens without "
                    "--monitor.port; give a port, 0 for any free one"
                )
