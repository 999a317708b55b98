"""Another user of the machine at the meetings of a run: refused, and the run goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import split_replica_cases as cases
from forked_runs import SMALL, RunProcess
from paced_run import Pace
from pool import PRELOAD
from strangers import (
    Stranger,
    haunt,
    haunted,
    join_as_rank_0,
    join_with_another_secret,
    listening_ports,
    whoami,
)
from tiny_text import save_folder

from nanoengine.parallel.rendezvous import open_store

NUM_MEETINGS = 4  # at least: the stores of trainer and replica, and gloo's listeners
SPLIT = ("--cluster.backend", "local", "--rollout.tp", "2", "--learner.tp", "2")


def test_a_follower_obeys_nobody_but_its_leader(tmp_path: Path) -> None:
    """It waits for rank 0 while another user, who knows all but the secret, comes as rank 0 and
    would make a folder by a pickle. Then its leader comes, and both do their work."""
    save_folder(tmp_path)
    marker = tmp_path / "taken"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store, meeting = open_store()
    with Stranger() as stranger, ProcessPoolExecutor(2, mp_context=context) as processes:
        assert stranger.call(whoami) != 0
        follower = processes.submit(cases.follow, tmp_path, meeting)
        while not store.check(["r0/tp/0/0/1"]):
            assert not follower.done(), follower.result()
        assert "DistNetworkError" in stranger.call(join_as_rank_0, meeting.port, marker)
        assert "the secret is not the one of this meeting" in stranger.call(
            join_with_another_secret, meeting.port, marker
        )
        leader = processes.submit(cases.lead, tmp_path, meeting)
        assert len(leader.result(120)) == 5 and follower.result(120) == []
    assert not marker.exists()
    store.close()


@pytest.mark.slow
def test_a_run_of_split_roles_goes_on_while_another_user_is_at_all_its_meetings(
    tmp_path: Path,
) -> None:
    out, marker = tmp_path / "run", tmp_path / "taken"
    seen: set[int] = set()
    pace = Pace(tmp_path / "pace")
    pace.allow(1)
    with Stranger() as stranger:
        options = (*SMALL, *SPLIT, "--out", str(out))
        run = RunProcess(tmp_path / "log", *options, prepare=pace.keep)
        assert run.process.pid is not None
        while run.process.is_alive():
            for port in listening_ports(run.process.pid) - seen:
                seen.add(port)
                stranger.call(haunt, port, marker)
            if len(seen) >= NUM_MEETINGS:
                pace.allow(3)
            time.sleep(0.001)  # or this process takes the run's cores
        reached = stranger.call(haunted)
    assert run.wait() == 0, run.output()
    assert not marker.exists(), f"made by uid {marker.stat().st_uid}: {reached}"
    assert len(seen) >= NUM_MEETINGS
    said = [one for attempts in reached.values() for one in attempts]
    assert len(said) == 2 * len(seen)  # both ways, at each
    assert all(one.startswith("Dist") or "Error" in one for one in said), reached
    assert json.loads((out / "summary.json").read_text())["status"] == "finished"
    assert os.stat(out).st_uid == os.getuid()
