"""OpenTelemetry: a trace for each rollout, by the conventions for generative AI (`gen_ai.*`).

    invoke_agent tool              the rollout: its outcome, all its tokens
      chat smollm2                 a turn: messages in and out, tokens
      execute_tool python          a call and its result
        invoke_agent sub-agent     the conversation that the call was answered by

A run that goes on measures times (`--log otel`); a store of rollouts knows none. Then traces begin
when they are exported, a millisecond after one another; a token takes a millisecond, and so does a
call (`nanorl.timing` says so). Ids follow from the names of run and rollout, so what is exported
twice is the same trace.
Source: OpenTelemetry semantic conventions, "GenAI agent spans" and "GenAI spans".
"""

from __future__ import annotations

import itertools
import json
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    set_span_in_context,
)

from nanoengine.text.chat_template import Message
from nanorl.agents.context import TurnTimes
from nanorl.agents.times import RolloutTimes
from nanorl.observability.telemetry import (
    MS,
    SPAN_BYTES,
    TRACE_BYTES,
    export,
    failed,
    id_of,
    own,
    resource,
)
from nanorl.observability.trajectories.atif import AgentInfo
from nanorl.observability.trajectories.base import (
    CallOfTurn,
    Trajectory,
    TrajectorySequence,
    TrajectoryTurn,
    assistant_message,
)
from nanorl.observability.trajectories.files import PICTURES, whole_file
from nanorl.observability.trajectories.frames import Content, Json
from nanorl.types import Status

TIMING = "synthetic: a millisecond for each token and each call"
MEASURED = "measured"
ERROR_RESULT = (
    "Error: "  # how nanorl/envs/tools/tool_calls.py begins the text of a call that failed
)
PATH = "/v1/traces"  # OTLP/HTTP
ID_FIELDS = ("traceId", "spanId", "parentSpanId")  # hexadecimal in OTLP's JSON


