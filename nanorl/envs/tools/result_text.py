"""The text in which the policy reads how a program ended: its output, then the reason of a failure.

Left out: cutting long outputs, since only agents/tokens.py knows how many tokens they have.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nanorl.sandbox.base import ExecResult, ExecStatus

NO_OUTPUT = "(no output)"
KILLED: Mapping[ExecStatus, str] = MappingProxyType(
    {
        ExecStatus.TIMEOUT: "timed out",
        ExecStatus.OOM: "out of memory",
        ExecStatus.OUTPUT_LIMIT: "too much output",
        ExecStatus.SIGNAL: "killed",
    }
)
"""The words in which the model reads that its program did not come to its own end."""


def describe(result: ExecResult) -> str:
    """The text that the model reads: the output, then for a failure the reason in one line."""
    # Programs print any bytes; what is no text still has to be shown somehow.
    stdout = result.stdout.decode("utf-8", errors="replace").rstrip()
    return "\n".join(part for part in (stdout, _reason(result)) if part) or NO_OUTPUT


def last_error_line(stderr: str) -> str:
    """The line that names the error, after the number of the program's line that raised it."""
    lines = [line for line in stderr.rstrip().splitlines() if line.strip()]
    if not lines:
        return ""
    # The last place is the innermost frame: most often the line that a model can mend.
    places = [i for i, line in enumerate(lines) if line.lstrip().startswith("File ")]
    where = ""
    if places and (number := lines[places[-1]].partition(", line ")[2]):
        where = f"line {number.split(',')[0].strip()}: "
    return where + lines[-1].strip()


def _reason(result: ExecResult) -> str:
    if result.status is ExecStatus.OK:
        return ""
    if result.status is ExecStatus.ERROR:
        stderr = result.stderr.decode("utf-8", errors="replace")
        # A whole traceback costs more tokens than it tells.
        return last_error_line(stderr) or f"exit code {result.exit_code}"
    return KILLED[result.status]
