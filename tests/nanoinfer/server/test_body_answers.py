"""What the server answers to fields that other servers have: against the engine, asked directly."""

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, serve
from tiny_text import make_text_engine, make_tokenizer

from nanoinfer.params import SamplingParams

TOKENIZER = make_tokenizer()
USER = {"role": "user", "content": "hello, the world"}
IDS = TOKENIZER.encode_chat([USER], add_generation_prompt=True)
CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
FIXED: dict[str, Any] = {"max_tokens": 6, "seed": 7, "ignore_eos": True}
PARAMS = SamplingParams(**FIXED)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def ask(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    given = {"messages": [USER]} if path == CHAT else {"prompt": IDS}
    status, answer = served.send(path, {**given, **FIXED, **fields})
    assert status == 200, answer
    return answer


def scored(ids: list[int], top: int) -> list[dict[str, Any] | None]:
    """Log-probs of a prompt, from one request for each token."""
    rows: list[dict[str, Any] | None] = [None]
    params = SamplingParams(max_tokens=1, temperature=0, top_logps=300)
    for place in range(1, len(ids)):
        after = dict(make_text_engine().generate([ids[:place]], params)[0].top_logps[0])
        likeliest = list(after)[:top]
        shown = {ids[place]: None} | {token: i for i, token in enumerate(likeliest, 1)}
        rows.append(
            {
                str(token): {
                    "logprob": after[token],
                    "rank": rank,
                    "decoded_token": TOKENIZER.decode([token]),
                }
                for token, rank in shown.items()
            }
        )  # fmt: skip
    return rows


@pytest.mark.parametrize("top", [0, 2])
def test_prompt_logprobs_are_those_of_each_token_after_those_before_it(
    served: Served, top: int
) -> None:
    fields = {"temperature": 0, "prompt_logprobs": top}
    assert ask(served, CHAT, **fields)["prompt_logprobs"] == scored(IDS, top)
    answer = ask(served, PLAIN, prompt=[IDS, IDS[:3]], n=2, **fields)
    found = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert found == [scored(IDS, top)] * 2 + [scored(IDS[:3], top)] * 2
    plain = ask(served, CHAT, temperature=0)
    assert "prompt_logprobs" not in plain and plain["choices"][0]["logprobs"] is None


def test_likeliest_tokens_of_prompt_and_answer_are_counted_apart(served: Served) -> None:
    choice = ask(served, CHAT, prompt_logprobs=3, logprobs=True, top_logprobs=1)["choices"][0]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {1}
    answer = ask(served, PLAIN, prompt_logprobs=1, logprobs=3, echo=True)
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert tops[0] is None and max(map(len, tops[1:])) == 3, "texts may be alike"
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    assert max(map(len, rows)) <= 2, "the token itself and the likeliest"


@pytest.mark.parametrize("top", [0, 2])
def test_a_request_for_no_tokens_scores_its_prompt(served: Served, top: int) -> None:
    fields = {"echo": True, "logprobs": top, "temperature": 0}
    none = ask(served, PLAIN, **fields, max_tokens=0)
    one = ask(served, PLAIN, **fields, max_tokens=1)
    assert none["usage"]["completion_tokens"] == 0
    assert none["usage"]["total_tokens"] == len(IDS)
    choice, other = none["choices"][0], one["choices"][0]
    assert choice["text"] == TOKENIZER.decode(IDS, skip_special=True)
    assert choice["finish_reason"] == "length"
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert choice["logprobs"][name] == other["logprobs"][name][: len(IDS)]
    tops = other["logprobs"]["top_logprobs"]
    assert choice["logprobs"]["top_logprobs"] == (tops and tops[: len(IDS)])


def test_no_tokens_and_no_echo_is_refused_with_what_it_is_for(served: Served) -> None:
    status, answer = served.send(PLAIN, {"prompt": "a", "max_tokens": 0})
    assert status == 400 and answer["error"]["param"] == "max_tokens"
    assert "0 scores a prompt, with echo" in answer["error"]["message"]


@pytest.mark.parametrize("field", ["continue_final_message", "prefix"])
def test_an_answer_goes_on_where_the_last_message_ends(served: Served, field: str) -> None:
    said = {"role": "assistant", "content": "the he"}
    more = {"add_generation_prompt": False, "continue_final_message": True}
    if field == "prefix":
        said, more = said | {"prefix": True}, {}
    ids = TOKENIZER.encode_chat([USER], add_generation_prompt=True) + TOKENIZER.encode("the he")
    answer = ask(served, CHAT, messages=[USER, said], return_token_ids=True, **more)
    assert answer["prompt_token_ids"] == ids
    expected = make_text_engine().generate([ids], PARAMS)[0].ids
    assert answer["choices"][0]["token_ids"] == expected


def test_a_prompt_without_an_opening_ends_with_its_message(served: Served) -> None:
    answer = ask(served, CHAT, add_generation_prompt=False, return_token_ids=True)
    assert answer["prompt_token_ids"] == IDS[:-1]


def test_a_prompt_is_cut_to_its_last_tokens(served: Served) -> None:
    for path in (CHAT, PLAIN):
        answer = ask(served, path, truncate_prompt_tokens=4, return_token_ids=True)
        ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        assert ids == IDS[-4:]
        assert answer["usage"]["prompt_tokens"] == 4
    long = ask(served, PLAIN, prompt="a" * 600, truncate_prompt_tokens=-1, return_token_ids=True)
    assert len(long["choices"][0]["prompt_token_ids"]) == 512 - 6, "what leaves room for the answer"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_log_probs_are_named_by_their_ids(served: Served, stream: bool) -> None:
    ids = make_text_engine().generate([IDS], PARAMS)[0].ids
    fields = {"return_tokens_as_token_ids": True}
    for path, more in ((CHAT, {"logprobs": True, "top_logprobs": 2}), (PLAIN, {"logprobs": 2})):
        given = {"messages": [USER]} if path == CHAT else {"prompt": IDS}
        body = {**given, **FIXED, **fields, **more}
        events = served.events(path, body) if stream else [ask(served, path, **fields, **more)]
        shown = [c["logprobs"] for event in events for c in event["choices"] if c.get("logprobs")]
        if path == CHAT:
            entries = [entry for one in shown for entry in one["content"]]
            names = [entry["token"] for entry in entries]
            tops = [top["token"] for entry in entries for top in entry["top_logprobs"]]
        else:
            names = [token for one in shown for token in one["tokens"]]
            tops = [token for one in shown for row in one["top_logprobs"] for token in row]
        assert names == [f"token_id:{token}" for token in ids]
        assert len(tops) == 2 * len(ids) and all(name.startswith("token_id:") for name in tops)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_and_control_tokens_are_shown_where_asked_for(served: Served, stream: bool) -> None:
    end = TOKENIZER.token_to_id("<|end|>")
    body = {"logit_bias": {str(end): 100}, "min_tokens": 2, "temperature": 0, "ignore_eos": False}

    def said(**fields: Any) -> str:
        asked = {"messages": [USER], **FIXED, **body, **fields}
        if not stream:
            return ask(served, CHAT, **body | fields)["choices"][0]["message"]["content"]
        deltas = [event["choices"][0]["delta"] for event in served.events(CHAT, asked)]
        return "".join(delta.get("content", "") for delta in deltas)

    plain = said()
    assert plain and "<|end|>" not in plain
    shown = said(include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown == f"{plain}<|end|>"
    stop = plain[-1]
    assert said(stop=stop, min_tokens=0, logit_bias=None, ignore_eos=True).count(stop) == 0


def test_a_request_that_is_named_by_rid_has_that_name(served: Served) -> None:
    assert ask(served, CHAT, rid="mine")["id"] == "mine"


def test_a_stream_tells_its_usage_where_openrouters_clients_ask(served: Served) -> None:
    events = served.events(CHAT, {"messages": [USER], **FIXED, "usage": {"include": True}})
    assert events[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"structured_outputs": {"choice": ["he", "the"]}}, {"he", "the"}),
        ({"structured_outputs": {"regex": "(he|lo)"}}, {"he", "lo"}),
        ({"guided_grammar": 'start: "he" | "lo"'}, {"he", "lo"}),
        ({"ebnf": 'root ::= "he" | "lo"'}, {"he", "lo"}),
        ({"structured_outputs": {"json": {"enum": ["he", 1]}}}, {'"he"', "1"}),
    ],
)
def test_an_answer_matches_what_was_asked_for_under_any_name(
    served: Served, fields: dict[str, Any], allowed: set[str]
) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    answer = ask(served, CHAT, **fields, ignore_eos=False, max_tokens=16, n=8)
    said = {choice["message"]["content"] for choice in answer["choices"]}
    assert said <= allowed and len(said) == 2, "eight samples of two"


def test_a_grammar_of_neither_form_is_refused(served: Served) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    for grammar in ("root ::= (", "start: (", "::="):
        status, answer = served.send(CHAT, {"messages": [USER], "guided_grammar": grammar})
        assert status == 400 and "grammar lark: is not valid" in answer["error"]["message"], answer
