"""report.html: one file that shows what a run did, with no script and nothing loaded from outside.

Whatever a model wrote is untrusted: every text passes `markup.text`, and the page's own security
policy forbids scripts and loads, should that ever fail. The same input gives the same bytes. The
style sheet is `style.css` beside this file; the page carries it inline.
Left out: live updates (nanorl.observability.report.live) and all other rollouts (nanorl view).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanorl.observability.report.charts import (
    Chart,
    Series,
    build_charts,
    duration,
    is_flat,
    line_chart,
    number,
    stacked_bars,
    success_bars,
)
from nanorl.observability.report.embedded_pictures import EmbeddedPictures
from nanorl.observability.report.examples import Example, Part, Rate
from nanorl.observability.report.markup import element, table, text
from nanorl.observability.report.rl_evaluations import progress_section
from nanorl.observability.report.summary import (
    EVALUATIONS,
    HIDING,
    success_rates,
    write_atomically,
)
from nanorl.observability.report.trace import Decode, Segment, TokenView, trace_rollout
from nanorl.observability.report.ways import ways_section
from nanorl.shown_pictures import known_pictures
from nanorl.types import REWARD_PART, Branch, Rollout, Status

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = Path(__file__).with_name("style.css")
SHADE_FROM_NATS = (0.05, 0.25, 0.7, 1.4, 2.5, 4.5)
"""Surprises from which on a token has the style sheet's shade p1, p2, ...; below the first, p0."""

_TABLES = ("per_type", "per_environment", "history")
"""The fields of a summary that have sections of their own."""
_MAX_TABLE_ROWS = 200
_MAX_MARKED_TOKENS = 20_000  # about 80 bytes of markup each
_MAX_CHARS = 4_000  # of one unmarked text
_MAX_ALL_CHARS = 1_000_000  # of all of them; escaping makes some of them several times as long
_TITLE_CHARS = 80
_SHORT_CHARS = 200  # of one text after that
_SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "outcome": "Outcome",
        "wrong": "Still wrong",
        "environments": "Environments",
        "types": "Task types",
        "findings": "What hinders it",
        "progress": "While it learnt",
        "curves": "Curves",
        "history": "History",
        "followed": "Step by step",
        "ways": "Found",
        "pairs": "First and last",
        "group": "A group",
        "rollouts": "Rollouts",
        "settings": "Settings",
    }
)


def write_report(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    metrics_rows: Sequence[Mapping[str, Any]],
    examples: Sequence[Example],
    training_rates: Mapping[str, Sequence[Rate]],
    decode: Decode,
) -> None:
    """Write the page atomically.

    `examples` (examples.py) are shown where their `part` says, those without one by task type,
    failures first; `training_rates` are of all rollouts of each type. `summary` is that of
    nanorl.observability.report.summary, or an incomplete one while the run goes on. `decode` turns
    ids into text, and may know the run's pictures (shown_pictures.py).
    """
    rollouts = _Rollouts(decode)
    sections = [
        outcome_section(summary),
        rollouts.wrong_section(examples, summary.get("per_type") or {}),
        environments_section(summary.get("per_environment") or {}, metrics_rows),
        types_section(summary.get("per_type") or {}),
        _findings(summary.get("findings") or ()),
        progress_section(summary.get("evaluations") or (), summary.get("best_step")),
        curves_section(metrics_rows),
        _history(summary.get("history") or ()),
        rollouts.followed_section(examples),
        ways_section(summary.get("ways") or {}),
        rollouts.pair_section(examples),
        rollouts.group_section(examples),
        rollouts.section([one for one in examples if not one.part], training_rates),
        _settings(config, summary),
        _table_of_metrics(metrics_rows),
    ]
    body = "\n".join(section for section in sections if section)
    title = f"Training report: {summary.get('preset', 'run')}, seed {summary.get('seed', '?')}"
    shown = page(title, f"{_header(summary, body)}\n{body}", pictures=rollouts.pictures.style)
    write_atomically(path, shown)


