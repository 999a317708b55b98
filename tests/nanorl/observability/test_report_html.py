"""The report: nothing untrusted becomes markup, nothing is loaded, every token is shown once."""

import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from viewer_runs import TOKENIZER, small_run

from nanorl.inspection import viewer
from nanorl.observability.report import html
from nanorl.observability.report.charts import (
    NUM_COLOURS,
    Chart,
    Series,
    build_charts,
    line_chart,
    number,
    stacked_bars,
    wilson_interval,
)
from nanorl.observability.report.examples import (
    Example,
    Rate,
    choose_entries,
    collect_examples,
    rates_by_stage,
)
from nanorl.observability.report.html import SHADE_FROM_NATS, write_report
from nanorl.observability.report.markup import table
from nanorl.observability.report.trace import TokenView, split_text, trace_rollout
from nanorl.observability.store import Entry, RolloutStore
from nanorl.task import Task
from nanorl.types import Rollout, Status, TurnSpan

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' style='background:url(http://evil)'",
    "</pre></div></details></main><h1>forged</h1>",
    "<!-- <style>body{display:none}</style> ]]> &lt;b&gt; &#60;",
    "\x00\x1b[2J\u202egnp.exe\u2066 \ud800",
]


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def make_rollout(turns: list[tuple[str, str]], prompt: str = "Q", name: str = "t", **fields):
    tokens = list(prompt.encode("utf-8", "replace"))
    mask = [0] * len(tokens)
    spans = []
    for action, observation in turns:
        start = len(tokens)
        tokens += action.encode("utf-8", "replace")
        mask += [1] * (len(tokens) - start)
        end = len(tokens)
        tokens += observation.encode("utf-8", "replace")
        mask += [0] * (len(tokens) - end)
        spans.append(TurnSpan(action_start=start, action_end=end, observation_end=len(tokens)))
    rng = random.Random(0)
    return Rollout(
        **{
            "task_id": name,
            "group_id": "g",
            "rollout_id": "r",
            "tokens": tokens,
            "loss_mask": mask,
            "logps": [-5 * rng.random() * m for m in mask],
            "versions": [3 if m else -1 for m in mask],
            "turn_spans": spans,
            "turn_rewards": [0.0] * (len(spans) - 1) + [1.0],
            "metrics": {"tool_s": 0.5},
        }
        | fields
    )


def example(rollout: Rollout, kind: str = "t", answer: str = "43") -> Example:
    task = Task(task_id=rollout.task_id, kind=kind, prompt="Q", answer=answer)
    return Example(rollout=rollout, task=task, when="step 2")


SUMMARY = {
    "preset": "tiny",
    "seed": 1,
    "steps": 3,
    "heldout_success_untrained": 0.0,
    "heldout_success_before": 0.5,
    "heldout_success_after": 0.9,
    "heldout_success_no_tool": None,
    "heldout_n": 400,
    "heldout_n_untrained": 28,
    "per_type": {
        "sum": {"before": 0.5, "after": 0.75, "n": 8, "n_after": 8},
        "count": {"before": 1, "after": 0},
    },
}
ROWS = [
    {"step": s, "success": s / 4, "logp_gap_max": 1e-5, "wait_s": 2, "train_s": 1, "q": s}
    for s in range(3)
]


class Page(HTMLParser):
    """Checks nesting, and collects tags, attributes and text as a browser would see them."""

    VOID = ("meta", "input", "br")

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.by_class: dict[str, str] = {}
        self._classes: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"unclosed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
            self._classes.append(dict(attrs).get("class") or "")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()
        self._classes.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            return
        self.text += data
        for classes in self._classes:
            for name in classes.split():
                self.by_class[name] = self.by_class.get(name, "") + data


def render(tmp_path, **changes) -> tuple[str, Page]:
    arguments = {
        "config": {"lr": 1e-3, "nested": {"a": [1, 2]}},
        "summary": SUMMARY,
        "metrics_rows": ROWS,
        "examples": [example(make_rollout([("think", "out"), ("answer 42", "")]))],
        "training_rates": {"t": [Rate(first=0, last=2, num_right=3, num=4)]},
        "decode": decode,
    }
    write_report(tmp_path / "report.html", **(arguments | changes))
    html = (tmp_path / "report.html").read_text("utf-8")
    return html, Page(html)


