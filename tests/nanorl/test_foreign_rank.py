"""Another user of the machine at the meetings of a run: refused, and the run goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import strangers
from forked_runs import SMALL, RunProcess

SPLIT = ("--cluster.backend", "local", "--rollout.tp", "2", "--learner.tp", "2")


@pytest.mark.slow
def test_a_stranger_who_joins_as_rank_0_of_a_real_run_reaches_nothing(tmp_path: Path) -> None:
    out, marker = tmp_path / "run", tmp_path / "taken"
    with strangers.Stranger() as stranger:
        assert stranger.call(strangers.whoami) != 0 or os.getuid() != 0
        run = RunProcess(tmp_path / "log", *SMALL, *SPLIT, "--out", str(out))
        seen: set[int] = set()
        while run.process.is_alive():
            for port in strangers.listening_ports(run.process.pid) - seen:  # type: ignore[arg-type]
                seen.add(port)
                stranger.call(strangers.haunt, port, marker)
            time.sleep(0.002)
        reached = stranger.call(strangers.haunted)
    print(reached)
    assert not marker.exists(), f"made by uid {marker.stat().st_uid}: {reached}"
    assert run.wait() == 0, run.output()
    assert "said" not in reached.values()
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
