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

from nanorl.report.charts import (
    build_charts,
    duration,
    line_chart,
    number,
    stacked_bars,
    success_bars,
    text,
)
from nanorl.report.examples import Example, Rate
from nanorl.report.summary import EVALUATIONS, success_rates, write_atomically
from nanorl.report.trace import Decode, Segment, TokenView, trace_rollout
from nanorl.types import Rollout, Status

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MAX_TABLE_ROWS = 200
_MAX_MARKED_TOKENS = 20_000  # about 80 bytes of markup each
_MAX_CHARS = 4_000  # of one unmarked text


def write_report(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    metrics_rows: Sequence[Mapping[str, Any]],
    examples: Sequence[Example],
    training_rates: Mapping[str, Sequence[Rate]],
    decode: Decode,
    classify: Callable[[str], str] | None = None,
) -> None:
    """Writes the page atomically. `examples` are shown by task type, failures first, else in the
    order given; `training_rates` are of all rollouts of each type.

    `summary` is that of nanorl.report.summary, or an incomplete one while the run goes on.
    `decode` turns ids into text, `classify` an observation into a short tool status.
    """
    sections = [
        _header(summary),
        _outcome(summary),
        _curves(metrics_rows),
        _per_type(summary.get("per_type") or {}),
        _Rollouts(decode, classify).section(examples, training_rates),
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
    return (
        '<section id="outcome"><h2>Held-out success</h2><p>Greedy, on tasks that were never '
        "trained on; whiskers are 95 % intervals. The warm start imitates a teacher; the rest is "
        "reinforcement learning.</p>"
        f'<div class="card">{success_bars(success_rates(summary))}</div>{_tiles(summary)}</section>'
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
        cells = "".join(f"<td>{_rate_of_type(row, name)}</td>" for name in EVALUATIONS)
        rows.append(f'<tr><th scope="row">{text(kind)}</th>{cells}<td>{change}</td></tr>')
    heads = "".join(
        f'<th scope="col">{name[:1].upper()}{name[1:]}</th>'
        for name in ("Task type", *EVALUATIONS.values(), "gained by RL, points")
    )
    return (
        '<section id="types"><h2>By task type</h2><div class="card scroll"><table><thead>'
        f"<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _rate_of_type(row: Mapping[str, Any], name: str) -> str:
    rate, num_tasks = row.get(name), row.get(f"n_{name}")
    of = "" if rate is None or num_tasks is None else f" <small>of {number(num_tasks)}</small>"
    return number(rate, is_fraction=True) + of


class _Rollouts:
    """The section of examples. Tokens have numbers of their own as long as `num_marked` lasts, and
    texts are cut, so that the page stays of moderate size."""

    def __init__(self, decode: Decode, classify: Callable[[str], str] | None) -> None:
        self.decode, self.classify = decode, classify
        self.num_marked = _MAX_MARKED_TOKENS

    def section(
        self, examples: Sequence[Example], training_rates: Mapping[str, Sequence[Rate]]
    ) -> str:
        if not examples:
            return ""
        kinds: dict[str, list[Example]] = {}
        for example in examples:
            kinds.setdefault(example.kind, []).append(example)
        shown = "".join(
            self._kind(kind, kinds[kind], training_rates.get(kind, ())) for kind in sorted(kinds)
        )
        num_all = sum(rate.num for rates in training_rates.values() for rate in rates)
        return (
            f'<section id="rollouts"><h2>Rollouts, turn by turn</h2><p>{len(examples)} examples, '
            f"failures first; rollouts.sqlite holds {number(num_all)} of training. "
            '<span class="key prompt">prompt</span> <span class="key model">model</span> '
            '<span class="key tool">tool</span> Only what the model sampled is trained on; the '
            "darker a token, the less likely it was. Point at one for its numbers.</p>"
            '<input type="checkbox" id="shade"> '
            f'<label for="shade">always shade tokens by surprise</label>{shown}</section>'
        )

    def _kind(self, kind: str, examples: Sequence[Example], rates: Sequence[Rate]) -> str:
        in_training = " · ".join(
            f"steps {rate.first}–{rate.last}: {rate.num_right / rate.num:.0%} of {rate.num}"
            for rate in rates
        )
        shown = "".join(self._rollout(example) for example in sorted(examples, key=_is_right))
        return (
            f'<details class="kind"><summary><b>{text(kind)}</b><span class="meta">'
            f'{len(examples)} examples</span><span class="meta">{text(in_training)}</span>'
            f'</summary><div class="inside">{shown}</div></details>'
        )

    def _rollout(self, example: Example) -> str:
        rollout = example.rollout
        trace = trace_rollout(rollout, self.decode, classify=self.classify)
        status = "good" if rollout.status is Status.FINISHED else "warn"
        metrics = " · ".join(f"{name} {number(value)}" for name, value in rollout.metrics.items())
        wanted = ""
        if example.task is not None:
            wanted = f'<p class="wanted">expected answer: <b>{text(example.task.answer)}</b></p>'
        return (
            f'<details class="rollout"><summary><span class="badge '
            f'{"good" if _is_right(example) else "bad"}">reward {number(rollout.reward)}</span>'
            f'<span class="badge {status}">{text(rollout.status.value)}</span>'
            f"<b>{text(example.when)}</b>"
            f'<span class="meta">{len(rollout.turn_spans)} turns · {rollout.num_action_tokens} '
            f"sampled of {len(rollout.tokens)} tokens · policy version {_versions(rollout)} · "
            f"{text(rollout.rollout_id)} · {text(rollout.task_id)}</span></summary>"
            f'<div class="inside">{wanted}<div class="meta">{text(metrics)}</div>'
            f"{''.join(self._segment(segment) for segment in trace.segments)}</div></details>"
        )

    def _segment(self, segment: Segment) -> str:
        head = [segment.role if segment.turn < 0 else f"{segment.role}, turn {segment.turn + 1}"]
        if segment.tool_status is not None:
            head.append(segment.tool_status)
        if segment.mean_logp is not None:
            head.append(f"{segment.num_sampled} sampled, mean log-prob {segment.mean_logp:.3f}")
        if segment.reward is not None:
            head.append(f"turn reward {number(segment.reward)}")
        # A parser drops the first line feed inside <pre>; so give it one to drop.
        return (
            f'<div class="segment {segment.role}"><h4>{text(" · ".join(head))}</h4>'
            f"<pre>\n{self._body(segment)}</pre></div>"
        )

    def _body(self, segment: Segment) -> str:
        if segment.num_sampled and len(segment.tokens) <= self.num_marked:
            self.num_marked -= len(segment.tokens)
            return "".join(_token(token) for token in segment.tokens)
        cut = len(segment.text) - _MAX_CHARS
        tail = f"\n… {cut} characters more, in rollouts.sqlite" if cut > 0 else ""
        return text(segment.text[:_MAX_CHARS] + tail)


def _is_right(example: Example) -> bool:
    return example.rollout.status is Status.FINISHED and example.rollout.reward >= 1.0


def _versions(rollout: Rollout) -> str:
    sampled = [v for v, m in zip(rollout.versions, rollout.loss_mask, strict=True) if m]
    if not sampled:
        return "?"
    return "–".join(str(v) for v in dict.fromkeys((min(sampled), max(sampled))))


def _token(token: TokenView) -> str:
    if not token.is_sampled or not token.text:
        return text(token.text)
    level = sum(-token.logp >= nats for nats in SHADE_FROM_NATS)
    chance = f"{math.exp(min(0.0, token.logp)):.1%}" if math.isfinite(token.logp) else "?"
    tip = f"log-prob {token.logp:.3f} ({chance}), id {token.token_id}"
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


# The style sheet of report.html: light and dark, wide and narrow, screen and paper.

STYLE = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #fff; --ink: #14181f; --soft: #5a6472; --line: #e2e6ec; --track: #eef1f5;
  --accent: #2563eb; --good: #0f7b4f; --bad: #b42318; --warn: #9a5b00;
  --prompt: #f1f3f6; --model: #eaf1ff; --tool: #fdf3e1; --shade: 234, 88, 12;
  --c0: #2563eb; --c1: #d9730d; --c2: #0f8a6d; --c3: #9b3fc4; --c4: #c92a4b; --c5: #0b7fa5;
  --c6: #7a6a00; --c7: #64707f; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #0e1116; --card: #171b22; --ink: #e8ebf0; --soft: #9aa5b4; --line: #2a313c;
  --track: #222833;
  --accent: #6ea3ff; --good: #4cc38a; --bad: #ff8078; --warn: #f0b556;
  --prompt: #1d222b; --model: #16233d; --tool: #2f2615; --shade: 251, 146, 60;
  --c0: #6ea3ff; --c1: #f5a04c; --c2: #3fc7a2; --c3: #c88af0; --c4: #ff7d97; --c5: #4cc2e6;
  --c6: #cdbb4b; --c7: #9aa5b4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 80px; }
header h1 { margin: 0; font-size: 26px; letter-spacing: -0.01em; }
header p { margin: 4px 0 0; color: var(--soft); }
h2 { margin: 40px 0 12px; font-size: 18px; }
h2 + p { margin: -6px 0 14px; color: var(--soft); }
nav { margin-top: 10px; display: flex; flex-wrap: wrap; gap: 4px 18px; }
a { color: var(--accent); }
.card { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fill, minmax(200px, 1fr));
  margin: 12px 0 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 12px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { font-size: 13px; font-weight: 400; color: var(--soft); }
.charts { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(400px, 100%), 1fr)); }
figcaption { font-weight: 600; margin-bottom: 8px; }
figcaption small { font-weight: 400; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-weight: 400; font-size: 13px;
  color: var(--soft); }
.legend b { color: var(--ink); font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .y, svg .name { text-anchor: end; }
svg .x { text-anchor: middle; }
.grid { stroke: var(--line); fill: none; }
.grid.base { stroke: var(--soft); stroke-opacity: .5; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke-opacity: .3; stroke-width: 1.2; }
.mark { fill-opacity: 0; stroke: transparent; stroke-width: 9; }
.mark.shown, .mark:hover { fill-opacity: 1; }
.bar:hover { opacity: .75; }
.rate { display: grid; grid-template-columns: 11em 1fr 8em; gap: 3px 12px; align-items: center;
  margin: 9px 0; }
.rate svg { grid-area: 1 / 2; height: 26px; border-radius: 5px; overflow: hidden; }
.rate .value { grid-area: 1 / 3; font-weight: 600; font-variant-numeric: tabular-nums; }
.rate small, td small { font-weight: 400; color: var(--soft); }
.track { fill: var(--track); }
.h0, .h1, .h3 { fill: var(--soft); fill-opacity: .55; }
.h1 { fill: var(--c1); fill-opacity: .8; }
.h2 { fill: var(--accent); }
.whisker { stroke: var(--ink); stroke-opacity: .65; stroke-width: 1.4; fill: none;
  vector-effect: non-scaling-stroke; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; font-size: 13px; }
th:first-child, td:first-child, .config td { text-align: left; }
.config td { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, monospace;
  font-size: 13px; }
tbody tr:last-child > * { border-bottom: 0; }
.config th { width: 30%; vertical-align: top; }
tbody th { color: var(--ink); font-size: 15px; }
.gain { color: var(--good); } .drop { color: var(--bad); }
details { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  margin: 10px 0; }
summary { cursor: pointer; padding: 12px 16px; display: flex; flex-wrap: wrap; gap: 4px 12px;
  align-items: center; }
summary::before { content: "\\25B8"; color: var(--soft); }
details[open] > summary::before { content: "\\25BE"; }
summary:focus-visible, a:focus-visible, input:focus-visible { outline: 2px solid var(--accent);
  outline-offset: 2px; border-radius: 6px; }
details > .inside { padding: 0 16px 16px; }
.badge { border-radius: 999px; padding: 1px 10px; font-size: 13px; border: 1px solid currentColor; }
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); }
.badge.warn { color: var(--warn); }
.meta { color: var(--soft); font-size: 13px; }
.segment { border-radius: 8px; margin-top: 8px; padding: 8px 12px; border-left: 4px solid; }
.segment h4 { margin: 0 0 2px; font-size: 12px; font-weight: 600; color: var(--soft); }
.segment pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate;
  font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.prompt, .template { background: var(--prompt); border-color: var(--c7); }
