"""scripts/bare_env.sh: CI runs with what a stranger's shell has and the way to the network."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STRANGER = {"PATH": "/usr/bin:/bin", "HOME": "/nowhere", "TERM": "dumb"}
NETWORK = {
    "https_proxy": "http://proxy:1",
    "NO_PROXY": "localhost",
    "SSL_CERT_FILE": "/a.pem",
    "REQUESTS_CA_BUNDLE": "/b c.pem",
    "PIP_INDEX_URL": "https://index/simple",
    "NANORL_TORCH_INDEX": "/wheels",
}
SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": "/elsewhere",
    "OMP_NUM_THREADS": "1",
    "TMPDIR": "/var/tmp",
    "HF_HUB_OFFLINE": "1",
    "MY_PIP_INDEX_URL": "x",
    "XPATH": "x",
    "LANG": "de_DE.UTF-8",
    "BASH_FUNC_pip%%": "() { :; }",
}


def test_nothing_is_left_but_paths_and_the_way_to_the_network() -> None:
    done = subprocess.run(
        ["bash", "-c", "source scripts/bare_env.sh; exec_bare env -0"],
        cwd=ROOT,
        env=STRANGER | NETWORK | SETTINGS,
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert found == STRANGER | NETWORK


def test_ci_enters_that_environment_before_anything_else() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    [bare] = [
        i for i, one in enumerate(commands) if one.startswith("exec_bare bash .ci/run --bare")
    ]
    assert bare <= 4, "set -euo pipefail, cd, if, source"
    assert not any(one.startswith("part ") for one in commands[:bare])