def send_spans(trajectories: Iterable[Trajectory], endpoint: str, maker: SpanMaker) -> None:
    """Send them to an OTLP/HTTP endpoint, a rollout at a time; http://HOST:4318 stands for its
    /v1/traces. ConnectionError where it does not take them. Headers, such as a key, come from
    OTEL_EXPORTER_OTLP_HEADERS, as for every exporter."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"--endpoint {endpoint}: must be an address such as http://localhost:4318")
    address = endpoint.rstrip("/") + PATH if parts.path in ("", "/") else endpoint
    exporter = OTLPSpanExporter(endpoint=address)
    try:
        export_spans(trajectories, exporter, maker, place=address)
    finally:
        exporter.shutdown()


def export_spans(
    trajectories: Iterable[Trajectory], exporter: SpanExporter, maker: SpanMaker, *, place: str
) -> None:
    """Hand them to an exporter. ConnectionError, with `place`, where it does not take them."""
    for number, trajectory in enumerate(trajectories):
        refused = (
            f"{place}: did not take the spans of {trajectory.rollout.rollout_id} ({number} "
            "rollouts were sent before it); is an OTLP/HTTP collector listening there?"
        )
        export(exporter, maker.spans(trajectory), refused)


def write_spans(
    trajectories: Iterable[Trajectory], path: Path, maker: SpanMaker, *, force: bool
) -> None:
    """Write them as OTLP JSON, a line for each rollout, as the collector's file receiver reads."""
    with whole_file(path, force=force) as file:
        for trajectory in trajectories:
            request = encode_spans(maker.spans(trajectory))
            data = MessageToDict(request, use_integers_for_enums=True)
            for resource in data["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    for span in scope["spans"]:
                        _write_ids(span)
            file.write(json.dumps(data, ensure_ascii=False).encode() + b"\n")


def _write_ids(span: Json) -> None:
    """Protobuf's JSON has bytes in base64, OTLP's has its ids in hexadecimal."""
    for name in ID_FIELDS:
        if name in span:
            span[name] = b64decode(span[name]).hex()


class SpanMaker:
    """Makes the spans of rollouts with the SDK."""

    def __init__(self, agent: AgentInfo, run: str) -> None:
        """`run` is the run's folder: rollouts of two runs may have one name."""
        self._agent, self._run = agent, run
        self._ids = _Ids()
        self._ended = _Ended()
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # whatever the process's environment says of its own traces
            resource=resource(agent.version),
            id_generator=self._ids,
            span_limits=SpanLimits(
                max_attributes=SpanLimits.UNSET, max_attribute_length=SpanLimits.UNSET
            ),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("nanorl.observability.trajectories", agent.version)
        self._start_ns = itertools.count(time.time_ns(), MS)
        self._now_ns = 0
        self._times: Mapping[str, Sequence[TurnTimes]] = {}

    def spans(
        self,
        trajectory: Trajectory,
        *,
        parent: SpanContext | None = None,
        times: RolloutTimes | None = None,
    ) -> list[ReadableSpan]:
        """The spans of one rollout, inner ones first; below `parent`, where there is one, and with
        the times that were measured, where there are any."""
        rollout = trajectory.rollout
        self._ids.begin(f"{self._run}/{trajectory.phase}/{rollout.rollout_id}")
        self._now_ns = next(self._start_ns) if times is None else times.start_ns
        self._times = _times_of(trajectory, times)
        self._ended.spans = []
        above = None if parent is None else NonRecordingSpan(parent)
        with self._span(f"invoke_agent {self._agent.name}", above) as span:
            _set(span, self._about_agent(trajectory, self._agent.name, trajectory.segments))
            _set(span, _outcome(trajectory))
            if len(self._times) == len(trajectory.sequences):
                span.set_attribute(own("timing"), MEASURED)
            reward = trajectory.outcome()["reward"]
            for sequence in trajectory.segments:
                self._turns(trajectory, sequence, span)
            for sequence in trajectory.beside:
                if sequence.caller is None:
                    self._sub_agent(trajectory, sequence, span)
            if reward is not None:
                about = "gen_ai.evaluation"
                score = {f"{about}.name": "reward", f"{about}.score.value": reward}
                span.add_event(f"{about}.result", score, timestamp=self._now_ns)
            if rollout.status is Status.FAILED:
                span.set_status(failed(rollout.error))
            if times is not None:
                self._now_ns = times.end_ns
        return self._ended.spans

    @contextmanager
    def _span(
        self, name: str, parent: Span | None, kind: SpanKind = SpanKind.INTERNAL
    ) -> Iterator[Span]:
        context = Context() if parent is None else set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, context, kind, start_time=self._now_ns)
        yield span
        span.end(self._now_ns)

    def _turns(self, trajectory: Trajectory, sequence: TrajectorySequence, parent: Span) -> None:
        chat = sequence.chat.messages
        heard = list(chat)
        measured = iter(self._times.get(sequence.name, ()))
        for turn in sequence.turns:
            if not turn.is_copied:
                times = next(measured, None)
                self._now_ns = times.start_ns if times else self._now_ns
                with self._span(f"chat {self._agent.model}", parent, SpanKind.CLIENT) as span:
                    _set(span, self._about_turn(trajectory, sequence, turn, heard))
                    num_tokens = turn.span.action_end - turn.span.action_start
                    self._now_ns = times.end_ns if times else self._now_ns + MS * num_tokens
                for call in turn.calls:  # side by side: they share the times of the step
                    if times is not None:
                        self._now_ns = times.step_ns[0]
                    self._call(trajectory, sequence, call, parent, times)
            heard += [_said(turn), *_answered(turn)]

    def _call(
        self,
        trajectory: Trajectory,
        sequence: TrajectorySequence,
        call: CallOfTurn,
        parent: Span,
        times: TurnTimes | None,
    ) -> None:
        result = None if call.result is None else sequence.text_of(call.result)
        with self._span(f"execute_tool {call.name}", parent) as span:
            _set(
                span,
                {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": call.name,
                    "gen_ai.tool.call.id": call.id,
                    "gen_ai.tool.type": "function",
                    "gen_ai.tool.call.arguments": _json(call.arguments),
                    "gen_ai.tool.call.result": result,
                },
            )
            if (result or "").startswith(ERROR_RESULT):
                span.set_status(failed(result))
            self._now_ns += 0 if times else MS
            for other in trajectory.beside:
                if other.caller == (sequence.name, call.id):
                    self._sub_agent(trajectory, other, span)
            if times is not None:
                self._now_ns = max(self._now_ns, times.step_ns[1])

    def _sub_agent(
        self, trajectory: Trajectory, sequence: TrajectorySequence, parent: Span
    ) -> None:
        with self._span(f"invoke_agent {sequence.name}", parent) as span:
            _set(span, self._about_agent(trajectory, sequence.name, [sequence]))
            self._turns(trajectory, sequence, span)

    def _about_agent(
        self, trajectory: Trajectory, name: str, sequences: Sequence[TrajectorySequence]
    ) -> Json:
        own = [turn for one in sequences for turn in one.turns if not turn.is_copied]
        spans = [turn.span for turn in own]
        chat = sequences[0].chat
        return {
            "gen_ai.operation.name": "invoke_agent",
            **self._about_model(trajectory),
            "gen_ai.agent.name": name,
            "gen_ai.agent.version": self._agent.version,
            "gen_ai.tool.definitions": _json(chat.tools) if chat.tools else None,
            "gen_ai.input.messages": _json([_parts(one) for one in chat.messages]),
            "gen_ai.output.messages": _json([_output(turn) for turn in own[-1:]]),
            "gen_ai.usage.input_tokens": sum(span.action_start for span in spans),
            "gen_ai.usage.output_tokens": sum(s.action_end - s.action_start for s in spans),
        }

    def _about_turn(
        self,
        trajectory: Trajectory,
        sequence: TrajectorySequence,
        turn: TrajectoryTurn,
        heard: Sequence[Message],
    ) -> Json:
        span = turn.span
        return {
            "gen_ai.operation.name": "chat",
            **self._about_model(trajectory),
            "gen_ai.response.model": self._agent.model,
            "gen_ai.response.finish_reasons": [turn.finish_reason],
            "gen_ai.usage.input_tokens": span.action_start,
            "gen_ai.usage.output_tokens": span.action_end - span.action_start,
            "gen_ai.input.messages": _json([_parts(message) for message in heard]),
            "gen_ai.output.messages": _json([_output(turn)]),
            own("sequence"): sequence.name,
            own("version"): turn.version,
            own("turn_reward"): turn.reward,
        }

    def _about_model(self, trajectory: Trajectory) -> Json:
        return {
            "gen_ai.provider.name": "nanorl",
            "gen_ai.request.model": self._agent.model,
            "gen_ai.conversation.id": trajectory.rollout.rollout_id,
        }


