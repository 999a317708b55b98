"""Runs model-written Python behind real walls. Start with pool.py; base.py has the nouns."""

from nanorl.sandbox.base import (
    Capabilities,
    ExecResult,
    ExecStatus,
    Sandbox,
    SandboxFailure,
    SandboxSpec,
    SandboxUnavailable,
)
from nanorl.sandbox.pool import SandboxPool

__all__ = [
    "Capabilities",
    "ExecResult",
    "ExecStatus",
    "Sandbox",
    "SandboxFailure",
    "SandboxPool",
    "SandboxSpec",
    "SandboxUnavailable",
]
