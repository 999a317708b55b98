"""The viewer's side of the server: what it reads out of a run, that it disturbs none, and whom it
answers."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient
from viewer_runs import (
    KEY,
    TOKENIZER,
    make_rollout,
    make_task,
    served,
    small_run,
    spans_of,
    store_step,
    viewed,
    write_run,
)

from nanorl import cli
from nanorl.inspection.viewer.documents import MOST_CHARS
from nanorl.inspection.viewer.runs import find_runs
from nanorl.inspection.viewer.viewer_server import MOST_CONNECTIONS, ViewerServer
from nanorl.observability.report.evaluation import Evaluation
from nanorl.observability.store import RolloutStore, StoreError, open_for_reading
from nanorl.types import Branch

LOCAL = "http://127.0.0.1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return viewed(run)


def ids(client: TestClient, **query: object) -> list[str]:
    asked = {"run": "first", "phase": "rl"} | query
    answer = client.get("/api/rollouts", params=asked)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return [row["id"] for row in answer.json()["rows"]]


def whole(client: TestClient, rollout_id: str, phase: str = "rl") -> dict[str, Any]:
    query = {"run": "first", "phase": phase, "id": rollout_id}
    return client.get("/api/rollout", params=query).json()


def test_lists_are_filtered_and_ordered(client: TestClient) -> None:
    assert len(ids(client)) == 14
    assert ids(client, outcome="failed") == ["broken"] and ids(client, outcome="cut") == ["cut"]
    right = ids(client, outcome="right", order="oldest")
    assert right == ["s0-sums-m0", "s1-sums-m0", "s2-primes-m0", "s2-sums-m0"]
    assert ids(client, slice="step=2, success, kind=primes") == ["s2-primes-m0"]
    assert ids(client, kind="primes", steps="1") == ["s1-primes-m1", "s1-primes-m0"]
    assert len(ids(client, steps="1-2")) == 10 and len(ids(client, steps="-0")) == 4
    assert ids(client, order="worst")[-1] == "broken", "failed ones are neither good nor bad"
    assert ids(client, order="best")[0] == "s2-sums-m0"  # of equals, the newest
    assert ids(client, limit=3, offset=2) == ids(client)[2:5]
    assert ids(client, phase="after") == ["eval-after-0"]
    assert ids(client, phase="before", outcome="right") == []


def test_a_search_finds_what_was_said_read_and_wanted(client: TestClient) -> None:
    assert ids(client, text="IT IS 97.") == ["s2-primes-m0"]
    assert ids(client, text="sandbox <b>died") == ["broken"]
    assert len(ids(client, text="97", kind="primes")) == 6, "the expected answer counts"
    first = client.get(
        "/api/rollouts", params={"run": "first", "phase": "rl", "text": "compute", "limit": 5}
    ).json()
    rest = ids(client, text="compute", offset=first["next"])
    everything = ids(client, text="compute")
    assert [row["id"] for row in first["rows"]] + rest == everything and len(everything) == 12


def test_a_rollout_comes_with_all_that_is_known_of_it(client: TestClient) -> None:
    doc = whole(client, "s0-primes-m1")
    assert (doc["asked"]["text"], doc["answer"]["text"]) == ("Which prime?", "97")
    assert (doc["reward"], doc["parts"], doc["advantage"]) == (0.0, {"format": 0.5}, [-0.5, -0.5])
    assert doc["metrics"] == {"tool_s": 0.25} and doc["outcome"] == "wrong"
    assert doc["files"][0]["name"] == "notes.txt" and doc["recorded"] == [
        *("advantage", "entropy", "gap", "trained_logp")
    ]
    [sequence] = doc["sequences"]
    first, second = sequence["turns"]
    assert sequence["prompt"][-1]["content"]["text"] == "Which prime?"
    assert (first["content"]["text"], second["content"]["text"]) == ("I compute it.", "It is 90.")
    assert [reply["content"]["text"] for reply in first["replies"]] == ["a result of the tool"]
    assert whole(client, "broken")["error"]["text"] == "the sandbox <b>died</b>"
    held = whole(client, "eval-after-0", "after")
    assert held["advantage"] is None and held["recorded"] == [], "no step was made of it"


def test_tokens_have_their_numbers_and_make_up_the_text(client: TestClient, run: Path) -> None:
    with RolloutStore(run / "rollouts.sqlite") as store:
        rollout = store.get("s1-sums-m0")
    query = {"run": "first", "phase": "rl", "id": "s1-sums-m0", "place": 0}
    parts = [
        client.get("/api/tokens", params=query | {"start": start, "end": start + 40}).json()
        for start in range(0, len(rollout.tokens), 40)
    ]
    assert "".join(piece for part in parts for piece in part["text"]) == TOKENIZER.decode(
        rollout.tokens
    )
    assert [token for part in parts for token in part["id"]] == rollout.tokens
    stats = {
        name: [value for part in parts for value in part["stats"][name]]
        for name in ("advantage", "gap", "entropy")
    }
    sampled = [bool(mask) for mask in rollout.loss_mask]
    assert stats["gap"] == [0.25 if one else None for one in sampled]
    assert stats["advantage"] == [0.75 if one else None for one in sampled]
    query["place"] = 7
    assert client.get("/api/tokens", params=query | {"start": 0, "end": 9}).status_code == 404


def test_a_long_text_is_cut_and_its_rest_comes_in_parts(tmp_path: Path) -> None:
    run, task = write_run(tmp_path / "first"), make_task("long?")
    output = "".join(f"line {number}\n" for number in range(20_000))
    store_step(run, [make_rollout(task, "long", [("go", output), ("7", "")])], step=0)
    client = viewed(run)
    [sequence] = whole(client, "long")["sequences"]
    part = sequence["turns"][0]["replies"][0]["content"]
    assert part["text"] == output[:MOST_CHARS] and part["length"] == len(output.rstrip("\n")) + 1
    query = {"run": "first", "phase": "rl", "id": "long", "place": part["place"]}
    rest = client.get("/api/text", params=query | {"start": MOST_CHARS, "end": 10**7}).json()
    assert part["text"] + rest["text"] == output
    missing = client.get("/api/text", params=query | {"place": 99, "start": 0, "end": 1})
    assert missing.status_code == 404


def test_histories_and_sub_agents_are_part_of_a_rollout(tmp_path: Path) -> None:
    run, task = write_run(tmp_path / "first"), make_task("long?")
    rollout = make_rollout(task, "tree", [("done", "")])
    before, beside = spans_of("long?", [("first", "x")]), spans_of("a part of it", [("y", "")])
    before.is_history = True
    rollout.branches = [before, beside]
    store_step(run, [rollout], step=0, tasks=[task])
    client = viewed(run)
    found = whole(client, "tree")["sequences"]
    assert [(one["name"], one["is_history"]) for one in found] == [
        ("main", False), ("history-1", True), ("branch-1", False)
    ]  # fmt: skip
    assert found[1]["turns"][0]["content"]["text"] == "first"
    assert isinstance(rollout.branches[0], Branch)


def test_what_changed_puts_both_rollouts_together_again(client: TestClient) -> None:
    query = {"a": "first", "a_phase": "rl", "a_id": "s0-primes-m0"}
    query |= {"b": "first", "b_phase": "rl", "b_id": "s2-primes-m0"}
    found = client.get("/api/changes", params=query).json()
    sides = {
        kind: [
            "".join(text for name, text in part["pieces"] if name in ("same", kind))
            for part in found["parts"]
        ]
        for kind in ("gone", "new")
    }
    assert sides["gone"] == ["I compute it.", "a result of the tool", "It is 91.", ""]
    assert sides["new"] == ["I compute it.", "a result of the tool", "It is 97.", ""]
    assert ["gone", "91"] in found["parts"][2]["pieces"] and not found["is_same"]


def test_attempts_at_a_task_are_found_in_every_run_and_phase(run: Path, tmp_path: Path) -> None:
    other = small_run(tmp_path / "first", last_is_right=False)  # a folder of the same name
    client = viewed(run, other)
    held = make_task("A held-out question?", "7", kind="primes").task_id
    found = client.get("/api/attempts", params={"task": held}).json()
    assert [(row["run"], row["phase"], row["outcome"]) for row in found] == [
        ("first", "before", "wrong"),
        ("first", "after", "right"),
        ("first (2)", "before", "wrong"),
        ("first (2)", "after", "wrong"),
    ]
    compared = client.get("/overview").text
    assert "first (2) against first" in compared and "0 won, 1 lost" in compared
    assert f"task={held}" in compared


def test_the_overview_is_made_of_what_a_run_has_so_far(client: TestClient) -> None:
    page = client.get("/overview", params={"run": "first"}).text
    assert "100.0% <small>of 1</small>" in page, "after RL, from eval-after.json"
    assert "Success, which is the reward, steps 0 to 2" in page and "Success in training" in page
    # By hand: of four attempts at primes in step 2 and before, one is right.
    assert "<td>50.0% of 2</td>" in page and "Gained by RL" in page


def test_an_evaluation_folder_is_viewed_too(tmp_path: Path) -> None:
    folder, task = write_run(tmp_path / "eval-1"), make_task("held out?")
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    rollout = make_rollout(task, "eval-model-0", [("42", "")], reward=1.0)
    store_step(folder, [rollout], step=0, tasks=[task])
    about = {"options": options | {"model": str(folder / "model-trained")}}
    Evaluation.of([(task, rollout)], title="mine", about=about, seconds=1.0).write(
        folder / "eval.json"
    )
    client = viewed(folder)
    [one] = client.get("/api/runs").json()
    assert [phase["id"] for phase in one["phases"]] == ["evaluation"]
    query = {"run": "eval-1", "phase": "evaluation", "id": "eval-model-0"}
    [sequence] = client.get("/api/rollout", params=query).json()["sequences"]
    assert sequence["turns"][0]["content"]["text"] == "42"
    assert "100.0% (95 %" in client.get("/overview", params={"run": "eval-1"}).text


def test_a_run_is_neither_locked_nor_written_to(tmp_path: Path) -> None:
    def files() -> dict[str, int]:
        return {one.name: one.stat().st_mtime_ns for one in run.iterdir()}

    run = small_run(tmp_path / "first")
    before = files()
    client = viewed(run)
    whole(client, "cut"), ids(client, text="compute"), client.get("/overview?run=first")
    assert files() == before, "a run that has ended has no new files"

    live = small_run(tmp_path / "live")
    writer = sqlite3.connect(live / "rollouts.sqlite", isolation_level=None, timeout=0.0)
    try:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("UPDATE rollouts SET reward = 0.25 WHERE rollout_id = 'cut'")
        with open_for_reading(live / "rollouts.sqlite") as store:
            assert store.entry("cut").reward == 0.0, "what is not committed is not there yet"
            writer.execute("COMMIT")  # at once, or "database is locked"
            assert store.entry("cut").reward == 0.25
        assert writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
    finally:
        writer.close()
    with open_for_reading(run / "rollouts.sqlite") as store, pytest.raises(StoreError) as refused:
        store.put_fact("x", 1)
    assert "read-only" in str(refused.value)


def test_a_store_that_is_being_made_is_not_there_yet(tmp_path: Path) -> None:
    run = small_run(tmp_path / "first")
    (run / "evaluations.sqlite").unlink()
    maker = sqlite3.connect(run / "evaluations.sqlite", isolation_level=None)
    try:
        maker.execute("PRAGMA journal_mode = WAL")
        maker.execute("BEGIN IMMEDIATE")
        maker.execute("CREATE TABLE rollouts (rollout_id TEXT)")  # the first of its tables
        [one] = viewed(run).get("/api/runs").json()
        assert [phase["id"] for phase in one["phases"]] == ["rl"]
    finally:
        maker.close()


PATHS = ("/api/runs", "/overview?run=first", "/api/rollouts?run=first&phase=rl")
GOOD = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("is_local", [True, False])
def test_nothing_of_a_run_is_given_away_without_the_key(run: Path, is_local: bool) -> None:
    app = ViewerServer(find_runs([run]), key=KEY, is_local=is_local).starlette()
    client = TestClient(app, base_url=LOCAL)
    for path in PATHS:
        assert client.get(path).status_code == 401
        for word in ("Bearer ", "Bearer wrong", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"):
            assert client.get(path, headers={"Authorization": word}).status_code == 401
        assert client.get(path, headers=GOOD).status_code == 200
    page = client.get("/")
    assert page.status_code == 200 and str(run) not in page.text, "the page itself holds nothing"


def test_on_this_machine_only_its_own_names_are_answered(run: Path) -> None:
    def status(url: str, *, is_local: bool) -> int:
        app = ViewerServer(find_runs([run]), key=KEY, is_local=is_local).starlette()
        return TestClient(app, base_url=url, headers=GOOD).get("/api/runs").status_code

    for name in ("127.0.0.1", "localhost:8000", "[::1]"):
        assert status(f"http://{name}", is_local=True) == 200
    for name in ("evil.example", "127.0.0.1.evil.example", "192.0.2.7", "router", "evil"):
        assert status(f"http://{name}", is_local=True) == 403
        assert status(f"http://{name}", is_local=False) == 200, "named as the network names it"


def test_the_page_may_run_its_own_files_alone(client: TestClient) -> None:
    for path in ("/", "/static/main.js", "/static/style.css", "/api/runs", "/overview?run=first"):
        answer = client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers
    assert client.get("/static/../server.py").status_code == 404
    assert client.get("/static/%2e%2e%2fserver.py").status_code == 404


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("rollouts?run=nobody&phase=rl", 404, "nobody"),
        ("rollouts?run=first&phase=no_tool&order=nice", 400, "order 'nice': one of newest"),
        ("rollouts?run=first&phase=moon", 400, "phase 'moon': first has"),
        ("rollouts?run=first&phase=rl&steps=x", 400, "steps 'x': give one step"),
        ("rollouts?run=first&phase=rl&limit=100000", 400, "limit must be"),
        ("rollouts?run=first&phase=rl&offset=x", 400, "offset=x: is not a whole number"),
        ("rollout?run=first&phase=rl&id=%27%20OR%201", 404, "no rollout"),
        ("rollout?run=first&phase=rl", 404, "id"),
    ],
)
def test_a_bad_question_is_answered_with_what_is_wrong(
    client: TestClient, path: str, status: int, message: str
) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == status and message in answer.json()["error"]


def test_a_client_that_asks_too_much_of_the_viewer_is_refused_and_others_are_answered(
    run: Path,
) -> None:
    with served(run) as (address, _):
        place, _, key = address.partition("#key=")
        where = urlsplit(place)
        assert where.hostname and where.port
        to = (where.hostname, where.port)
        head = b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"
        head %= key.encode()
        lines = b"".join(b"X-%d: x\r\n" % number for number in range(1000))
        long = b"X: " + b"x" * 40_000 + b"\r\n"
        for more, status in ((b"", b"200"), (lines, b"400"), (long, b"400")):
            with socket.create_connection(to, timeout=30) as one:
                one.sendall(head + more + b"Connection: close\r\n\r\n")
                assert one.recv(100).split()[1] == status, more[:20]
        crowd = [socket.create_connection(to, timeout=30) for _ in range(MOST_CONNECTIONS + 20)]
        closed = [one for one in crowd[MOST_CONNECTIONS:] if is_closed(one)]
        assert len(closed) == 20, "those beyond the limit, at once"
        for one in crowd:
            one.close()
        ask = urllib.request.Request(f"{place}api/runs", headers={"Authorization": f"Bearer {key}"})
        assert urllib.request.urlopen(ask, timeout=30).status == 200


def is_closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_command_serves_says_where_and_ends_quietly(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(run) as (address, process):
        place, _, key = address.partition("#key=")
        good = {"Authorization": f"Bearer {key}"}
        with urllib.request.urlopen(urllib.request.Request(f"{place}api/runs", None, good)) as one:
            assert json.load(one)[0]["name"] == "first"
        for status, headers in ((401, {}), (403, good | {"Host": "evil.test"})):
            with pytest.raises(urllib.error.HTTPError, match=str(status)):
                urllib.request.urlopen(urllib.request.Request(f"{place}api/runs", None, headers))
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        assert len(key) > 30 and key not in shown, "whoever lists processes does not see it"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stderr is not None and process.stderr.read() == ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["view", str(run), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"--port {port}: cannot listen" in error and error.count("\n") == 1
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "is neither a run's folder" in capsys.readouterr().err


INTERRUPTED = """
import os, signal
from nanorl.inspection.viewer.viewer_server import serve_viewer

def say(address):
    print(address, flush=True)
    os.kill(os.getpid(), signal.SIGINT)

serve_viewer({}, host="127.0.0.1", port=0, say=say)
"""


def test_who_is_told_the_address_may_press_ctrl_c_at_once() -> None:
    """It may come before the viewer does anything after saying where it is."""
    words = [sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stderr) == (0, "") and "/#key=" in ended.stdout