.model { background: var(--model); border-color: var(--c0); }
.tool { background: var(--tool); border-color: var(--c1); }
.t { border-radius: 3px; }
.t:hover { outline: 1px solid var(--accent); }
.control { display: inline-flex; gap: 8px; align-items: center; margin: 0 0 4px; }
.key { display: inline-block; padding: 0 8px; border-radius: 5px; border-width: 0 0 0 4px;
  border-style: solid; }
details.kind > .inside { padding: 0 10px 10px; }
details.kind details { background: var(--bg); }
.wanted { margin: 0 0 4px; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 18px 12px 60px; }
  header h1 { font-size: 23px; }
  .card { padding: 12px; }
  .rate { grid-template-columns: 1fr auto; }
  .rate svg { grid-area: 2 / 1 / 3 / 3; }
  .rate .value { grid-area: 1 / 2; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .plot text { font-size: 19px; }
  summary { padding: 10px 12px; }
  details > .inside { padding: 0 10px 12px; } }
@media print { details { break-inside: avoid; } body { background: #fff; } }
"""

# Seven shades of surprise (nats): on hover, or always while the box is ticked.
SHADE_FROM_NATS = (0.05, 0.25, 0.7, 1.4, 2.5, 4.5)

STYLE += "".join(
    f".model:hover .p{level}, #shade:checked ~ .rollout .p{level} "
    f"{{ background: rgba(var(--shade), {0.11 * level:.2f}); }}\n"
    for level in range(1, len(SHADE_FROM_NATS) + 1)
)
STYLE += "".join(
    f".c{i} {{ stroke: var(--c{i}); fill: var(--c{i}); }}"
    f" .line.c{i} {{ fill: none; }} .bar.c{i} {{ stroke: none; }}"
    f" .mark.c{i} {{ stroke: transparent; }} i.c{i} {{ background: var(--c{i}); }}\n"
    for i in range(8)
)
