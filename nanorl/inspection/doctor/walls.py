"""Whether one sandbox holds on this machine, tried in a process of its own.

    python -m nanorl.inspection.doctor.walls bwrap        # prints JSON

The sandbox opens only if its canary, a program that looks for ways out, saw nothing but walls; then
one more program has to give the right answer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.base import SandboxFailure, SandboxSpec, SandboxUnavailable

_PROGRAM, _ANSWER = "print(6 * 7)", b"42"
_LIMIT_S = 10.0


def try_sandbox(name: str) -> dict[str, Any]:
    """`holds`, and `reason` and `remedy` where it does not."""
    try:
        sandbox = open_sandbox(name, SandboxSpec(timeout_s=_LIMIT_S))
    except SandboxUnavailable as refusal:
        return {"holds": False, "reason": refusal.reason, "remedy": refusal.remedy}
    try:
        result = sandbox.run_sync(_PROGRAM)
    except SandboxFailure as failure:
        return {"holds": False, "reason": str(failure), "remedy": ""}
    finally:
        sandbox.close()
    if result.stdout.strip() != _ANSWER:
        reason = f"a program that prints 42 ended with {result.status} and {result.stdout!r}"
        return {"holds": False, "reason": reason, "remedy": ""}
    return {"holds": True, "reason": "", "remedy": ""}


if __name__ == "__main__":
    print(json.dumps(try_sandbox(sys.argv[1])))
