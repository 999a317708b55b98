"""The viewer in a real browser: what a person finds, opens, compares and follows there, and that
nothing which a model or a tool wrote is ever more than text."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import make_rollout, make_task, served, small_run, spans_of, store_step, write_run

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, of the extra dev")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs chromium and its driver: scripts/install_test_tools.sh"
)
from selenium.webdriver.common.keys import Keys  # noqa: E402 - after the check
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-proxy-server", "--window-size=1300,900"),
)
HOSTILE = (
    "<script>window.canary = 1</script><img src=x onerror='window.canary = 2'>"
    "</pre></div><h1>forged</h1><a href='javascript:window.canary=3'>x</a>"
)
ANSI = "\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07"
BIDI = "user\u202etxt.exe\u202c שלום עולם \u2066x\u2069"


class Page:
    """A browser with what the tests ask of it."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))

    def open(self, address: str, **place: str) -> None:
        self.leave()  # a change behind the # alone would load nothing
        words = "&".join(f"{name}={value}" for name, value in place.items())
        self.driver.get(f"{address}&{words}")

    def leave(self) -> None:
        self.driver.get("about:blank")

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def text(self, selector: str) -> str:
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def all(self, selector: str) -> list[str]:
        words = json.dumps(selector)
        return self.run(f"[...document.querySelectorAll({words})].map((one) => one.innerText)")

    def click(self, selector: str) -> None:
        self.wait(lambda: self.run(f"!!document.querySelector({json.dumps(selector)})"))
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def choose(self, name: str, value: str) -> None:
        field = f"document.getElementById('filters').elements.{name}"
        self.run(f"{field}.value = {json.dumps(value)}")
        self.run(f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def press(self, *keys: str) -> None:
        self.driver.switch_to.active_element.send_keys(*keys)

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> Any:
        return WebDriverWait(self, seconds, 0.05).until(lambda _: condition())

    def wait_for(self, selector: str, text: str) -> None:
        self.wait(lambda: text in self.text(selector))

    @property
    def rows(self) -> list[str]:
        return self.run("[...document.querySelectorAll('.row')].map((one) => one.dataset.id)")

    @property
    def errors(self) -> list[str]:
        return [line["message"] for line in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.driver.quit()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of the same tasks, one with texts that want to be more than text, one that will go
    on, and one of 2,000 rollouts."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = small_run(folder / "first"), small_run(folder / "second", last_is_right=False)
    hostile, task = write_run(folder / "hostile"), make_task(HOSTILE + BIDI + "\ud800", HOSTILE)
    output = "fifteen letters\n" * 65_535 + "the end of a MiB"
    rollouts = [
        make_rollout(task, "hostile", [(HOSTILE + ANSI, BIDI), ("end", "")], error=HOSTILE + ANSI),
        make_rollout(task, "<b id=named>", [("x", "")], metrics={HOSTILE: 1.0}),
        make_rollout(make_task("long?"), "long", [("go", output), ("end", "")]),
        make_rollout(make_task("tree?"), "tree", [("end", "")]),
    ]
    before = spans_of("tree?", [("what came before", "x")])
    before.is_history = True
    rollouts[-1].branches = [before, spans_of("a part", [("what a helper said", "")])]
    store_step(hostile, rollouts, step=0, tasks=[task])
    big, many = write_run(folder / "big"), make_task("many?")
    rollouts = [make_rollout(many, f"r{number:04d}", [("7", "")]) for number in range(2000)]
    store_step(big, rollouts, step=0, tasks=[many])
    return [first, second, hostile, small_run(folder / "live"), big]


@pytest.fixture(scope="module")
def address(runs: list[Path]) -> Iterator[str]:
    with served(*runs) as (address, _):
        yield address


@pytest.fixture(autouse=True)
def without_errors(page: Page) -> Iterator[None]:
    """Whatever a test does, the page's own script must not fail and its policy must not be hit."""
    page.errors  # noqa: B018 - those of an earlier page
    yield
    assert page.errors == []


def test_rollouts_are_filtered_by_every_choice(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="first")
    page.wait_for("#count", "14 rollouts")
    page.choose("outcome", "wrong")
    page.wait_for("#count", "8 rollouts")
    assert {"✗ wrong"} == set(page.all(".row .outcome")), "a sign and a word, not a colour alone"
    page.choose("kind", "primes")
    page.wait_for("#count", "5 rollouts")
    page.choose("steps", "2")
    page.wait(lambda: page.rows == ["s2-primes-m1"])
    assert "steps=2" in page.driver.current_url, "the view has a link of its own"
    for name in ("outcome", "kind", "steps"):
        page.choose(name, "")
    page.choose("text", "it is 97")
    page.wait_for("#count", "1 of 14 have it")
    assert page.rows == ["s2-primes-m0"]
    page.choose("text", "")
    page.choose("order", "best")
    page.wait(lambda: page.rows[:1] == ["s2-sums-m0"])
    page.choose("slice", "turns=2, success, kind=primes")
    page.wait(lambda: page.rows == ["s2-primes-m0"])
    page.choose("slice", "")
    page.choose("phase", "after")
    page.wait(lambda: page.rows == ["eval-after-0"])


def test_a_rollout_opens_with_question_answer_reward_turns_and_tokens(
    page: Page, address: str
) -> None:
    page.open(address, view="rollouts", run="first", order="best", kind="primes")
    page.click(".row")
    page.wait_for("#reader .head", "Which prime?")
    head = page.text("#reader .head")
    for part in ("✓ right", "Expected answer", "97", "Reward", "format", "0.5", "Advantage"):
        assert part in head
    assert "+0.5" in head and "s2-primes" not in head
    page.click("#reader .head summary")
    page.wait_for("#reader .head", "s2-primes")
    assert page.all(".step.from-agent .said") == ["I compute it.", "It is 97."]
    assert page.all(".step.from-tool .said") == ["a result of the tool"]
    page.press("t")
    page.wait(lambda: "".join(page.all(".tk.sampled")).startswith("I compute it."))
    style = "getComputedStyle(document.querySelector('.tk.{}')).borderBottomStyle"
    assert page.run(style.format("sampled")) == "solid" != page.run(style.format("given"))
    for by, value in (("advantage", "0.5"), ("gap", "0.25"), ("entropy", "0.5"), ("logp", "−")):
        field = "document.querySelector('.paint select')"
        page.run(f"{field}.value = '{by}'")
        page.run(f"{field}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        shown = page.run(
            "[...document.querySelectorAll('.tk')].map((one) => one.dataset.value ?? '')"
        )
        assert sum(one.startswith(value) for one in shown) > 10, by
    page.run("document.querySelector('.tk.sampled').focus()")
    page.press(Keys.ARROW_RIGHT)
    for part in ("sampled", "log-prob", "advantage +0.5", "gap +0.25", "version 5"):
        assert part in page.text(".readout").replace("\n", " ")


def test_the_numbers_of_a_token_cover_no_token(page: Page, address: str) -> None:
    page.driver.set_window_size(1300, 420)
    page.open(address, view="rollouts", run="first", id="s0-primes-m1")
    page.wait_for("#reader .head", "Which prime?")
    page.press("t")
    page.wait(lambda: len(page.all(".tk")) > 40)
    for place in (0, 30, -1):
        page.run(f"[...document.querySelectorAll('.tk')].at({place}).focus()")
        box = "document.querySelector('.readout').getBoundingClientRect()"
        flow = "document.querySelector('.flow').getBoundingClientRect()"
        assert page.run(f"{box}.top") >= page.run(f"{flow}.bottom"), place
    page.driver.set_window_size(1300, 900)


def test_a_group_stands_side_by_side(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="first", id="s0-primes-m1")
    page.wait_for("#reader .head", "Which prime?")
    page.press("g")
    page.wait(lambda: len(page.all(".column")) == 2)
    left, right = page.run(
        "[...document.querySelectorAll('.column')].map((one) => one.getBoundingClientRect().left)"
    )
    assert left < right
    first, second = page.all(".column")
    assert "It is 91." in first and "It is 90." in second and "−0.5" in second


def test_two_runs_are_compared_on_one_task(page: Page, address: str) -> None:
    page.open(address, view="runs")
    page.wait_for("#overview", "second against first")
    assert "0 won, 1 lost" in page.text("#overview")
    page.click("#overview table.tasks a")
    page.wait(lambda: len(page.all(".column")) == 2)
    page.wait(lambda: all("It is" in page.text(f".side-{side}") for side in "ab"))
    first, second = page.text(".side-a"), page.text(".side-b")
    assert "first, After RL" in first and "✓ right" in first and "It is 7." in first
    assert "second, After RL" in second and "✗ wrong" in second and "It is 8." in second
    page.click(".actions a[href*='mode=changes']")
    page.wait_for(".changes", "From A")
    assert page.all(".changes pre del") == ["7"] and page.all(".changes pre ins") == ["8"]
    decoration = "getComputedStyle(document.querySelector('.changes pre {}')).textDecorationLine"
    assert page.run(decoration.format("del")) == "line-through", "not told by colour alone"
    assert page.run(decoration.format("ins")) == "underline"


def test_the_first_and_the_last_attempt_and_those_between(page: Page, address: str) -> None:
    task = make_task("Which prime?", "97", kind="primes").task_id
    place = {"view": "task", "task": task}
    page.open(
        address, **place, a='["first","rl","s0-primes-m0"]', b='["first","rl","s2-primes-m0"]'
    )
    page.wait_for(".side-b", "It is 97.")
    page.wait_for(".side-a", "It is 91.")
    page.press("[")
    page.wait_for(".side-b", "first, Training, step 1")


def test_texts_that_want_to_be_more_are_shown_as_text(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="hostile")
    page.wait(lambda: len(page.rows) == 4)
    assert "<b id=named>" in page.rows
    for name in ("hostile", "<b id=named>"):
        for mode in ("", "tokens"):
            index = page.rows.index(name)
            page.run(f"document.querySelectorAll('.row')[{index}].click()")
            page.wait_for("#reader .head", "<script>window.canary = 1</script>")
            if mode:
                page.press("t")
                page.wait(lambda: page.all(".tk"))
    page.open(address, view="rollouts", run="hostile", id="hostile")
    page.wait_for("#reader .body", "end")
    said = page.text("#reader .body")
    assert HOSTILE in said and "␛[31mred␛[0m␇ ␛]0;title␇" in said
    assert "U+202E" in said and "U+2066" in said and "שלום עולם" in said
    assert "U+D800" in page.text("#reader .head"), "half a character"
    assert HOSTILE in page.text("#reader .wanted") and HOSTILE in page.text("#reader .error")
    page.press("g")
    page.wait_for("#wide .column", "canary")
    page.open(address, view="task", task=make_task(HOSTILE + BIDI + "\ud800", HOSTILE).task_id)
    page.wait_for("#wide .column", "canary")
    assert page.run("window.canary ?? 'unset'") == "unset"
    assert page.run("document.querySelectorAll('#named, main h1 + h1, [onerror]').length") == 0
    assert page.run("document.scripts.length") == 1
    direction = "getComputedStyle(document.querySelector('.said')).unicodeBidi"
    assert page.run(direction) == "plaintext"


def test_nothing_can_become_markup_even_by_mistake(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="first")
    page.wait_for("#count", "14 rollouts")
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
    ):
        tried = f"(() => {{ try {{ {attempt}; return 'done' }} catch (e) {{ return e.name }} }})()"
        assert page.run(tried) in "TypeError", attempt
    page.run(
        "document.body.append(Object.assign(document.createElement('img'), {src: 'http://x/'}))"
    )
    page.wait(lambda: any("Content Security Policy" in line for line in page.errors))
    page.leave()
    assert page.errors is not None, "those that were wanted are gone"


def test_a_megabyte_of_output_is_shown_in_parts(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="hostile", id="long")
    page.wait_for("#reader .body", "end")
    assert len(page.text("#reader .body")) < 10_000
    assert "of 1,048,5" in page.text(".more")
    length = "document.querySelector('.said.out').textContent.length"
    for number in range(1, 6):
        page.click(".more button")
        shown = min(4_000 + number * 250_000, 16 * 65_536)
        page.wait(lambda shown=shown: page.run(length) >= shown - 1)
    end = "document.querySelector('.said.out').textContent.slice(-20).trim()"
    assert page.run(end).endswith("the end of a MiB") and not page.text(".more")


def test_compacted_histories_and_helpers_make_a_tree(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="hostile", id="tree")
    page.wait_for(".tree", "history 1, then compacted")
    assert "branch-1" in page.text(".tree")
    sections = page.all(".sequence")
    assert ["before" in sections[0], "end" in sections[1], "helper" in sections[2]] == [True] * 3


def test_a_run_that_goes_on_is_followed(page: Page, address: str, runs: list[Path]) -> None:
    run, task = runs[3], make_task("What is 6 * 7?")
    page.open(address, view="rollouts", run="live", id="cut")
    page.wait_for("#reader .head", "cut off")
    page.wait_for("#count", "14 rollouts")
    for step in (3, 4):
        name = f"new-{step}"
        store_step(run, [make_rollout(task, name, [("new", "")])], step=step, tasks=[task])
        page.wait(lambda name=name: page.rows[:1] == [name])
    page.wait_for("#count", "16 rollouts")
    assert page.text("#status") == "goes on"
    assert "cut off" in page.text("#reader .head"), "what is read stays"
    page.open(address, view="overview", run="live")
    page.wait_for("#overview", "Success in training")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 3, "success": 0.875}) + "\n")
    page.wait_for("#overview", "87.5%")