def test_the_page_is_whole_and_says_the_main_numbers(tmp_path):
    _, page = render(tmp_path)
    for part in ("90.0%", "not measured", "+40.0", "of 400", "of 28", "+25.0", "-100.0", "of 8"):
        assert part in page.text
    for part in ("After RL", "expected answer: 43", "steps 0–2: 75% of 4"):
        assert part in page.text
    assert page.text.index("count") < page.text.index("sum")  # task types in a fixed order
    labels = " ".join(value for name, value in page.attributes if name == "aria-label")
    # Newcombe's formula by hand: 0 of 28 gives 0 to 12.1 %, 360 of 400 gives 86.7 to 92.6 %.
    assert "untrained: 0.0% of 28 tasks, 95 % interval 0.0% to 12.1%" in labels
    assert "after RL: 90.0% of 400 tasks, 95 % interval 86.7% to 92.6%" in labels
    assert "Success, steps 0 to 2: success from 0.0% to 50.0%" in labels
    assert page.tags.count("figure") == 4  # success, gap, time, and q, which no rule names


@pytest.mark.parametrize("hostile", HOSTILE)
def test_untrusted_text_never_becomes_markup(tmp_path, hostile):
    _, clean_page = render(tmp_path)
    rollout = make_rollout(
        [(hostile, hostile), ("a", "")],
        prompt=hostile,
        name=hostile,
        rollout_id=hostile,
        metrics={hostile: 1.0},
    )
    html, page = render(
        tmp_path,
        examples=[example(rollout, kind=hostile, answer=hostile)],
        training_rates={hostile: [Rate(first=0, last=0, num_right=0, num=1)]},
        config={hostile: hostile, "deep": {hostile: [hostile]}},
        summary=SUMMARY
        | {"model": hostile, "preset": hostile, "per_type": {hostile: {"before": 1, "after": 1}}},
        metrics_rows=[{"step": 0, "wait_s": 1.0, hostile: 1.0, "note": hostile}],
    )
    assert set(page.tags) <= set(clean_page.tags)
    names = {name for name, _ in page.attributes}
    assert names <= {name for name, _ in clean_page.attributes} | {"open"}
    assert not any(name.startswith("on") for name in names)
    for character in "\x00\x1b\u202e\u2066":
        assert character not in html
    if hostile.isprintable():
        assert hostile in page.by_class["model"]
        assert hostile in page.by_class["tool"]
        assert hostile in page.by_class["prompt"]


def test_the_page_loads_nothing_and_runs_nothing(tmp_path):
    html, page = render(tmp_path)
    assert not {"script", "link", "iframe", "object", "img", "image", "use"} & set(page.tags)
    assert not {"src", "action", "xlink:href", "style"} & {name for name, _ in page.attributes}
    assert all(value.startswith("#") for name, value in page.attributes if name == "href")
    assert (
        "url(" not in html
        and "@import" not in html
        and "http" not in html.replace("http-equiv", "")
    )
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


def test_the_same_run_gives_the_same_bytes(tmp_path):
    assert render(tmp_path)[0] == render(tmp_path)[0]


def test_a_run_that_only_began_has_a_report(tmp_path):
    _, page = render(tmp_path, summary={}, metrics_rows=[], examples=[], config={})
    assert "No RL step was logged" in page.text


def test_rollouts_of_every_status_and_odd_numbers_are_shown(tmp_path):
    nan = float("nan")
    rollouts = [make_rollout([("a", "b")], status=status, reward=nan) for status in Status]
    rollouts.append(make_rollout([], prompt="only a prompt"))
    rollouts.append(make_rollout([("abc", "")], logps=[0.0, nan, float("-inf"), -1e9]))
    _, page = render(tmp_path, examples=[example(rollout) for rollout in rollouts])
    assert "truncated_context" in page.text
    assert "only a prompt" in page.by_class["prompt"]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_token_texts_join_to_the_decoded_text(text):
    ids = list(text.encode("utf-8"))
    pieces = split_text(ids, decode)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decode(ids) == text


def test_broken_bytes_are_shown_too():
    for ids in ([0xF0, 0x9F], [65, 0xFF, 66], [0xC3]):
        assert "".join(split_text(ids, decode)) == decode(ids)


