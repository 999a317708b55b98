"""Rollouts as a person reads them in the log and in the terminal: no marks of a template."""

from __future__ import annotations

import pytest
from agent_doubles import tiny_tokenizer

from nanoengine.text.chat_template import Message
from nanorl.commands.view import readable
from nanorl.observability.report.chat_decode import ChatDecode
from nanorl.observability.report.transcript import transcript
from nanorl.observability.store import Entry
from nanorl.task import Task
from nanorl.types import Rollout, Status, TurnSpan

ENTRY = Entry(
    rollout_id="r",
    task_id="t",
    group_id="g",
    step=0,
    version=0,
    status=Status.FINISHED,
    reward=0.0,
    num_tokens=9,
    num_turns=1,
    content_hash="",
)


def test_a_question_stands_apart_from_the_system_s_words() -> None:
    tokenizer = tiny_tokenizer()
    chat: list[Message] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 3 + 4?\nSay it."},
    ]
    prompt = tokenizer.encode_chat(chat, add_generation_prompt=True)
    said = tokenizer.encode("7<|im_end|>", allow_special=True)
    saw = tokenizer.encode("\n<|im_start|>user\nuser\nNo.<|im_end|>\n", allow_special=True)
    saw += tokenizer.encode("<|im_start|>assistant\n", allow_special=True)
    tokens = [*prompt, *said, *saw]
    end = len(prompt) + len(said)
    span = TurnSpan(action_start=len(prompt), action_end=end, observation_end=len(tokens))
    one = rollout_of(tokens, span)
    text = readable(ENTRY, one, ChatDecode(tokenizer)).plain
    assert text.splitlines()[1:] == [
        "system Be brief.",
        "task   What is 3 + 4?",
        "       Say it.",
        "agent  7",
        "tool   user",  # a program's own word stays: no control token stands before it
        "       No.",
    ]
    task = Task(task_id="t", kind="k", prompt="What is 3 + 4?", answer="7")
    log = transcript(task, one, ChatDecode(tokenizer), title="a rollout")
    assert "assistant" not in log and "    tool    user\n            No." in log


def rollout_of(tokens: list[int], span: TurnSpan) -> Rollout:
    is_said = [span.action_start <= place < span.action_end for place in range(len(tokens))]
    return Rollout(
        task_id="t",
        group_id="g",
        rollout_id="r",
        tokens=tokens,
        loss_mask=[int(one) for one in is_said],
        logps=[-1.0 if one else 0.0 for one in is_said],
        versions=[0 if one else -1 for one in is_said],
        turn_spans=[span],
        reward=0.0,
        status=Status.FINISHED,
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("plain", [("", "plain")]),
        ("<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n", [("user", "A")]),
        ("<|im_start|>user<|im_end|>\n\nA", [("user", "A")]),  # Llama's way
        ("A<|im_end|>B", [("", "AB")]),
        ("user\nA", [("", "user\nA")]),
        ("<|im_end|>users\nA", [("", "users\nA")]),
        ("", []),
    ],
)
def test_role_names_are_marks_only_behind_a_control_token(
    text: str, pieces: list[tuple[str, str]]
) -> None:
    tokenizer = tiny_tokenizer()
    found = ChatDecode(tokenizer).pieces(tokenizer.encode(text, allow_special=True))
    assert [(one.role, one.text) for one in found] == pieces