def test_a_run_that_has_just_begun_is_followed_from_its_first_rollout(
    page: Page, tmp_path: Path
) -> None:
    run, task = write_run(tmp_path / "new"), make_task("What is 6 * 7?")
    with served(run) as (address, _):
        page.open(address, view="rollouts", run="new")
        page.wait_for("#reader", "is not there yet")
        store_step(run, [make_rollout(task, "one", [("42", "")])], step=0, tasks=[task])
        page.wait(lambda: page.rows == ["one"])
        page.leave()
        page.errors  # noqa: B018 - the browser's own, of each answer that there is nothing yet


HOLD = """(() => {
    const send = XMLHttpRequest.prototype.send, open = XMLHttpRequest.prototype.open;
    XMLHttpRequest.prototype.open = function (method, address) {
        this.address = address;
        open.call(this, method, address);
    };
    XMLHttpRequest.prototype.send = function () {
        if (!this.address.includes(HELD)) return send.call(this);
        this.addEventListener("loadend", () => setTimeout(() => { window.isThere = true; }));
        window.letGo = () => send.call(this);
    };
    const ask = window.fetch;
    window.fetch = async (address, options) => {
        if (address.includes(HELD)) await new Promise((go) => { window.letGo = go; });
        const answer = await ask(address, options);
        const json = answer.json.bind(answer);
        answer.json = async () => {
            const data = await json();
            if (address.includes(HELD)) setTimeout(() => { window.isThere = true; });
            return data;
        };
        return answer;
    };
})()"""


