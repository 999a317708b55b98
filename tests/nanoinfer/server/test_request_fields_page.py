"""docs/request_fields.md says of every field what the code does with it."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import request_fields_page  # noqa: E402


def test_the_page_is_what_the_bodies_say() -> None:
    assert request_fields_page.main([]) == 0, "run scripts/request_fields_page.py --write"


def test_a_page_that_says_otherwise_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    text = request_fields_page.PAGE.read_text("utf-8")
    page.write_text(text.replace("`max_completion_tokens` ", ""), "utf-8")
    monkeypatch.setattr(request_fields_page, "PAGE", page)
    assert request_fields_page.main([]) == 1
    assert request_fields_page.main(["--write"]) == 0
    assert page.read_text("utf-8") == text


def test_every_name_of_the_table_of_meanings_is_done_somewhere() -> None:
    text = request_fields_page.PAGE.read_text("utf-8")
    table = text.partition("## Meanings")[2].partition("Parts of a conversation")[0]
    for name in ("chat_template_kwargs", "min_tokens", "structured_outputs", "prompt_logprobs"):
        assert f"`{name}`" in table
        assert request_fields_page.APIS["/v1/chat/completions"].standing(name) == "done"