def page(title: str, body: str, *, pictures: str = "") -> str:
    """A whole document with the reports' style and security policy; `body` is markup already, and
    `pictures` are rules of the style that hold them."""
    policy = _POLICY + ("; img-src data:" if pictures else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title>"
        f"<style>\n{_STYLE.read_text('utf-8')}{pictures}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _header(summary: Mapping[str, Any], body: str) -> str:
    """The title, what was run, and links to the sections that `body` has."""
    facts = [
        f"preset {summary['preset']}" if "preset" in summary else "",
        str(summary.get("model_source") or summary.get("model", "")),
        f"seed {summary['seed']}" if "seed" in summary else "",
        str(summary.get("dtype", "")),
        str(summary.get("hardware", "")),
        f"sandbox {summary['sandbox']}" if summary.get("sandbox", "none") != "none" else "",
        str(summary.get("date", "")),
        f"commit {str(summary['git_commit'])[:12]}" if summary.get("git_commit") else "",
    ]
    links = "".join(
        f'<a href="#{name}">{title}</a>'
        for name, title in _SECTIONS.items()
        if f'<section id="{name}">' in body
    )
    return (
        "<header><h1>Training report</h1>"
        f"<p>{' · '.join(text(fact) for fact in facts if fact)}</p>"
        f'<nav aria-label="Sections">{links}</nav></header>'
    )


def outcome_section(summary: Mapping[str, Any]) -> str:
    """Success of every evaluation, and the main numbers."""
    return (
        '<section id="outcome"><h2>Held-out success</h2><p>Greedy, on tasks that were never '
        "trained on; whiskers are 95 % intervals. The warm start imitates a teacher; the rest is "
        "reinforcement learning.</p>"
        f'<div class="card">{success_bars(success_rates(summary))}</div>{_tiles(summary)}'
        f"{_missing(summary.get('missing') or ())}</section>"
    )


def _findings(findings: Sequence[Mapping[str, str]]) -> str:
    """Tell from the run's own numbers why it does not learn, as `nanorl doctor RUN` does."""
    if not findings:
        return ""
    items = "".join(
        f"<li>{text(one['seen'])}: {text(one['why'])}. <b>Mend it:</b> {text(one['remedy'])}.</li>"
        for one in findings
    )
    return f'<section id="findings"><h2>What hinders it</h2><ul>{items}</ul></section>'


def _missing(records: Sequence[str]) -> str:
    """A paragraph on the records that the page cannot show, because the run's folder has lost
    them."""
    if not records:
        return ""
    items = "".join(f"<li>{text(one)}</li>" for one in records)
    return f"<p>This page is not whole, for the run's folder has lost records:</p><ul>{items}</ul>"


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
        *_gap_tiles(summary),
        ("Rollout speed", number(summary.get("tokens_per_s_rollout")), "tokens/s"),
        ("Training speed", number(summary.get("tokens_per_s_train")), "tokens/s"),
        ("Peak memory", "–" if rss is None else f"{rss / 2**30:.2f}", "GiB"),
    ]
    cells = "".join(
        f"<div><dt>{name}</dt><dd>{value}{f' <small>{unit}</small>' if unit else ''}</dd></div>"
        for name, value, unit in tiles
        if value != "–"  # of a run that goes on most are not known
    )
    return f'<dl class="tiles">{cells}</dl>'