def hold(page: Page, words: str) -> Callable[[], None]:
    """Hold up the question whose address has these words. Calling what is returned lets it go, and
    waits until the page has had its answer."""
    page.run(HOLD.replace("HELD", json.dumps(words)))

    def let_go() -> None:
        page.wait(lambda: page.run("!!window.letGo"))
        page.run("window.letGo()")
        page.wait(lambda: page.run("window.isThere"))

    return let_go


def turn_to(page: Page, run: str) -> None:
    page.run(f"(document.getElementById('run').value = {json.dumps(run)})")
    page.run("document.getElementById('run').dispatchEvent(new Event('change'))")


def test_an_answer_that_comes_late_is_not_shown_over_a_newer_one(page: Page, address: str) -> None:
    page.open(address, view="overview", run="second")
    page.wait_for("#overview", "Success in training")
    let_go = hold(page, "overview?run=first")
    turn_to(page, "first")
    page.click('[data-view="runs"]')
    page.wait_for("#overview", "second against first")
    let_go()
    assert "second against first" in page.text("#overview")

    page.open(address, view="rollouts", run="first")
    page.wait(lambda: page.rows)
    row = page.rows[0]
    let_go = hold(page, "facets?run=second")
    turn_to(page, "second")
    page.click(f'[data-id="{row}"]')
    page.wait(lambda: page.all("#reader .head"))
    let_go()
    assert page.all("#reader .head") and page.run("document.getElementById('run').value") == "first"


