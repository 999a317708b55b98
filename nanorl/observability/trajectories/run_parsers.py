"""How the calls of a run's agent are read again, and who that agent is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import Parser
from nanoinfer.chat.chat import ToolChat
from nanoinfer.chat.choose import client_tool_chat
from nanorl.observability.trajectories.atif import AgentInfo
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import members_of_kind, run_kind
from nanorl.options.trust import unknown
from nanorl.plugins import LOOPS
from nanorl.version import own_version

CALLS_OF_ENVIRONMENT = LOOPS.keys() - {"sub_agents"}
"""The loops that call nothing but the environment's tools."""


def find_parsers(
    config: RunConfig,
    tokenizer: ChatTokenizer,
    say: Callable[[str], None],
    *,
    is_running: bool = False,
) -> list[Parser]:
    """The parsers of a run: its environment's, and the one of calls that an agent loop or a client
    adds, which are in the form of the model's chat template. An environment that only the folder
    of the run names is not imported: the run may be somebody else's, unless it `is_running`."""
    of_model = client_tool_chat(tokenizer, []).parser
    if not is_running and (found := unknown(config.to_json(), ("env", "agent"))):
        say(f"calls are read as the model's chat has them: not trusted (nanorl trust): {found}")
        return [of_model]
    try:
        kind = run_kind(replace(config, reward=""))  # whose score is not asked for
    except ValueError as error:
        say(f"the environment is not there: calls are read as the model's chat has them ({error})")
        return [of_model]
    try:
        parsers: list[Parser] = []
        for one in members_of_kind(kind).values():
            own = _parsers_of(one, config.agent.loop or one.loop, tokenizer, of_model)
            parsers += (parser for parser in own if parser not in parsers)
        return parsers
    finally:
        kind.close()


def _parsers_of(kind: Any, loop: str, tokenizer: ChatTokenizer, of_model: Parser) -> list[Parser]:
    """The parsers of one environment whose tasks `loop` plays."""
    open_chat: Callable[[ChatTokenizer], ToolChat | None] | None
    open_chat = getattr(kind, "chat", None)  # of one that is elsewhere nothing is known
    if open_chat is None:
        return [of_model]
    chat = open_chat(tokenizer)
    own = [] if chat is None else [chat.parser]
    return own if loop in CALLS_OF_ENVIRONMENT else [*own, of_model]


def agent_info(config: RunConfig) -> AgentInfo:
    """The agent that plays in a run."""
    return AgentInfo(
        name=config.agent.loop or "+".join(config.envs) or config.preset,
        version=own_version(),
        model=config.model or config.preset,
    )