def test_only_sampled_tokens_count_for_a_mean_and_for_the_versions_shown():
    rollout = Rollout(
        task_id="t",
        group_id="g",
        rollout_id="r",
        tokens=[65, 66, 67, 68],
        loss_mask=[0, 1, 0, 1],
        logps=[0.0, -1.0, 0.0, -3.0],
        versions=[-1, 4, -1, 5],
        turn_spans=[TurnSpan(action_start=1, action_end=4, observation_end=4)],
    )

    def decode(ids: list[int]) -> str:
        return "".join(map(chr, ids))

    prompt, model = trace_rollout(rollout, decode).segments
    assert (prompt.mean_logp, prompt.num_sampled) == (None, 0)
    assert (model.mean_logp, model.num_sampled) == (-2.0, 2)
    assert html._versions(rollout) == "4–5"


def test_a_token_is_the_darker_the_less_likely_it_was():
    def shade(logp: float) -> str:
        token = TokenView(token_id=5, text="x", is_sampled=True, logp=logp, version=3)
        return html._token(token).partition('class="t ')[2].partition('"')[0]

    assert shade(0.0) == "p0"
    for level, nats in enumerate(SHADE_FROM_NATS, start=1):
        assert (shade(-nats), shade(-nats + 1e-6)) == (f"p{level}", f"p{level - 1}")


def test_the_viewer_shades_tokens_from_the_same_surprises_on():
    script = Path(viewer.__file__).parent / "static" / "tokens.js"
    found = re.search(r"^const NATS = \[(.*)\];$", script.read_text(), re.M)
    assert tuple(map(float, found[1].split(", "))) == SHADE_FROM_NATS


def test_a_table_escapes_its_titles_and_names_its_rows():
    named = table(("<a>", "b"), [("<i>x</i>", "1")], class_="c")
    assert named == (
        '<table class="c"><thead><tr><th scope="col">&lt;a&gt;</th><th scope="col">b</th></tr>'
        '</thead><tbody><tr><th scope="row"><i>x</i></th><td>1</td></tr></tbody></table>'
    )
    assert table((), [("1",)], has_names=False) == (
        "<table><tbody><tr><td>1</td></tr></tbody></table>"
    )


def test_the_style_sheet_has_every_shade_and_every_colour(tmp_path):
    sheet = render(tmp_path)[0].partition("<style>")[2].partition("</style>")[0]
    shades = {int(level) for level in re.findall(r"\.model:hover \.p(\d)\b", sheet)}
    assert shades == set(range(1, len(SHADE_FROM_NATS) + 1))
    assert {int(i) for i in re.findall(r"^\.c(\d) \{", sheet, re.M)} == set(range(NUM_COLOURS))
    for i in range(NUM_COLOURS):
        assert sheet.count(f"--c{i}: #") == 2  # light and dark


def test_a_reward_that_is_the_success_shares_its_chart(tmp_path):
    alike = [row | {"reward": row["success"]} for row in ROWS]
    html, _ = render(tmp_path, metrics_rows=alike)
    assert html.count("<figcaption>Success, which is the reward") == 1
    assert "<figcaption>Reward" not in html
    other = [*alike[:-1], alike[-1] | {"reward": 0.25}]
    html, _ = render(tmp_path, metrics_rows=other)
    assert "<figcaption>Success<" in html.replace(" <", "<") and "<figcaption>Reward" in html


def test_what_is_zero_in_every_step_is_a_sentence_and_no_chart(tmp_path):
    flat = [row | {"logp_gap_max": 0.0, "staleness_max": 0} for row in ROWS]
    html, page = render(tmp_path, metrics_rows=flat)
    said = "0 in every step, and so not drawn: Log-prob gap, engine against trainer; Staleness."
    assert said in page.text
    assert "<figcaption>Log-prob gap" not in html and "<figcaption>Staleness" not in html


def test_what_is_still_wrong_comes_before_the_curves(tmp_path):
    wrong = replace(example(make_rollout([("no", "")])), part="wrong")
    html, _ = render(tmp_path, examples=[wrong])
    places = [html.index(f'<section id="{name}">') for name in ("outcome", "wrong", "curves")]
    assert places == sorted(places)
    assert html.index('href="#wrong"') < html.index('href="#curves"')