def test_two_thousand_rollouts_are_one_small_page(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="big")
    page.wait_for("#count", "2,000 rollouts")
    page.wait(lambda: page.rows)
    sizes = "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.{}, 0)"
    assert page.run(sizes.format("transferSize")) < 1e6, "of the 10 MB that it may be"
    assert page.run("document.querySelectorAll('.row').length") < 60
    first = page.rows[0]
    page.run("(document.getElementById('list').scrollTop = 1e9)")
    page.wait(lambda: "r0000" in page.rows and first not in page.rows)


def test_everything_can_be_done_with_the_keyboard(page: Page, address: str) -> None:
    page.open(address, view="rollouts", run="first", order="oldest")
    page.wait_for("#count", "14 rollouts")
    opened = []
    for key in "jjjk":
        page.press(key)
        page.wait(lambda: page.run("document.title").split()[0] not in [*opened[-1:], "rollouts"])
        opened.append(page.run("document.title").split()[0])
    assert opened == ["s0-primes-m0", "s0-primes-m1", "s0-sums-m0", "s0-primes-m1"]
    page.press("/")
    page.press("broken")
    page.wait_for("#count", "1 of 14 have it")
    page.press(Keys.ESCAPE)
    assert page.run("document.activeElement.id") == "list"
    page.press("?")
    page.wait_for("#keys", "its group, side by side")
    page.press(Keys.ESCAPE)
    page.wait(lambda: not page.run("document.getElementById('keys').open"))
    page.press("o")
    page.wait_for("#overview", "Held-out success")


