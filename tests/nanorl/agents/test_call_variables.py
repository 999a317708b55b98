"""A client's own words for the chat template, and its ends of an answer, in a recorded episode."""

import asyncio

import pytest
from agent_doubles import EOS, TEMPLATE, ScriptedGenerator, output_of, tiny_tokenizer

from nanoinfer.dialects.exchange import ApiCall, message_of
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.recording import Recording, Sampled
from nanorl.agents.limits import Limits

LIMITS = Limits(max_turns=9, max_turn_tokens=40, max_context_tokens=4000)
# Qwen3's way: where thinking is off, an empty thought opens every answer.
OFF = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
TOKENIZER = tiny_tokenizer(
    TEMPLATE.replace("assistant\n{% endif %}", "assistant\n" + OFF + "{% endif %}")
)
QUIET = {"enable_thinking": False}
USER = {"role": "user", "content": "hi"}


def recording_of(*said: str | Output) -> tuple[Recording, ScriptedGenerator]:
    generator = ScriptedGenerator(TOKENIZER, [*said])
    return Recording(
        generator, TOKENIZER, limits=LIMITS, sampling=SamplingParams(seed=5)
    ), generator


def answers(recording: Recording, *calls: ApiCall) -> list[Sampled]:
    async def talk() -> list[Sampled]:
        return [await recording.answer(call, str(i)) for i, call in enumerate(calls)]

    return asyncio.run(talk())


def test_a_prompt_is_rendered_with_the_calls_variables_at_every_turn() -> None:
    recording, _ = recording_of("ab", "c")
    first = ApiCall(messages=[USER], variables=QUIET)
    (one,) = answers(recording, first)
    again = ApiCall(messages=[USER, message_of(one.replies[0]), USER], variables=QUIET)
    (two,) = answers(recording, again)
    opening = "<|im_start|>assistant\n<think></think>"
    turn = f"<|im_start|>user\nhi<|im_end|>\n{opening}"
    assert TOKENIZER.decode(one.ids) == turn
    assert TOKENIZER.decode(two.ids) == f"{turn}ab<|im_end|>\n{turn}"
    (only,) = recording.tree.sequences()
    assert len(only.turn_spans) == 2, "the second call goes on from the first"


def test_other_variables_are_another_conversation() -> None:
    """What was sampled under one opening is never put under another."""
    recording, _ = recording_of("ab", "c")
    (one,) = answers(recording, ApiCall(messages=[USER], variables=QUIET))
    (two,) = answers(recording, ApiCall(messages=[USER, message_of(one.replies[0]), USER]))
    assert "<think>" not in TOKENIZER.decode(two.ids)
    assert len(recording.tree.sequences()) == 2


def test_variables_count_for_the_size_of_a_prompt() -> None:
    recording, _ = recording_of()
    call = ApiCall(messages=[USER], variables={"x": "a" * 2_000_000})
    with pytest.raises(ApiError, match="too long"):
        answers(recording, call)


def test_the_client_says_where_an_answer_ends() -> None:
    stop = TOKENIZER.encode("c")[0]
    recording, generator = recording_of(output_of([*TOKENIZER.encode("xaxa"), stop]))
    call = ApiCall(
        messages=[USER], min_tokens=3, stop_token_ids=(stop,), ignore_eos=True, stop=("x",)
    )
    (sampled,) = answers(recording, call)
    (_, params) = generator.calls[0]
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos) == (3, (stop,), True)
    (reply,) = sampled.replies
    assert (reply.text, reply.stop_text) == ("xaxa", None), "both x stand before the third token"
    recording, _ = recording_of(output_of([*TOKENIZER.encode("xaax"), stop]))
    (reply,) = answers(recording, call)[0].replies
    assert (reply.text, reply.stop_text) == ("xaa", "x")


def test_what_an_abort_left_counts_for_the_least_length() -> None:
    parts = [output_of(TOKENIZER.encode("ac"), "abort"), output_of([*TOKENIZER.encode("a"), EOS])]
    recording, generator = recording_of(*parts)
    answers(recording, ApiCall(messages=[USER], min_tokens=3))
    assert [params.min_tokens for _, params in generator.calls] == [3, 1]


@pytest.mark.parametrize("most", [8, 1000])
def test_a_least_length_that_has_no_room_is_refused(most: int) -> None:
    recording, _ = recording_of()
    with pytest.raises(ApiError, match="min_tokens=41: must be from 0") as error:
        answers(recording, ApiCall(messages=[USER], min_tokens=41, max_tokens=most))
    assert error.value.status == 400


def test_token_calls_keep_their_ends() -> None:
    recording, generator = recording_of("ab")
    params = SamplingParams(max_tokens=100, min_tokens=60, ignore_eos=True)
    asyncio.run(recording.complete([1, 2], params))
    sent = generator.calls[0][1]
    assert (sent.max_tokens, sent.min_tokens, sent.ignore_eos) == (40, 40, True)