def test_segments_hold_every_token_once_in_order():
    rollout = make_rollout([("act", "obs"), ("more", ""), ("end", "tail")], prompt="ask")
    rollout.tokens += [33]
    rollout.loss_mask += [0]
    rollout.logps += [0.0]
    rollout.versions += [-1]
    trace = trace_rollout(rollout, decode)
    assert [(s.role, s.turn, s.text) for s in trace.segments] == [
        ("prompt", -1, "ask"),
        ("model", 0, "act"),
        ("tool", 0, "obs"),
        ("model", 1, "more"),
        ("model", 2, "end"),
        ("tool", 2, "tail"),
        ("template", 2, "!"),
    ]
    assert [t.token_id for s in trace.segments for t in s.tokens] == rollout.tokens
    assert [t.is_sampled for s in trace.segments for t in s.tokens] == [
        bool(m) for m in rollout.loss_mask
    ]
    assert trace.segments[5 - 1].reward == 1.0
    expected = sum(rollout.logps[3:6]) / 3
    assert trace.segments[1].mean_logp == pytest.approx(expected)


def test_failures_come_first_and_long_pages_stay_moderate(tmp_path):
    right = example(make_rollout([("fine", "")], reward=1.0, rollout_id="good"))
    wrong = example(make_rollout([("x" * 30_000, "y" * 30_000)], reward=0.0, rollout_id="bad"))
    html, page = render(tmp_path, examples=[right, wrong])
    assert page.text.index("bad") < page.text.index("good")
    assert "26000 characters more" in page.text
    assert len(html) < 100_000


def test_what_is_still_wrong_pairs_and_a_group_have_places_of_their_own(tmp_path):
    run = small_run(tmp_path / "run", last_is_right=False)
    with RolloutStore(run / "rollouts.sqlite") as store:
        examples = collect_examples(run, store)
    parts = {
        part: [one.rollout.rollout_id for one in examples if one.part == part]
        for part in ("wrong", "pair", "group")
    }
    assert parts["wrong"] == ["eval-after-0"]
    assert parts["pair"] == ["eval-before-0", "eval-after-0"]
    assert parts["group"] == ["s2-primes-m1", "s2-primes-m0"], "the rewards differ most there"
    html, page = render(
        tmp_path, examples=examples, decode=TOKENIZER.decode, training_rates={}, metrics_rows=[]
    )
    for name in ("wrong", "pairs", "group", "rollouts"):
        assert f'<section id="{name}">' in html and f'<a href="#{name}">' in html
    wrong = html.partition('<section id="wrong">')[2].partition("</section>")[0]
    assert "A held-out question?" in wrong and "expected answer: <b>7</b>" in wrong
    group = html.partition('<section id="group">')[2].partition("</section>")[0]
    assert "advantage +0.5 · format 0.5 · tool_s 0.25" in group and "Which prime?" in group
    assert group.count("<article") == 2 and "script" not in page.tags


def test_the_same_task_is_followed_through_the_evaluations_while_it_learnt(tmp_path):
    run = small_run(tmp_path / "run", last_is_right=False)
    wins = {"late": "0001111", "lost": "1111110", "twice": "0101011", "never": "0000000"}
    tasks = {name: Task(f"{name}?", split="heldout") for name in wins}
    seen = Task("seen?", split="train")
    with RolloutStore(run / "evaluations-rl.sqlite") as store:
        store.add_tasks([*tasks.values(), seen])
        for step in range(7):
            rollouts = [
                make_rollout(
                    [(f"{name} {member} at {step}", "")],
                    name=task.task_id,
                    reward=float(wins.get(name, "1111111")[step]) if member == 0 else 1.0,
                    rollout_id=f"{name}-{step}-{member}",
                )
                for name, task in {"seen": seen, **tasks}.items()
                for member in range(2)
            ]
            store.add_group(rollouts, step=2 * step)
    with RolloutStore(run / "rollouts.sqlite") as store:
        examples = collect_examples(run, store)
    shown = [one for one in examples if one.part == "progress"]
    # Of those that were learnt first the one that stayed learnt; four of seven evaluations each.
    ids = [f"{name}-{step}-0" for name in ("late", "twice") for step in (0, 2, 4, 6)]
    assert [one.rollout.rollout_id for one in shown] == ids
    assert [one.when for one in shown[:4]] == [f"after {n} steps" for n in (0, 4, 8, 12)]
    page, _ = render(tmp_path, examples=examples, decode=TOKENIZER.decode)
    section = page.partition('<section id="followed">')[2].partition("</section>")[0]
    assert section.count("<article") == 8 and section.count("question: <b>late?") == 1
    assert '<a href="#followed">' in page


