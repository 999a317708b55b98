"""`--log otel`: the spans of a real run, received over OTLP and decoded; no collector at all."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from forked_runs import SMALL, RunProcess, rows
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nanorl.agents.context import TurnTimes
from nanorl.agents.times import RolloutTimes
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.observability.report.observer import PhaseBegun
from nanorl.observability.store import RolloutStore
from nanorl.observability.telemetry import (
    SPAN_BYTES,
    TRACE_BYTES,
    id_of,
    nanoseconds,
    new_span_id,
)
from nanorl.observability.trackers.run_spans import RunSpans
from nanorl.options.run_config import RunConfig

pytest.importorskip("opentelemetry.sdk", reason="needs the extra `otel`")


DIGEST = "72921d0de8a1b5f90dbcee1695edb0e1e14caab4f6e945532479720aef375668"
NOWHERE = "http://127.0.0.1:9"  # the port "discard", where nothing listens


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        super().__init__(("127.0.0.1", 0), _Receiver)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Receiver(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        request = ExportTraceServiceRequest.FromString(data)
        for resource in request.resource_spans:
            self.server.services |= {one.value.string_value for one in resource.resource.attributes}
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def begun(title: str) -> PhaseBegun:
    return PhaseBegun(phase="rl", title=title, total=1)


@pytest.mark.sandbox
def test_a_run_is_one_tree_of_spans_with_the_times_of_its_metrics(
    tmp_path: Path, collector: Collector
) -> None:
    out = tmp_path / "run"
    process = RunProcess(
        tmp_path / "log", *SMALL, "--rl.steps", "2", "--log", "otel", "--out", str(out),
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address},
    )  # fmt: skip
    assert process.wait(300) == 0, process.output()
    assert "not everything reached it" not in process.output()
    spans = {span.span_id: span for span in collector.spans}
    assert len(spans) == len(collector.spans) and "nanorl" in collector.services
    assert len({span.trace_id for span in collector.spans}) == 1

    def path(span: Any) -> list[str]:
        above = path(spans[span.parent_span_id]) if span.parent_span_id else []
        return [*above, span.name]

    paths = {span_id: path(span) for span_id, span in spans.items()}
    found = {" > ".join(one) for one in paths.values()}
    rl = "run > reinforcement learning"
    for step in range(2):
        assert found >= {f"{rl} > step {step} > {one}" for one in ("rollouts", "train", "sync")}
    assert {f"run > warm start > step {step}" for step in range(3)} <= found
    assert "run > evaluation, after RL > invoke_agent tiny > chat tiny" in found, sorted(found)

    with RolloutStore(out / "rollouts.sqlite") as store:
        stored = {entry.rollout_id: store.get(entry.rollout_id) for entry in store.entries()}
    agents = [
        span
        for span_id, span in spans.items()
        if span.name.startswith("invoke_agent") and "reinforcement learning" in paths[span_id]
    ]
    assert {attributes(one)["gen_ai.conversation.id"] for one in agents} == stored.keys()
    for agent in agents:
        about = attributes(agent)
        assert about["nanorl.timing"] == "measured"
        inner = [one for one in collector.spans if one.parent_span_id == agent.span_id]
        turns = [one for one in inner if one.name.startswith("chat ")]
        assert len(turns) == stored[about["gen_ai.conversation.id"]].num_turns
        for one in inner:
            assert agent.start_time_unix_nano <= one.start_time_unix_nano
            assert one.start_time_unix_nano <= one.end_time_unix_nano <= agent.end_time_unix_nano
    for row in rows(out):
        named = [one for one in collector.spans if one.name == f"step {row['step']}"]
        [step] = [one for one in named if "nanorl.reward" in attributes(one)]
        assert attributes(step)["nanorl.reward"] == row["reward"]
        parts = {one.name: one for one in collector.spans if one.parent_span_id == step.span_id}
        for name, key in (("rollouts", "wait_s"), ("train", "train_s"), ("sync", "sync_s")):
            seconds = (parts[name].end_time_unix_nano - parts[name].start_time_unix_nano) / 1e9
            assert seconds == pytest.approx(row[key], abs=1e-6)


def test_a_collector_that_is_away_is_said_once_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", NOWHERE)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    config = RunConfig(preset="tiny", out=tmp_path, log=("otel",))
    folder = build_tiny_model(tmp_path / "model", seed=0)
    said: list[str] = []
    seconds: list[float] = []

    async def run() -> None:
        async with RunSpans(config, folder, say=said.append) as spans:
            for step in range(50):
                begin = time.perf_counter()
                await spans.on_phase(begun("reinforcement learning"))
                spans.rl_step(step, {"train_s": 0.1})
                await spans.on_phase_end("reinforcement learning", is_whole=True)
                seconds.append(time.perf_counter() - begin)

    asyncio.run(run())
    assert len(said) == 1 and "--log otel: not everything reached it" in said[0]
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in said[0]
    assert median(seconds) < 0.5  # it would be seconds for each; of one, the machine may take them


def test_without_otel_nothing_is_started_or_written(tmp_path: Path) -> None:
    async def run() -> None:
        config = RunConfig(preset="tiny", out=tmp_path)
        async with RunSpans(config, tmp_path, say=print) as spans:
            await spans.on_phase(begun("warm start"))
            await spans.on_warm_step(0, {"loss": 1.0})
            await spans.on_phase_end("warm start", is_whole=True)
            times = RolloutTimes(
                start_ns=0, end_ns=1, sequences=[[TurnTimes(start_ns=0, end_ns=1)]]
            )
            spans.rollouts([], {"r": [times]}, step=0, phase="rl")

    asyncio.run(run())
    assert not list(tmp_path.iterdir())


def test_ids_follow_from_names_and_seconds_become_nanoseconds() -> None:
    """The digest as `printf 'nanorl run a' | sha256sum` gives it."""
    sha256 = int(DIGEST, 16)
    assert id_of("nanorl run a", TRACE_BYTES) == sha256 >> 8 * 16
    assert id_of("nanorl run a", SPAN_BYTES) == sha256 >> 8 * 24
    assert all(0 < new_span_id() < 2**63 for _ in range(100))
    assert nanoseconds(1.5) == 1_500_000_000
