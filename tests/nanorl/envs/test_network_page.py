"""docs/network.md: its environment is trained by its two commands, the second without a server."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from forked_runs import SMALL, RunProcess, rows
from web_servers import web_server

from nanorl.envs.http_record.answers import COUNTED
from nanorl.envs.http_record.record_config import HttpConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "network.md").read_text("utf-8")
HOST = "wiki.example.org"


@pytest.mark.sandbox
def test_what_the_page_writes_is_recorded_and_replayed_by_its_commands(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n# wiki.py\n(.*?)```", PAGE, re.DOTALL)
    record, replay = (
        shlex.split(block) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    )
    with web_server() as server:
        place = f"localhost:{server.server_port}"
        (tmp_path / "wiki.py").write_text(code.replace(HOST, place))
        run(tmp_path, [word.replace(HOST, place) for word in record])
        assert list(server.asked) == ["GET /start"]
    run(tmp_path, replay)
    first, again = (rows(tmp_path / "runs" / name) for name in ("first", "again"))
    assert [row["reward"] for row in first] == [row["reward"] for row in again]
    assert sum(row["http/replayed"] for row in again) > 0


def run(folder: Path, words: list[str]) -> None:
    assert words[:2] == ["nanorl", "train"]
    found = [str(folder / word) if word.startswith(("wiki", "runs/")) else word for word in words]
    small = (*SMALL, "--rl.steps", "1", "--agent.max-context-tokens", "1024")
    process = RunProcess(folder / "log", *small, "--warm-start.steps", "0", *found[2:])
    assert process.wait(300) == 0, process.output()


def test_options_and_counts_of_the_page_are_those_that_there_are() -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(one.name.replace("_", "-") for one in fields(HttpConfig))
    assert set(re.findall(r"`http/(\w+)`", PAGE)) == set(COUNTED)
