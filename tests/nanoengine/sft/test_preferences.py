"""Files of preferences: the forms in which they are found, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoengine.sft.preferences import preference_of, read_preferences

SKY = {"role": "user", "content": "Which colour has the sky?"}
BLUE, GREEN = ({"role": "assistant", "content": text} for text in ("Blue.", "Green."))
SURE, YES = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": SKY["content"], "chosen": "Blue.", "rejected": "Green."},
    "messages": {"prompt": [SKY], "chosen": [BLUE], "rejected": [GREEN]},
    "one message each": {"prompt": [SKY], "chosen": BLUE, "rejected": GREEN},
    "texts to messages": {"messages": [SKY], "chosen": "Blue.", "rejected": "Green."},
    "implicit prompt": {"chosen": [SKY, BLUE], "rejected": [SKY, GREEN]},
    "prompt again in the answers": {
        "prompt": [SKY],
        "chosen": [SKY, BLUE],
        "rejected": [SKY, GREEN],
    },
    "a text beside whole chats (UltraFeedback)": {
        "prompt": SKY["content"],
        "chosen": [SKY, BLUE],
        "rejected": [SKY, GREEN],
    },
    "OpenAI": {
        "input": {"messages": [SKY]},
        "preferred_output": [BLUE],
        "non_preferred_output": [GREEN],
    },
    "ms-swift": {"messages": [SKY, BLUE], "rejected_response": "Green."},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same_pair(form: str) -> None:
    pair = preference_of(FORMS[form])
    assert (pair.prompt, pair.chosen, pair.rejected) == ([SKY], [BLUE], [GREEN])
    assert pair.tools is None


def test_texts_without_a_prompt_part_where_they_differ_and_the_blank_is_the_answers() -> None:
    pair = preference_of({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert [one[0]["content"] for one in (pair.prompt, pair.chosen, pair.rejected)] == [
        *("The sky is", " blue.", " green."),
    ]


def test_an_answer_may_go_on_with_more_turns() -> None:
    pair = preference_of(
        {"prompt": [*HELLO, YES, SKY], "chosen": [BLUE, SURE, YES], "rejected": [GREEN, SURE, YES]}
    )
    assert (len(pair.prompt), pair.chosen) == (4, [BLUE, SURE, YES])
    whole = {"chosen": [*HELLO, YES, SURE, YES], "rejected": [*HELLO, YES, SKY, BLUE]}
    pair = preference_of(whole)
    assert (pair.prompt, pair.chosen) == ([*HELLO, YES], [SURE, YES])


def test_tools_may_be_json_in_json() -> None:
    for tools in ([TOOL], json.dumps([TOOL])):
        assert preference_of(FORMS["messages"] | {"tools": tools}).tools == [TOOL]
    given = FORMS["OpenAI"] | {"input": {"messages": [SKY], "tools": [TOOL]}}
    assert preference_of(given).tools == [TOOL]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[1]", "expected an object, not a list"),
        ('{"prompt": "a", "chosen": "b"}', 'no "rejected"'),
        ('{"prompt": "a", "chosen": "b", "rejected": "b"}', "are the same"),
        ('{"prompt": "a", "chosen": "", "rejected": "b"}', "chosen: is empty"),
        ('{"prompt": "a", "chosen": 3, "rejected": "b"}', "chosen: expected a text or messages"),
        ('{"prompt": 3, "chosen": "a", "rejected": "b"}', "prompt: expected a text or messages"),
        ('{"prompt": "a", "chosen": ["b"], "rejected": "c"}', 'an object with a "role"'),
        ('{"chosen": "blue", "rejected": "red"}', 'no "prompt", and "chosen" and "rejected" do'),
        (
            '{"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}',
            "is not what the user says in both",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "rejected": "c",'
            ' "chosen": [{"role": "user", "content": "b"}]}',
            "chosen: no message of role 'assistant' after the prompt",
        ),
        ('{"chosen": "The sky is", "rejected": "The sky is blue"}', "chosen: is empty"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "tools": 3}', "expected a list of tools"),
        ("{", "Expecting property name"),
    ],
)
def test_a_line_that_is_no_pair_says_why(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(FORMS["texts"]) + "\n\n" + line + "\n")
    (first, good), (number, bad) = read_preferences(file)
    assert (first, number) == (1, 3) and not isinstance(good, ValueError)
    assert isinstance(bad, ValueError) and problem in str(bad) and "\n" not in str(bad)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"preferences='.*none': no such file"):
        next(read_preferences(tmp_path / "none"))
