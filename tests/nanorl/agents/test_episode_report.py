"""Reports of an episode add up: what a later one leaves out stays what it was."""

from __future__ import annotations

from typing import Any

from nanorl.agents.endpoint.report import EpisodeReport, read_report


def told(*bodies: dict[str, Any]) -> tuple[Any, ...]:
    report = EpisodeReport()
    for body in bodies:
        report.take(read_report(body))
    return report.answer, report.reward, report.metrics, report.done.is_set()


def test_each_field_is_taken_from_the_last_report_that_names_it() -> None:
    assert told({"answer": "42"}) == ("42", None, {}, False)
    assert told({"answer": "42"}, {"is_done": True}) == ("42", None, {}, True)
    assert told({"answer": "42"}, {"answer": ""}) == ("", None, {}, False)
    assert told({"is_done": True}, {"answer": "7"}) == ("7", None, {}, True)


def test_metrics_of_several_reports_are_joined_and_rewards_of_nothing_stay() -> None:
    first = {"reward": 0.5, "metrics": {"a": 1.0, "b": 2.0}}
    assert told(first, {"metrics": {"b": 3.0}}) == (None, 0.5, {"a": 1.0, "b": 3.0}, False)
    assert told(first, {"reward": 0.0})[1] == 0.0
