"""Pictures where rollouts are text: the terminal's view, the log, and the decoders behind them."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeing_runs import GREEN, HTML, RED, TASK, coloured, filled_run, played, sha_of, with_hash

from nanoengine.vision.seeing_tokenizer import SeeingTokenizer
from nanorl.cli import main
from nanorl.observability.report.chat_decode import ChatDecode
from nanorl.observability.report.transcript import transcript
from nanorl.shown_pictures import items, told


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SeeingTokenizer]:
    return filled_run(tmp_path_factory.mktemp("runs") / "seeing")


def line(number: int, sha256: str) -> str:
    return f"[picture {number}: 48 x 48, 9 tokens, sha256 {sha256[:12]}]"


def test_the_terminal_shows_a_line_for_each_picture(
    run: tuple[Path, SeeingTokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(run[0]), "--terminal"]) == 0
    shown = capsys.readouterr().out
    assert "image_pad" not in shown.replace(f"{line(1, '0' * 64)} <|image_pad|>", "")
    start = shown.index("right  step 0")
    assert shown[start:].splitlines()[1:6] == [
        "task   Look:",
        f"       {line(1, sha_of(coloured(RED)))}",
        "       Which?",
        "agent  hm",
        f"tool   {line(2, sha_of(coloured(GREEN)))}",
    ]
    assert "sha256 ../config.js]" in shown and f"sha256 {HTML[:12]}]" in shown
    assert "sha256 " + sha_of(coloured((9, 9, 9)))[:12] in shown, "missing, and named"


def test_a_hash_cannot_steer_the_terminal(
    run: tuple[Path, SeeingTokenizer], capsys: pytest.CaptureFixture[str]
) -> None:
    from nanorl.commands.view import readable
    from nanorl.observability.store import RolloutStore

    with RolloutStore(run[0] / "rollouts.sqlite", is_read_only=True) as store:
        entry, rollout = store.entry("right"), store.get("right")
    shown = readable(entry, with_hash(rollout, 0, "\x1b[2J\x07"), ChatDecode(run[1])).plain
    assert "\x1b" not in shown and "\x07" not in shown and "sha256 ?[2J?]" in shown


def test_the_log_says_what_was_seen(run: tuple[Path, SeeingTokenizer]) -> None:
    rollout = played(run[1], "r", [coloured(RED)], ("N", ["Now:", coloured(GREEN)]), ("S", []))
    assert transcript(TASK, rollout, ChatDecode(run[1]), title="one").splitlines() == [
        "one: wrong",
        "    task    Which colour?",
        f"    sees    {line(1, sha_of(coloured(RED)))}",
        "    agent   N",
        "    tool    Now:",
        f"            {line(2, sha_of(coloured(GREEN)))}",
        "    agent   S",
        "    wanted  red",
    ]


def test_a_word_behind_a_picture_is_no_role(run: tuple[Path, SeeingTokenizer]) -> None:
    rollout = played(run[1], "r", [coloured(RED), "user\nis what it says"], ("r", []))
    decode = ChatDecode(run[1])
    pieces = decode.pieces(items(rollout, 0, rollout.turn_spans[0].action_start, decode.pictures))
    assert [(one.role, one.text) for one in pieces] == [
        ("", f"{line(1, sha_of(coloured(RED)))}\nuser\nis what it says")
    ]


def test_a_plain_decoder_has_lines_without_sizes(run: tuple[Path, SeeingTokenizer]) -> None:
    tokenizer = run[1]
    rollout = played(tokenizer, "r", ["a", coloured(RED)], ("r", []))
    said = told(rollout, 0, rollout.turn_spans[0].action_start, tokenizer.decode)
    short = f"[picture 1: 9 tokens, sha256 {sha_of(coloured(RED))[:12]}]"
    assert said == f"<usr>a<|vision_start|>{short}<|vision_end|><bot>"
