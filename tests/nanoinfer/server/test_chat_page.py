"""The page at the server's `/`: what it is served with, who may call from it, and its own logic."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from serving import serve

from nanoinfer.server.page import PageAbout, PageTool

PAGE = files("nanoinfer.server") / "page.html"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="the page's script is run by node")


def under_node(expression: str, before: str = "") -> Any:
    """The JSON value of an expression after the page's script, and after what comes before it."""
    script = re.search(r"<script>(.*?)</script>", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None and NODE is not None
    program = f"{before}\n{script[1]}\nconsole.log(JSON.stringify({expression})); process.exit()"
    command = [NODE, "--input-type=module", "-"]
    return json.loads(subprocess.check_output(command, input=program, text=True, timeout=60))


def test_the_page_is_open_and_its_policy_admits_nothing_from_elsewhere() -> None:
    with serve(api_key="secret") as served:
        connection = served.connect()
        connection.request("GET", "/")
        response = connection.getresponse()
        html = response.read().decode()
        connection.close()
        assert served.send("/v1/models", key=None)[0] == 401
    assert response.status == 200 and html == PAGE.read_text(encoding="utf-8")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    rules = dict(
        rule.strip().split(" ", 1)
        for rule in response.headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"https?://|//cdn|@import|\bsrc=|innerHTML|\bon\w+=\"", html)


def test_the_page_is_told_its_title_an_example_and_the_tools_by_those_with_a_key() -> None:
    with serve(api_key="secret") as served:
        assert served.send("/about", key=None)[0] == 401
        status, plain = served.send("/about", key="secret")
        assert status == 200 and plain["title"] and plain["example"] and plain["tools"] == []
        tools = (PageTool(name="run", description="Run a program."),)
        served.app.about = PageAbout(title="The agent", system="Be brief.", tools=tools)
        _, told = served.send("/about", key="secret")
    assert (told["title"], told["system"]) == ("The agent", "Be brief.")
    assert told["tools"] == [{"name": "run", "description": "Run a program."}]


@needs_node
def test_a_tool_is_a_line_of_the_page() -> None:
    tools = [{"name": "a", "description": "Reads.\nMore of it."}, {"name": "b"}]
    assert under_node(f"toolLines({json.dumps(tools)})") == ["a: Reads.", "b"]


def test_a_page_of_this_server_may_call_it_without_a_key_and_no_other_page() -> None:
    with serve(api_key=None, allowed_hosts=("box.lan",)) as served:
        here = f"127.0.0.1:{served.port}"
        cases = {
            (here, f"http://{here}"): 200,
            ("box.lan", "https://box.lan"): 200,  # through a proxy
            (here, "http://evil.com"): 403,
            (here, "http://127.0.0.1:1"): 403,  # another server of this machine
            (here, "null"): 403,  # a sandboxed frame
            ("evil.com", "http://evil.com"): 403,  # a name that was made to lead here
        }
        for (host, origin), status in cases.items():
            connection = served.connect()
            body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
            headers = {"Host": host, "Origin": origin}
            connection.request("POST", "/v1/chat/completions", body, headers)
            assert connection.getresponse().status == status, (host, origin)
            connection.close()
        connection = served.connect()
        connection.request("POST", "/pause", "{}", {"Origin": f"http://{here}"})
        assert connection.getresponse().status == 403
        connection.close()


@needs_node
def test_reasoning_that_comes_by_itself_is_shown_and_sent_back() -> None:
    deltas = [{"reasoning_content": "Two "}, {"reasoning_content": "numbers."}, {"content": "3"}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    shown = under_node(
        "events.map((event) => [takeEvent(answer, event), pieces(wholeOf(answer))][1])",
        f'const events = {json.dumps(events)}, answer = {{role: "assistant", content: ""}};',
    )
    thought = {"kind": "thought", "text": "Two numbers."}
    assert shown[1:] == [[thought], [thought, {"kind": "text", "text": "3"}]]
    body = under_node(
        'requestBody([{role: "assistant", content: "3", reasoning_content: "Hm."}], '
        '{model: "", system: "", temperature: 0, maxTokens: 1})'
    )
    sent = {"role": "assistant", "content": "3", "reasoning_content": "Hm."}
    assert body["messages"] == [sent]


@needs_node
def test_the_script_reads_a_real_stream_however_it_is_cut() -> None:
    with serve() as served:
        request = under_node(
            'requestBody([{role: "user", content: "hello", usage: 1}],'
            ' {model: "tiny", system: "be brief", temperature: 0, maxTokens: 12})'
        )
        assert request["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
        ]
        status, stream = served.send("/v1/chat/completions", request)
        plain = request | {"stream": False}
        del plain["stream_options"]
        whole = served.send("/v1/chat/completions", plain)[1]
    assert status == 200
    program = """(() => {
        const answers = [];
        for (const size of [1, 7, 100000]) {
            const events = new EventReader(), answer = {content: ""};
            for (let at = 0; at < stream.length; at += size)
                for (const data of events.feed(stream.slice(at, at + size)))
                    if (data !== "[DONE]") takeEvent(answer, JSON.parse(data));
            answers.push(answer);
        }
        return answers;
    })()"""
    answers = under_node(program.replace("stream", json.dumps(stream)))
    assert len(answers) == 3
    for answer in answers:
        assert answer["content"] == whole["choices"][0]["message"]["content"]
        assert answer["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@needs_node
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("plain", [("text", "plain")]),
        ("<think>so</think>42", [("thought", "so"), ("text", "42")]),
        ("so</think>42", [("thought", "so"), ("text", "42")]),  # the template opened it
        ("<think>on the w", [("thought", "on the w")]),
        (
            'go <tool_call>{"name": "f"}</tool_call> on',
            [("text", "go"), ("call", '{"name": "f"}'), ("text", "on")],
        ),
        ("a\n```python\nprint(1)\n```\nb", [("text", "a"), ("code", "print(1)"), ("text", "b")]),
        ("<b>bold</b>", [("text", "<b>bold</b>")]),
        ("", []),
    ],
)
def test_the_script_tells_thoughts_calls_and_code_apart(
    written: str, expected: list[tuple[str, str]]
) -> None:
    found = under_node(f"pieces({json.dumps(written)})")
    assert [(piece["kind"], piece["text"]) for piece in found] == expected


@needs_node
def test_the_script_says_how_long_an_answer_took_and_how_it_ended() -> None:
    answer = {
        "usage": {"prompt_tokens": 7, "completion_tokens": 11},
        "finish_reason": "length",
    }
    assert under_node(f"describeAnswer({json.dumps(answer)}, 1, 3)") == (
        "7 tokens read, 11 written, 5.0 tokens/s, cut off: no tokens left"
    )
    failed = 'try { takeEvent({}, {error: {message: "no room"}}) } catch (e) { return e.message }'
    assert under_node(f"(() => {{ {failed} }})()") == "no room"


@needs_node
def test_the_page_asks_for_the_key_sends_shows_and_stops() -> None:
    """In a double of a browser, against a real server."""
    steps = """(async () => {
        await until(() => by("state").textContent !== "");
        const asked = [by("state").textContent, by("options").open];
        by("key").value = "secret";
        by("key").listeners.change();
        await until(() => by("model").value !== "");
        await submit("hello");
        await until(() => !by("stop").hidden);
        await until(() => by("stop").hidden);
        const answered = [shown(), notes()];
        by("max-tokens").value = "400";
        globalThis.onShow = (article) => {
            if (article.className === "assistant") document.listeners.keydown({ key: "Escape" });
        };
        await submit("on and on");
        await until(() => by("stop").hidden);
        globalThis.onShow = undefined;
        const stopped = notes().at(-1);
        by("max-tokens").value = "0";
        const before = shown().length;
        await submit("never");
        await until(() => by("stop").hidden && by("state").textContent !== "…");
        const refused = [by("state").textContent, by("text").value, shown().length - before];
        await by("copy").listeners.click();
        by("clear").listeners.click();
        const left = shown().length;
        return { copied: JSON.parse(copied), asked, answered, stopped, refused, left };
    })()"""
    double = (Path(__file__).parent / "page_double.js").read_text(encoding="utf-8")
    with serve(api_key="secret") as served:
        greedy = {"temperature": 0, "max_tokens": 8, "messages": [{"role": "user"}]}
        greedy["messages"][0]["content"] = "hello"
        whole = served.send("/v1/chat/completions", greedy, key="secret")[1]
        address = f'const ADDRESS = "http://127.0.0.1:{served.port}";\n'
        seen = under_node(f"await {steps}", before=address + double)
    assert "API key" in seen["asked"][0] and seen["asked"][1]
    text = whole["choices"][0]["message"]["content"].strip()
    assert seen["answered"][0] == [["user", ["hello"]], ["assistant", [text] if text else []]]
    tokens = whole["usage"]["completion_tokens"]
    assert f"{tokens} written" in seen["answered"][1][0]
    assert seen["stopped"] == "stopped"
    assert "max_tokens" in seen["refused"][0] and seen["refused"][1:] == ["never", 0]
    kept = [(one["role"], one["content"].strip()) for one in seen["copied"]["messages"][:3]]
    assert kept == [("user", "hello"), ("assistant", text), ("user", "on and on")]
    assert len(seen["copied"]["messages"]) == 4, "what was refused is not part of the conversation"
    assert seen["left"] == 0
