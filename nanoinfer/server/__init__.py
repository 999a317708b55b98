"""The OpenAI-compatible server: `python -m nanoinfer.server --model FOLDER`.

config.py has the options and the limits, app.py the routes: who may call them, and what each does.
A route reads its body through requests.py, which knows every field and makes `SamplingParams` of
them, and writes its answer through responses.py; a chat's prompt is made, and its turn is read for
reasoning and calls, by nanoinfer/chat as the trainer does; tool_calls.py has the schema that forces
a call. Between the two, completions.py admits a request and runs it on the engine, one task for
each completion. prometheus.py is the text of /metrics, page.py and page.html are the page to chat
on, and running.py is a server from its options to its end. Requests on the wire, connections, keys
and errors are nanoinfer/http's.

Imports point downwards: __main__ → running → app → completions, responses → requests → tool_calls,
prometheus, page, config. The engine imports nothing from here, so it runs without starlette.
"""