def _gap_tiles(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """A finished run says it, too, where its gap was not measured."""
    gap = summary.get("logp_gap_max")
    if gap is None:
        is_over = summary.get("status") == "finished" and summary.get("steps")
        return [("Log-prob gap", "not measured" if is_over else "–", "")]
    share = summary.get("logp_gap_share")
    return [
        ("Log-prob gap, max", number(gap), "nats"),
        ("Log-prob gap, mean", number(summary.get("logp_gap_mean")), "nats"),
        ("Gap measured on", "–" if share is None else f"{100 * share:.0f}", "% of tokens"),
    ]


def curves_section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every number of metrics.jsonl, a point a step."""
    if not rows:
        return '<section id="curves"><h2>Curves</h2><p>No RL step was logged.</p></section>'
    main, others = build_charts(rows)
    drawn = [(rule, chart) for rule, chart in main if not is_flat(chart)]
    flat = [chart.title for _, chart in main if is_flat(chart)]

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
        f"{draw(drawn)}</div>{_flat_line(flat)}{more}</section>"
    )


def _flat_line(titles: Sequence[str]) -> str:
    """One sentence in place of charts that would show a line along the bottom."""
    if not titles:
        return ""
    return f"<p>0 in every step, and so not drawn: {text('; '.join(titles))}.</p>"


def _history(events: Sequence[Mapping[str, Any]]) -> str:
    """The section on the run's history; empty where it was begun and left alone."""
    if not any(event["changes"] or event["event"] != "begun" for event in events):
        return ""
    rows = []
    for event in events:
        what = event["event"] + (f" from {event['origin']}" if event["origin"] else "")
        changes = "<br>".join(
            f"{text(name)}: {text(before)} → <b>{text(after)}</b>"
            for name, (before, after) in event["changes"].items()
        )
        what += f": {event['reason']}" if event.get("reason") else ""
        cells = (text(event["at"]), text(what), number(event["step"]), changes or "–")
        rows.append((*cells, element("code", text(event["command"]))))
    heads = ("When", "Event", "after RL steps", "Options changed", "Command")
    return (
        '<section id="history"><h2>History</h2><div class="card scroll">'
        f"{table(heads, rows, has_names=False)}</div></section>"
    )


def types_section(per_type: Mapping[str, Mapping[str, Any]]) -> str:
    """Success by task type in every evaluation; empty where none was made."""
    return _rates_section("types", "Task type", per_type)


def environments_section(
    rates: Mapping[str, Mapping[str, Any]], metrics_rows: Sequence[Mapping[str, Any]]
) -> str:
    """Success by environment in every evaluation and, as curves, in training; empty in a run of a
    single one."""
    steps = tuple(row["step"] for row in metrics_rows)
    chart = Chart(
        title="Success in training, by environment",
        steps=steps,
        series=tuple(
            Series(
                label=name,
                values=tuple(row.get(f"environment/{name}/success") for row in metrics_rows),
            )
            for name in rates
        ),
        is_fraction=True,
    )
    curves = f'<div class="charts">{line_chart(chart)}</div>' if rates and steps else ""
    return _rates_section("environments", "Environment", rates, curves)


def _rates_section(
    name: str, title: str, rates: Mapping[str, Mapping[str, Any]], more: str = ""
) -> str:
    if not rates:
        return ""
    rows = []
    shown = [
        one for one in EVALUATIONS if one not in HIDING or any(one in r for r in rates.values())
    ]
    for kind in sorted(rates):
        row = rates[kind]
        before, after = row.get("before"), row.get("after")
        change = "–"
        if before is not None and after is not None:
            points = 100 * (after - before)
            colour = "gain" if points > 0 else "drop" if points < 0 else ""
            change = f'<span class="{colour}">{points:+.1f}</span>'
        shares = (_rate_of_type(row, one) for one in shown)
        rows.append((text(kind), *shares, change))
    titles = (title, *(EVALUATIONS[one] for one in shown), "gained by RL, points")
    heads = [f"{one[:1].upper()}{one[1:]}" for one in titles]
    return (
        f'<section id="{name}"><h2>By {title.lower()}</h2><div class="card scroll">'
        f"{table(heads, rows)}</div>{more}</section>"
    )


def _rate_of_type(row: Mapping[str, Any], name: str) -> str:
    rate, num_tasks = row.get(name), row.get(f"n_{name}")
    of = "" if rate is None or num_tasks is None else f" <small>of {number(num_tasks)}</small>"
    return number(rate, is_fraction=True) + of


def _section(name: str, title: str, intro: str, shown: str) -> str:
    """A section of examples; empty where there are none."""
    if not shown:
        return ""
    return f'<section id="{name}"><h2>{title}</h2><p>{intro}</p>{shown}</section>'


class _Rollouts:
    """The sections of examples. Tokens have numbers of their own as long as `num_marked` lasts, and
    texts are cut, sooner when `num_chars` are written, so that the page stays of moderate size."""

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self.pictures = EmbeddedPictures(known_pictures(decode))
        self.num_marked = _MAX_MARKED_TOKENS
        self.num_chars = _MAX_ALL_CHARS

    def wrong_section(
        self, examples: Sequence[Example], per_type: Mapping[str, Mapping[str, Any]]
    ) -> str:
        """The section on the answers that the last evaluation found wrong, the task type that fails
        most first."""
        kinds: dict[str, list[Example]] = {}
        for example in examples:
            if example.part == "wrong":
                kinds.setdefault(example.kind, []).append(example)
        if not kinds:
            return ""
        last = next(iter(kinds.values()))[0].when
        failing = {kind: _num_wrong(per_type.get(kind, {})) for kind in kinds}
        shown = "".join(
            f'<details class="kind"><summary><b>{text(kind)}</b><span class="meta">'
            f"{text(_of_all(failing[kind]) or f'{len(kinds[kind])} examples')}</span></summary>"
            f'<div class="inside">{"".join(map(self._rollout, kinds[kind]))}</div></details>'
            for kind in sorted(kinds, key=lambda kind: (-(failing[kind] or (0, 0))[0], kind))
        )
        return (
            f'<section id="wrong"><h2>What it still gets wrong</h2><p>{text(last)}: examples by '
            f"task type, the one with most failures first.</p>{shown}</section>"
        )

    def pair_section(self, examples: Sequence[Example]) -> str:
        """The first and the last rollout of the same tasks, beside each other."""
        intro = "What the agent did in the first evaluation, and in the last."
        shown = self._same_tasks(examples, "pair")
        return _section("pairs", "The same task, first and last", intro, shown)

    def followed_section(self, examples: Sequence[Example]) -> str:
        """Samples of the same tasks while RL went on, beside each other."""
        intro = (
            "Samples of the evaluations between the steps: what the policy did with one prompt "
            "before RL, and what RL made of it."
        )
        shown = self._same_tasks(examples, "progress")
        return _section("followed", "The same task while it learnt", intro, shown)

    def _same_tasks(self, examples: Sequence[Example], part: Part) -> str:
        tasks: dict[str, list[Example]] = {}
        for example in examples:
            if example.part == part:
                tasks.setdefault(example.rollout.task_id, []).append(example)
        return "".join(
            f"{self._question(members[0])}{self._columns(members)}" for members in tasks.values()
        )

    def group_section(self, examples: Sequence[Example]) -> str:
        """A whole group: what the update compared."""
        members = [example for example in examples if example.part == "group"]
        if not members:
            return ""
        return (
            '<section id="group"><h2>A whole group, side by side</h2><p>Rollouts of one task in '
            f"{text(members[0].when)}; an update raises the likelihood of those above the others."
            f"</p>{self._question(members[0])}{self._columns(members)}</section>"
        )

    def _question(self, example: Example) -> str:
        task = example.task
        if task is None:
            return f'<p class="wanted">{text(example.rollout.task_id)}</p>'
        return (
            f'<p class="wanted">question: <b>{self._cut(task.prompt_text)}</b></p>'
            f'<p class="wanted">expected answer: <b>{self._cut(task.answer_text)}</b></p>'
        )

    def _columns(self, examples: Sequence[Example]) -> str:
        columns = "".join(
            f'<article class="card"><p>{_badges(example)} <b>{text(example.when)}</b></p>'
            f'<div class="meta">{text(_facts(example))}</div>'
            f"{self._sequence(example.rollout)}</article>"
            for example in examples
        )
        return f'<div class="beside">{columns}</div>'

    def _cut(self, value: str) -> str:
        """The text, escaped; the end of a long one is left out."""
        most = _MAX_CHARS if self.num_chars > 0 else _SHORT_CHARS
        self.num_chars -= min(len(value), most)
        cut = len(value) - most
        tail = f"\n… {cut} characters more, see nanorl view"
        return text(value[:most] + (tail if cut > 0 else ""))

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
        shown = self._sequence(rollout)
        for branch in rollout.branches:
            shown += (
                f"<details><summary>{text(branch.title)}</summary>"
                f'<div class="inside">{self._sequence(branch)}</div></details>'
            )
        return (
            f'<details class="rollout"><summary>{_badges(example)}<b>{text(_title(example))}</b>'
            f'<span class="meta">{rollout.num_turns} turns · {rollout.num_action_tokens} '
            f"sampled of {rollout.num_tokens} tokens · policy version {_versions(rollout)} · "
            f"{text(rollout.rollout_id)} · {text(rollout.task_id)}</span></summary>"
            f'<div class="inside">{self._question(example)}'
            f'<div class="meta">{text(_facts(example))}</div>{shown}</div></details>'
        )

    def _sequence(self, sequence: Rollout | Branch) -> str:
        segments = trace_rollout(sequence, self.decode).segments
        return "".join(self._segment(segment) for segment in segments)

    def _segment(self, segment: Segment) -> str:
        head = [segment.role if segment.turn < 0 else f"{segment.role}, turn {segment.turn + 1}"]
        if segment.mean_logp is not None:
            head.append(f"{segment.num_sampled} sampled, mean log-prob {segment.mean_logp:.3f}")
        if segment.reward is not None:
            head.append(f"turn reward {number(segment.reward)}")
        return (
            f'<div class="segment {segment.role}"><h4>{text(" · ".join(head))}</h4>'
            f"{self._body(segment)}</div>"
        )

    def _body(self, segment: Segment) -> str:
        if segment.num_sampled and len(segment.tokens) <= self.num_marked:
            self.num_marked -= len(segment.tokens)
            return _pre("".join(_token(token) for token in segment.tokens))
        return "".join(
            _pre(self._cut(one)) if isinstance(one, str) else self.pictures.markup(one)
            for one in segment.said
        )


def _pre(inside: str) -> str:
    # A parser drops the first line feed inside <pre>; so give it one to drop.
    return f"<pre>\n{inside}</pre>"


def _title(example: Example) -> str:
    """Among examples of one evaluation the beginning of the question, else the place in the run."""
    if example.part != "wrong" or example.task is None:
        return example.when
    question = " ".join(example.task.prompt_text.split())
    return f"{question[:_TITLE_CHARS]}…" if len(question) > _TITLE_CHARS else question


def _badges(example: Example) -> str:
    rollout = example.rollout
    status = "good" if rollout.status is Status.FINISHED else "warn"
    return (
        f'<span class="badge {"good" if _is_right(example) else "bad"}">reward '
        f'{number(rollout.reward)}</span><span class="badge {status}">'
        f"{text(rollout.status.value)}</span>"
    )


def _facts(example: Example) -> str:
    """Advantage, parts of the reward, all other numbers, and the error."""
    rollout, facts = example.rollout, []
    if example.stats is not None:
        lists = example.stats.values.get("advantage", [])
        values = [value for one in lists for value in one if math.isfinite(value)]
        if values:
            ends = dict.fromkeys(f"{end:+.3g}" for end in (min(values), max(values)))
            facts.append(f"advantage {' to '.join(ends)}")
    parts = {name: one for name, one in rollout.metrics.items() if name.startswith(REWARD_PART)}
    facts += [f"{name.removeprefix(REWARD_PART)} {number(one)}" for name, one in parts.items()]
    facts += [f"{name} {number(v)}" for name, v in rollout.metrics.items() if name not in parts]
    facts += [f"error: {rollout.error[:_MAX_CHARS]}"] if rollout.error else []
    return " · ".join(facts)


def _num_wrong(rates: Mapping[str, Any]) -> tuple[int, int] | None:
    """(wrong ones, all) of a task type in the last evaluation that its row has."""
    for name in ("after", "before", "untrained"):
        rate, num = rates.get(name), rates.get(f"n_{name}")
        if rate is not None and num is not None:
            return round((1 - rate) * num), num
    return None


def _of_all(counts: tuple[int, int] | None) -> str:
    return "" if counts is None else f"{counts[0]} of {counts[1]} wrong"


def _is_right(example: Example) -> bool:
    return example.rollout.status is Status.FINISHED and example.rollout.is_success


def _versions(rollout: Rollout) -> str:
    sampled = [v for sequence in rollout.sequences for v in sequence.versions if v >= 0]
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
    plain = {name: value for name, value in summary.items() if name not in _TABLES}
    return (
        '<section id="settings"><h2>Settings and data</h2>'
        f"{_pairs('Configuration', config)}{_pairs('Summary', plain)}</section>"
    )


def _pairs(title: str, values: Mapping[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, str):
            return value
        return json.dumps(value, indent=2, default=str, ensure_ascii=False)

    rows = [(text(name), text(show(value))) for name, value in values.items()]
    return (
        f'<details><summary>{title}</summary><div class="inside scroll">'
        f"{table((), rows, class_='config')}</div></details>"
    )


def _table_of_metrics(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    stride = math.ceil(len(rows) / _MAX_TABLE_ROWS)
    kept = rows[::stride]
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return number(value)
        return "–" if value is None else text(value)

    cells = [[cell(row.get(name)) for name in names] for row in kept]
    note = "" if stride == 1 else f", every {stride}th of {len(rows)}"
    return (
        f"<details><summary>Metrics as a table ({len(kept)} steps{note})</summary>"
        f'<div class="inside scroll">{table(names, cells, has_names=False)}</div></details>'
    )