def test_a_phone_shows_one_thing_at_a_time_without_scrolling_sideways(
    page: Page, address: str
) -> None:
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for view in ("overview", "rollouts", "runs"):
            page.open(address, view=view, run="first")
            page.wait(lambda: page.rows or "success" in page.text("#overview"))
            check_width(page)
        page.open(address, view="rollouts", run="hostile", id="hostile", mode="tokens")
        page.wait(lambda: page.all(".tk"))
        check_width(page)
        assert not page.run("document.getElementById('side').offsetParent")
        page.click(".actions .back")
        page.wait(lambda: page.run("!!document.getElementById('side').offsetParent"))
        page.open(address, view="group", run="first", phase="rl", group="s0-primes")
        page.wait(lambda: len(page.all(".column")) == 2)
        check_width(page)
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def check_width(page: Page) -> None:
    wide = "[document.documentElement.scrollWidth, innerWidth]"
    time.sleep(0.1)  # the browser lays the page out
    scroll, inner = page.run(wide)
    assert scroll <= inner == 390


def test_without_scripts_the_page_says_where_to_read(page: Page, address: str) -> None:
    page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        page.leave()  # a change behind the # alone would load nothing
        page.driver.get(address)
        assert "report.html" in page.driver.find_element("tag name", "noscript").text
    finally:
        page.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
