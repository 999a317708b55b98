"""`SpanProcess`: sends a run's spans to an OTLP/HTTP collector, in a process of its own.

The exporter keeps its usual settings: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_EXPORTER_OTLP_TIMEOUT and so on. What rollouts said is read here, beside the run.
Next: run_spans.py (what is sent), trajectories/otel.py (the spans of a rollout).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, TraceFlags

from nanorl.observability.telemetry import TRACE_BYTES, export, failed, id_of, own, resource
from nanorl.observability.trackers.span_record import PlayedRollouts, SpannedRun, SpanRecord
from nanorl.observability.trajectories.base import TrajectoryReader
from nanorl.observability.trajectories.otel import SpanMaker
from nanorl.observability.trajectories.run_parsers import agent_info, find_parsers
from nanorl.options.run_kind import run_tokenizer

PAUSE_S = 30.0
"""A collector that did not answer is left alone for so long: each try may take ten seconds."""
_SCOPE = InstrumentationScope(own("run"))
_REFUSED = (
    "the collector did not take the spans; OTEL_EXPORTER_OTLP_ENDPOINT says where it is, by "
    "default http://localhost:4318"
)


class SpanProcess:
    """An actor of a run, for as long as it goes on."""

    def __init__(self, run: SpannedRun) -> None:
        quiet = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # what an exporter logs would tear the run's display
            os.dup2(quiet, descriptor)
        os.close(quiet)
        self._exporter = OTLPSpanExporter()
        self._trace_id = id_of(f"nanorl run {run.identity}", TRACE_BYTES)
        agent = agent_info(run.config)
        self._resource = resource(agent.version)
        tokenizer = run_tokenizer(run.config, run.model_folder)
        parsers = find_parsers(run.config, tokenizer, lambda _: None, is_running=True)
        self._reader = TrajectoryReader(tokenizer, parsers)
        self._maker = SpanMaker(agent, run.identity)
        self._tried_last = -PAUSE_S

    def send(self, records: Sequence[SpanRecord]) -> None:
        """Send spans of the run itself. ConnectionError where the collector does not take them."""
        self._export([self._span(record) for record in records])

    def send_rollouts(self, played: PlayedRollouts) -> None:
        """Send the spans of rollouts, with their turns and calls."""
        parent = self._context(played.parent_id)
        for rollout in played.rollouts:
            trajectory = self._reader.read(rollout, step=played.step, phase=played.phase)
            times = played.times.get(rollout.rollout_id)
            self._export(self._maker.spans(trajectory, parent=parent, times=times))

    def finish(self) -> None:
        """Nothing waits here: what was sent has been taken, or never will be."""
        self._exporter.shutdown()

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        if time.monotonic() < self._tried_last + PAUSE_S:
            raise ConnectionError("the collector did not answer a moment ago")
        try:
            export(self._exporter, spans, _REFUSED)
        except ConnectionError:
            self._tried_last = time.monotonic()
            raise

    def _span(self, record: SpanRecord) -> ReadableSpan:
        return ReadableSpan(
            record.name,
            context=self._context(record.span_id),
            parent=self._context(record.parent_id) if record.parent_id else None,
            resource=self._resource,
            attributes=dict(record.attributes),
            kind=SpanKind.INTERNAL,
            instrumentation_scope=_SCOPE,
            status=failed(record.error) if record.error else Status(),
            start_time=record.start_ns,
            end_time=record.end_ns,
        )

    def _context(self, span_id: int) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(self._trace_id, span_id, is_remote=False, trace_flags=sampled)
