"""A whole run with its monitor on: it can be scraped while it trains, and tells how it ended."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.error import URLError

import pytest
from forked_runs import LIMIT_S, SMALL, RunProcess
from monitor_doubles import ask
from paced_run import Pace
from prometheus_client.parser import text_string_to_metric_families
from test_monitor_alerts import receiver

from nanorl.observability.monitor.monitor_access import MonitorAccess

pytestmark = pytest.mark.sandbox


NUM_STEPS = 20


def scraped(process: RunProcess, folder: Path, pace: Pace) -> list[dict[str, float]]:
    """The pages of /metrics while the run goes on: name -> value, `phase:NAME` for a phase. It
    waits after its first step until somebody has read of that."""
    pages = []
    deadline = time.monotonic() + LIMIT_S
    while process.process.is_alive():
        assert time.monotonic() < deadline, process.output()
        try:
            access = MonitorAccess.read(folder)
            answer = asyncio.run(ask(f"{access.url}/metrics", token=access.token))
        except (ValueError, URLError, ConnectionError):  # it has not begun, or is ending
            time.sleep(0.02)
            continue
        assert answer.status == 200, answer.body
        found = {}
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                label = sample.labels.get("phase")
                found[f"phase:{label}" if label else sample.name] = sample.value
        pages.append(found)
        if "nanorl_step" in found:
            pace.allow(NUM_STEPS)
        time.sleep(0.1)
    return pages


def test_a_run_is_scraped_while_it_trains_and_its_alerts_reach_people(tmp_path: Path) -> None:
    run, pace = tmp_path / "run", Pace(tmp_path / "pace")
    pace.allow(1)
    with receiver() as people:
        process = RunProcess(
            tmp_path / "log",
            *(*SMALL, "--rl.steps", str(NUM_STEPS), "--out", str(run), "--monitor.port", "0"),
            # So short a time is over whenever somebody looks.
            *("--monitor.alerts", people.address, "--monitor.stall-minutes", "1e-9"),
            prepare=pace.keep,
        )
        pages = scraped(process, run, pace)
        assert process.wait() == 0, process.output()
    assert people.titles()[0].startswith("run: nothing finished for "), process.output()
    assert not (run / "monitor.json").exists()
    assert "monitor: http://127.0.0.1:" in process.output()
    assert "phase:reinforcement learning" in set().union(*pages)
    last = next(page for page in reversed(pages) if "nanorl_step" in page)
    assert last["nanorl_steps_total"] >= 1
    assert last["nanorl_policy_version"] == last["nanorl_step"] + 1
    assert last["nanorl_train_logp_gap_max"] == 0
    assert last["nanorl_token_staleness_count"] > 0
