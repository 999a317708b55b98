"""Takes the pictures of docs/viewer.md from real runs, and says how quickly the page opens.

    python scripts/screenshots.py --runs runs/tiny-seed0 runs/tiny-seed0-b

The first run, made with --rl.keep-entropies, is shown alone, both are compared. What is shown is
chosen by rules, so other runs give pictures of the same kind. Needs chromium and its driver
(scripts/install_test_tools.sh) and selenium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-proxy-server", "--hide-scrollbars"),
)
DESKTOP, PHONE = (1280, 800, 1.0), (390, 844, 1.0)
LIMIT_S = 2.0
"""How soon the list has to be there."""
LIMIT_BYTES = 10e6
NUM_OPENINGS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", nargs=2, type=Path, required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    command = [sys.executable, "-m", "nanorl", "view", *map(str, given.runs)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().split("   ")[0].split(": ")[-1]
        with tempfile.TemporaryDirectory() as profile:
            browser = open_browser(profile)
            try:
                take_all(browser, address, given.out)
                measure(browser, address)
            finally:
                browser.quit()
    finally:
        server.terminate()
        server.wait()


def open_browser(profile: str) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    driver = webdriver.ChromeService(shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=driver)


def take_all(browser: webdriver.Chrome, address: str, out: Path) -> None:
    root, _, key = address.partition("#key=")

    def ask(path: str, **query: Any) -> Any:
        url, good = f"{root}api/{path}?{urlencode(query)}", {"Authorization": f"Bearer {key}"}
        with urllib.request.urlopen(urllib.request.Request(url, headers=good)) as answer:
            return json.load(answer)

    first = ask("runs")[0]["name"]
    place = {"run": first, "phase": "rl"}
    rows = ask("rollouts", **place, outcome="wrong", order="newest", limit=200)["rows"]
    rows.sort(key=lambda row: -row["num_turns"])
    recorded = (
        row for row in rows if "entropy" in ask("rollout", **place, id=row["id"])["recorded"]
    )
    wrong = next(recorded)
    shown = {"view": "rollouts", **place, "id": wrong["id"]}
    pictures: dict[str, tuple[dict[str, str], str, tuple[int, int, float]]] = {
        "rollout": (shown, ".turn", DESKTOP),
        "tokens": (shown | {"mode": "tokens"}, ".tk.sampled", DESKTOP),
        "group": ({"view": "group", **place, "group": wrong["group"]}, ".column", DESKTOP),
        "changes": (changed_task(ask, first), ".changes ins", DESKTOP),
        "phone": (shown, ".turn", PHONE),
    }
    for name, (where, selector, size) in pictures.items():
        look(browser, address, where, selector, size)
        if name == "tokens":
            colour_by(browser, "entropy")
        file = out / f"view_{name}.png"
        browser.save_screenshot(str(file))
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def changed_task(ask: Callable[..., Any], run: str) -> dict[str, str]:
    """A held-out task that was wrong before the training and is right after it."""
    wrong = ask("rollouts", run=run, phase="before", outcome="wrong", limit=500)["rows"]
    right = ask("rollouts", run=run, phase="after", outcome="right", limit=500)["rows"]
    learned = {row["task_id"]: row["id"] for row in right}
    old = next(row for row in wrong if row["task_id"] in learned)
    names = {
        side: json.dumps([run, phase, rollout_id], separators=(",", ":"))
        for side, phase, rollout_id in (
            ("a", "before", old["id"]),
            ("b", "after", learned[old["task_id"]]),
        )
    }
    return {"view": "task", "task": old["task_id"], "mode": "changes", **names}


def look(
    browser: webdriver.Chrome,
    address: str,
    where: dict[str, str],
    selector: str,
    size: tuple[int, int, float],
) -> None:
    width, height, scale = size
    shape = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    browser.get("about:blank")
    browser.get(f"{address}&{urlencode(where)}")
    WebDriverWait(browser, 30, 0.05).until(
        lambda _: browser.execute_script(f"return document.querySelector({json.dumps(selector)})")
    )
    time.sleep(0.5)  # what comes after it: a picture is not a test


def colour_by(browser: webdriver.Chrome, name: str) -> None:
    browser.execute_script(
        "const by = document.querySelector('.paint select');"
        f"by.value = '{name}'; by.dispatchEvent(new Event('change', {{bubbles: true}}));"
        "document.querySelector('.paint').scrollIntoView();"
        "[...document.querySelectorAll('.tk[data-value]')][3].focus({preventScroll: true});"
    )


def measure(browser: webdriver.Chrome, address: str) -> None:
    """From the start of the navigation to the first line of the list, in the browser's own time."""
    script = (
        "return document.querySelector('.row') && [performance.now(), "
        "performance.getEntriesByType('resource').reduce((sum, one) => sum + one.transferSize, 0)]"
    )
    times, sizes = [], []
    for _ in range(NUM_OPENINGS):
        browser.get("about:blank")
        browser.get(f"{address}&view=rollouts")
        found = WebDriverWait(browser, 30, 0.005).until(lambda _: browser.execute_script(script))
        times.append(found[0] / 1000)
        sizes.append(found[1])
    median = statistics.median(times)
    count = browser.execute_script("return document.getElementById('count').textContent")
    print(f"{count}: open after {median:.2f} s (median of {NUM_OPENINGS}), {max(sizes):,} bytes")
    if median > LIMIT_S or max(sizes) > LIMIT_BYTES:
        raise SystemExit(f"the page must be open within {LIMIT_S} s and {LIMIT_BYTES:,.0f} bytes")


if __name__ == "__main__":
    main()
