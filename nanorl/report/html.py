"""report.html: one file that shows what a run did, with no script and nothing loaded from outside.

Whatever a model wrote is untrusted: every text passes `markup.text`, and the page's own security
policy forbids scripts and loads, should that ever fail. The same input gives the same bytes.
Left out: live updates (nanorl.report.live) and the full rollout store (rollouts.sqlite).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanorl.report.charts import duration, line_chart, number, stacked_bars, success_bars
from nanorl.report.curves import build_charts
from nanorl.report.markup import text
from nanorl.report.style import SHADE_FROM_NATS, STYLE
from nanorl.report.summary import write_atomically
from nanorl.report.trace import Decode, Segment, TokenView, trace_rollout
from nanorl.types import Rollout, Status

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_TABLE_ROWS = 200


def write_report(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    metrics_rows: Sequence[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
    decode: Decode,
    classify: Callable[[str], str] | None = None,
) -> None:
    """Writes the page atomically. `rollouts` are shown in the order given (see `pick_samples`).

    `summary` is that of nanorl.report.summary, or an incomplete one while the run goes on.
    `decode` turns ids into text, `classify` an observation into a short tool status.
    """
    sections = [
        _header(summary),
        _outcome(summary),
        _curves(metrics_rows),
        _per_type(summary.get("per_type") or {}),
        _rollouts(rollouts, decode, classify),
        _settings(config, summary),
        _table_of_metrics(metrics_rows),
    ]
    title = f"{text(summary.get('preset', 'run'))}, seed {text(summary.get('seed', '?'))}"
    write_atomically(
        path,
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Training report: {title}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(section for section in sections if section)}\n"
        "</main></body></html>\n",
    )


def _header(summary: Mapping[str, Any]) -> str:
    facts = [
        f"preset {summary['preset']}" if "preset" in summary else "",
        str(summary.get("model", "")),
        f"seed {summary['seed']}" if "seed" in summary else "",
        str(summary.get("dtype", "")),
        str(summary.get("hardware", "")),
        str(summary.get("date", "")),
        f"commit {str(summary['git_commit'])[:12]}" if summary.get("git_commit") else "",
    ]
    return (
        "<header><h1>Training report</h1>"
        f"<p>{' · '.join(text(fact) for fact in facts if fact)}</p>"
        '<nav aria-label="Sections"><a href="#outcome">Outcome</a><a href="#curves">Curves</a>'
        '<a href="#types">Task types</a><a href="#rollouts">Rollouts</a>'
        '<a href="#settings">Settings</a></nav></header>'
    )


def _outcome(summary: Mapping[str, Any]) -> str:
    rows = [
        ("untrained", summary.get("heldout_success_untrained")),
        ("after the warm start", summary.get("heldout_success_before")),
        ("after RL", summary.get("heldout_success_after")),
        ("after RL, tool off", summary.get("heldout_success_no_tool")),
    ]
    num = summary.get("heldout_n") or 0
    return (
        f'<section id="outcome"><h2>Held-out success</h2><p>Greedy, {number(num)} tasks that were '
        "never trained on; whiskers are 95 % intervals. The warm start imitates a teacher; the "
        "rest is reinforcement learning.</p>"
        f'<div class="card">{success_bars(rows, num)}</div>{_tiles(summary)}</section>'
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    before, after = (summary.get(f"heldout_success_{when}") for when in ("before", "after"))
    gained = "–" if before is None or after is None else f"{100 * (after - before):+.1f}"
    rss, wall_s = summary.get("peak_rss_bytes"), summary.get("wall_s")
    tiles = [
        ("Gained by RL", gained, "points"),
        ("RL steps", number(summary.get("steps")), ""),
        ("Wall time", "–" if wall_s is None else duration(wall_s), ""),
        ("Rollouts", number(summary.get("num_rollouts")), ""),
        ("Failed rollouts", number(summary.get("num_failed_rollouts")), ""),
        ("Log-prob gap, max", number(summary.get("logp_gap_max")), "nats"),
        ("Log-prob gap, mean", number(summary.get("logp_gap_mean")), "nats"),
        ("Rollout speed", number(summary.get("tokens_per_s_rollout")), "tokens/s"),
        ("Training speed", number(summary.get("tokens_per_s_train")), "tokens/s"),
        ("Peak memory", "–" if rss is None else f"{rss / 2**30:.2f}", "GiB"),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}{f' <small>{unit}</small>' if unit else ''}</dd></div>"
        for name, value, unit in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _curves(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return '<section id="curves"><h2>Curves</h2><p>No RL step was logged.</p></section>'
    main, others = build_charts(rows)

    def draw(charts: Sequence[Any]) -> str:
        return "".join(
            stacked_bars(chart) if rule.is_stacked else line_chart(chart) for rule, chart in charts
        )

    more = (
        f"<details><summary>{len(others)} more curves</summary>"
        f'<div class="inside charts">{draw(others)}</div></details>'
        if others
        else ""
    )
    return (
        '<section id="curves"><h2>Curves</h2><p>One point a step; point at a curve for its '
        f'numbers. Long curves: a moving average over the raw values.</p><div class="charts">'
        f"{draw(main)}</div>{more}</section>"
    )


def _per_type(per_type: Mapping[str, Mapping[str, Any]]) -> str:
    if not per_type:
        return ""
    rows = []
    for kind in sorted(per_type):
        row = per_type[kind]
        before, after = row.get("before"), row.get("after")
        change = "–"
        if before is not None and after is not None:
            points = 100 * (after - before)
            colour = "gain" if points > 0 else "drop" if points < 0 else ""
            change = f'<span class="{colour}">{points:+.1f}</span>'
        cells = "".join(
            f"<td>{number(row.get(name), is_fraction=True)}</td>"
            for name in ("untrained", "before", "after")
        )
        rows.append(
            f'<tr><th scope="row">{text(kind)}</th>{cells}<td>{change}</td>'
            f"<td>{number(row.get('no_tool'), is_fraction=True)}</td>"
            f"<td>{number(row.get('n'))}</td></tr>"
        )
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            *("Task type", "Untrained", "After warm start", "After RL", "Change, points"),
            *("Tool off", "Tasks"),
        )
    )
    return (
        '<section id="types"><h2>By task type</h2><div class="card scroll"><table><thead>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _rollouts(
    rollouts: Sequence[Rollout], decode: Decode, classify: Callable[[str], str] | None
) -> str:
    if not rollouts:
        return ""
    shown = "".join(
        _rollout(rollout, decode, classify, i == 0) for i, rollout in enumerate(rollouts)
    )
    return (
        '<section id="rollouts"><h2>Rollouts, turn by turn</h2><p><span class="key prompt">prompt'
        '</span> <span class="key model">model</span> <span class="key tool">tool</span> '
        "Only what the model sampled is trained on; the darker a token, the less likely it was. "
        'Point at one for its numbers.</p><input type="checkbox" id="shade"> '
        f'<label for="shade">always shade tokens by surprise</label>{shown}</section>'
    )


def _rollout(
    rollout: Rollout, decode: Decode, classify: Callable[[str], str] | None, is_open: bool
) -> str:
    trace = trace_rollout(rollout, decode, classify=classify)
    versions = sorted({v for v, m in zip(rollout.versions, rollout.loss_mask, strict=True) if m})
    is_good = rollout.status is Status.FINISHED and rollout.reward > 0
    status = "good" if rollout.status is Status.FINISHED else "warn"
    span = "–".join(str(v) for v in dict.fromkeys((versions[0], versions[-1]))) if versions else "?"
    metrics = " · ".join(f"{name} {number(value)}" for name, value in rollout.metrics.items())
    return (
        f'<details class="rollout"{" open" if is_open else ""}><summary><b>{text(rollout.task_id)}'
        f'</b><span class="badge {"good" if is_good else "bad"}">reward {number(rollout.reward)}'
        f'</span><span class="badge {status}">{text(rollout.status.value)}</span>'
        f'<span class="meta">{len(rollout.turn_spans)} turns · {rollout.num_action_tokens} sampled '
        f"of {len(rollout.tokens)} tokens · policy version {span} · {text(rollout.rollout_id)}"
        "</span>"
        f'</summary><div class="inside"><div class="meta">{text(metrics)}</div>'
        f"{''.join(_segment(segment) for segment in trace.segments)}</div></details>"
    )


def _segment(segment: Segment) -> str:
    head = [segment.role if segment.turn < 0 else f"{segment.role}, turn {segment.turn + 1}"]
    if segment.tool_status is not None:
        head.append(segment.tool_status)
    if segment.mean_logp is not None:
        head.append(f"{segment.num_sampled} sampled, mean log-prob {segment.mean_logp:.3f}")
    if segment.reward is not None:
        head.append(f"turn reward {number(segment.reward)}")
    body = (
        "".join(_token(token) for token in segment.tokens)
        if segment.num_sampled
        else text(segment.text)
    )
    # A parser drops the first line feed inside <pre>; so give it one to drop.
    return (
        f'<div class="segment {segment.role}"><h4>{text(" · ".join(head))}</h4>'
        f"<pre>\n{body}</pre></div>"
    )


def _token(token: TokenView) -> str:
    if not token.is_sampled or not token.text:
        return text(token.text)
    level = sum(-token.logp >= nats for nats in SHADE_FROM_NATS)
    chance = f"{math.exp(min(0.0, token.logp)):.1%}" if math.isfinite(token.logp) else "?"
    tip = f"log-prob {token.logp:.4f} ({chance}) · id {token.token_id} · version {token.version}"
    return f'<span class="t p{level}" title="{text(tip)}">{text(token.text)}</span>'


def _settings(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in summary.items() if name != "per_type"}
    return (
        '<section id="settings"><h2>Settings and data</h2>'
        f"{_pairs('Configuration', config)}{_pairs('Summary', plain)}</section>"
    )


def _pairs(title: str, values: Mapping[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, str):
            return value
        return json.dumps(value, indent=2, default=str, ensure_ascii=False)

    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th><td>{text(show(value))}</td></tr>'
        for name, value in values.items()
    )
    return (
        f'<details><summary>{title}</summary><div class="inside scroll"><table class="config">'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _table_of_metrics(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    stride = math.ceil(len(rows) / _MAX_TABLE_ROWS)
    kept = rows[::stride]
    names = list(dict.fromkeys(name for row in rows for name in row))
    heads = "".join(f'<th scope="col">{text(name)}</th>' for name in names)

    def cell(value: Any) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return number(value)
        return "–" if value is None else text(value)

    body = "".join(
        f"<tr>{''.join(f'<td>{cell(row.get(name))}</td>' for name in names)}</tr>" for row in kept
    )
    note = "" if stride == 1 else f", every {stride}th of {len(rows)}"
    return (
        f"<details><summary>Metrics as a table ({len(kept)} steps{note})</summary>"
        f'<div class="inside scroll"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody>'
        "</table></div></details>"
    )