@pytest.mark.parametrize("part", ["wrong", "pair", "group", "progress"])
def test_no_place_of_the_report_makes_markup_of_text(tmp_path, part):
    _, clean_page = render(tmp_path, examples=[replace(example(make_rollout([])), part=part)])
    for hostile in HOSTILE:
        rollout = make_rollout([(hostile, hostile)], prompt=hostile, name=hostile, error=hostile)
        task = Task(hostile, task_id=hostile, kind=hostile, answer=hostile, split="train")
        shown = Example(rollout=rollout, task=task, when=hostile, part=part)
        html, page = render(tmp_path, examples=[shown])
        names = {name for name, _ in page.attributes}
        assert set(page.tags) <= {*clean_page.tags, "span", "pre", "h4"}
        assert names <= {*(name for name, _ in clean_page.attributes), "title"}
        assert not any(character in html for character in "\x00\x1b\u202e\u2066")


@pytest.mark.parametrize("part", ["", "wrong", "pair", "group", "progress"])
def test_texts_are_cut_sooner_on_a_full_page(tmp_path, monkeypatch, part):
    monkeypatch.setattr(html, "_MAX_ALL_CHARS", 20_000)
    long = "x < y & z > 'w'\n" * 240
    one = replace(example(make_rollout([], prompt=long)), part=part)
    alone = len(render(tmp_path, examples=[one])[0])
    shown, page = render(tmp_path, examples=[one] * 30)
    # By hand: texts of 3,840 characters until 20,000 are full, then 200 of each, escaped to 2.1
    # times their length; all of them would be 240,000.
    assert len(shown) - alone < 2.2 * (20_000 + 3_840 + 30 * 200 * 2) + 30 * 1200
    assert "characters more, see nanorl view" in page.text


def entries(*rows: tuple[str, str, int, float]) -> list[Entry]:
    return [
        Entry(
            rollout_id=name, task_id=f"{kind}-0", group_id="g", step=step, version=step,
            status=Status.FINISHED, reward=reward, num_tokens=1, num_turns=1, content_hash="",
            kind=kind,
        )
        for name, kind, step, reward in rows
    ]  # fmt: skip


def test_every_type_and_stage_is_shown_with_what_went_wrong():
    stored = entries(
        *((f"a{step}{i}", "add", step, float(i == 0)) for step in range(6) for i in range(4)),
        ("c", "count-odd", 5, 0.0),
    )
    chosen = [entry.rollout_id for entry in choose_entries(stored)]
    assert chosen == ["c", "a53", "a52", "a50", "a33", "a32", "a30", "a13", "a12", "a10"]
    rates = rates_by_stage(stored)
    assert [(r.first, r.last, r.num_right, r.num) for r in rates["add"]] == [
        (0, 1, 2, 8), (2, 3, 2, 8), (4, 5, 2, 8),
    ]  # fmt: skip
    assert [(r.first, r.last, r.num) for r in rates["count-odd"]] == [(4, 5, 1)]


def test_every_numeric_metric_gets_a_curve():
    rows = [{"step": 0, "success": 1, "odd/name": 2.0, "deep": {"er": {"x": 1}}, "s": "no"}]
    main, others = build_charts(rows)
    assert [chart.title for _, chart in main] == ["Success"]
    assert [chart.title for _, chart in others] == ["deep/er/x", "odd/name"]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.none() | st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=90),
    st.booleans(),
)
def test_charts_stay_inside_their_frame(values, is_stacked):
    if is_stacked:
        values = [None if value is None else abs(value) for value in values]
    chart = Chart(
        title="x",
        steps=tuple(range(len(values))),
        series=(Series(label="y", values=tuple(values)),),
    )
    svg = (stacked_bars if is_stacked else line_chart)(chart)
    page = Page(svg)
    for name, value in page.attributes:
        if name in ("cx", "x"):
            assert -1 <= float(value) <= 561
        if name in ("cy", "y"):
            assert -1 <= float(value) <= 251


def test_wilson_interval_matches_published_values():
    # Newcombe 1998, table I, method 3 (score without continuity correction).
    for successes, num, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)):
        assert wilson_interval(successes / num, num) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(0 / 20, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(0.5, 0) == (0.0, 1.0)


def test_numbers_are_short():
    shown = [number(v) for v in (0, 3, 1234567, 0.03125, 1.5e-5, 2e-4, 12345.6, float("nan"), None)]
    assert shown == ["0", "3", "1.23e6", "0.0312", "1.5e-5", "2e-4", "12,346", "–", "–"]
