"""metrics.jsonl: every step once, through kills, resumes and full disks; TensorBoard agrees."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from nanorl.observability.report.metrics import MetricsWriter, read_metrics


def test_one_line_a_step_in_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(0, {"loss": float("nan"), "gap": float("inf"), "reward": 0.5, "note": "é"})
        writer.write(1, {"loss": torch.tensor(1.5), "n": np.int64(3), "time": {"a_s": [1, None]}})

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert rows == [
        {"step": 0, "loss": None, "gap": None, "reward": 0.5, "note": "é"},
        {"step": 1, "loss": 1.5, "n": 3, "time": {"a_s": [1, None]}},
    ]
    assert read_metrics(path) == rows
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_step_is_never_written_twice(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(5):
            writer.write(step, {"x": step})
        with pytest.raises(ValueError, match="step 3 follows step 4"):
            writer.write(3, {})
    with MetricsWriter(path) as writer:
        with pytest.raises(ValueError, match="step 4 follows step 4"):
            writer.write(4, {})
        assert writer.truncate_from(3) == 2
        writer.write(3, {"x": 30})
        assert writer.truncate_from(9) == 0
    assert [(row["step"], row["x"]) for row in read_metrics(path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 30),
    ]


def test_a_torn_last_line_is_dropped_and_other_damage_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "lo')
    assert read_metrics(path) == [{"step": 0}]
    with MetricsWriter(path) as writer:
        writer.write(1, {"loss": 2})
    assert read_metrics(path) == [{"step": 0}, {"step": 1, "loss": 2}]
    path.write_text('{"step": 0}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not a metrics row"):
        MetricsWriter(path)


def test_values_that_json_cannot_hold_are_refused(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        with pytest.raises(ValueError, match="of type object cannot be logged"):
            writer.write(0, {"x": object()})
        with pytest.raises(ValueError, match="'step' among the values"):
            writer.write(0, {"step": 3})
        writer.write(0, {"x": 1})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


WRITER = """
import sys
sys.path.insert(0, {root!r})
from nanorl.observability.report.metrics import MetricsWriter
writer = MetricsWriter({path!r})
print("ready", flush=True)
for step in range((writer.last_step or -1) + 1 if writer.last_step is not None else 0, 10**6):
    writer.write(step, {{"reward": 0.5, "text": "x" * 500}})
    print(step, flush=True)
"""


def run_writer(path, **popen):
    code = WRITER.format(root=os.getcwd(), path=str(path))
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen
    )


def test_kill_9_loses_no_acknowledged_step(tmp_path):
    path, rng = tmp_path / "metrics.jsonl", random.Random(1)
    for _ in range(5):
        writer = run_writer(path)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.1)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = [int(line) for line in writer.communicate()[0].split(b"\n")[:-1]]
        steps = [row["step"] for row in read_metrics(path)]
        assert steps == list(range(len(steps)))
        assert not acknowledged or acknowledged[-1] in steps


def identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_size


def test_a_step_is_on_the_disk_before_write_returns(tmp_path, monkeypatch):
    path, synced = tmp_path / "metrics.jsonl", []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(identity(os.fstat(fd))))
    with MetricsWriter(path) as writer:
        writer.write(0, {"x": 1})
        assert synced == [identity(path.stat())]
        writer.write(1, {"x": 1})
        assert synced[1:] == [identity(path.stat())]


def test_a_full_disk_is_one_clear_error_and_keeps_whole_lines(tmp_path):
    import resource

    path = tmp_path / "metrics.jsonl"
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # noqa: E731
    out, err = run_writer(path, preexec_fn=limit).communicate(timeout=60)
    last = err.decode().strip().splitlines()[-1]
    assert "cannot write the metrics of step" in last
    assert "--resume" in last
    assert str(path) in last
    assert path.read_bytes().endswith(b"}\n")
    acknowledged = [int(line) for line in out.split(b"\n")[1:-1]]
    assert [row["step"] for row in read_metrics(path)] == acknowledged


def test_tensorboard_holds_the_same_numbers_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read in the order of this number as text: a tenth file of the process
    # would come before its ninth, and other tests have opened some.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    folder = tmp_path / "tb"
    with MetricsWriter(tmp_path / "metrics.jsonl", tensorboard_dir=folder) as writer:
        for step in range(4):
            values = {"reward": step / 8, "note": "text", "loss": float("nan"), "time": {"a": 2}}
            writer.write(step, values)
        writer.truncate_from(2)
        writer.write(2, {"reward": 7.0})
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward", "time/a"]
    values = {event.step: event.value for event in events.Scalars("reward")}
    assert values == {0: 0.0, 1: 0.125, 2: 7.0}