class _Ids(IdGenerator):
    """Ids that follow from a name."""

    def __init__(self) -> None:
        self._name, self._count = "", itertools.count()

    def begin(self, name: str) -> None:
        self._name, self._count = name, itertools.count(1)

    def generate_trace_id(self) -> int:
        return id_of(f"{self._name}\0trace", TRACE_BYTES)

    def generate_span_id(self) -> int:
        return id_of(f"{self._name}\0span {next(self._count)}", SPAN_BYTES)


class _Ended(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _times_of(trajectory: Trajectory, times: RolloutTimes | None) -> dict[str, Sequence[TurnTimes]]:
    """The times of the turns by the sequence's name, where there is one for each turn: a recorded
    conversation has none."""
    if times is None or len(times.sequences) != len(trajectory.sequences):
        return {}
    found = {}
    for sequence, measured in zip(trajectory.sequences, times.sequences, strict=True):
        if len(measured) == sum(not turn.is_copied for turn in sequence.turns):
            found[sequence.name] = measured
    return found


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    """Set those that are there; OpenTelemetry has no null."""
    span.set_attributes({name: one for name, one in attributes.items() if one is not None})


def _outcome(trajectory: Trajectory) -> Json:
    outcome = trajectory.outcome()
    metrics = outcome.pop("metrics")
    rollout = trajectory.rollout
    return {
        own("task_id"): rollout.task_id,
        own("group_id"): rollout.group_id,
        own("timing"): TIMING,
        **{own(name): value for name, value in outcome.items()},
        **{own(f"metrics.{name}"): value for name, value in metrics.items()},
    }


def _parts(message: Message) -> Json:
    """A message as the conventions' JSON schema has it."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant", "system", "developer"):
        said = content if isinstance(content, str) else list(_content_parts(content))
        answer = {"type": "tool_call_response", "response": said}
        if "tool_call_id" in message:
            answer["id"] = message["tool_call_id"]
        return {"role": "tool", "parts": [answer]}
    parts: list[Json] = []
    if reasoning := message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": reasoning})
    parts += _content_parts(content)
    for call in message.get("tool_calls", []):
        parts.append({"type": "tool_call", "id": call["id"], **call["function"]})
    return {"role": role, "parts": parts}


def _content_parts(content: Content) -> Iterator[Json]:
    """Texts, and pictures by the place of their files in the run's folder."""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if part["type"] == "image":
            yield {"type": "uri", "modality": "image", "uri": f"{PICTURES}/{part['sha256']}"}
        elif part["text"]:
            yield {"type": "text", "content": part["text"]}


def _output(turn: TrajectoryTurn) -> Json:
    # The conventions' schema calls them so; the attribute has what the API said.
    reason = {"tool_calls": "tool_call"}.get(turn.finish_reason, turn.finish_reason)
    return {**_parts(_said(turn)), "finish_reason": reason}


def _said(turn: TrajectoryTurn) -> Message:
    return assistant_message(turn.content, turn.reasoning, turn.calls)


def _answered(turn: TrajectoryTurn) -> Iterator[Message]:
    for call in turn.calls:
        if call.result is not None:
            yield {"role": "tool", "content": call.result, "tool_call_id": call.id}
    yield from turn.further


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
