"""A chat loop in verifiers' own process: a call of the tool, if there is one, and two replies."""

import json
from contextlib import AsyncExitStack

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

AGAIN = "Once more, shorter."


class WordRelayHarnessConfig(vf.HarnessConfig):
    max_tokens: int = 48
    max_call_tokens: int = 256


class WordRelayHarness(vf.Harness[WordRelayHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with (
            AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client,
            AsyncExitStack() as stack,
        ):
            tools, dispatch, connections = await connect_mcp(servers, stack)
            offered = {"tools": tools} if tools else {}
            if tools:
                forced = {"tool_choice": "required", "max_tokens": self.config.max_call_tokens}
                said = await self.ask(client, ctx, messages, **offered, **forced)
                for call in said.tool_calls or []:
                    given = json.loads(call.function.arguments)
                    text = await call_mcp(connections, dispatch, call.function.name, given)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            await self.ask(client, ctx, messages, **offered)
            messages.append({"role": "user", "content": AGAIN})
            await self.ask(client, ctx, messages, **offered)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def ask(self, client, ctx, messages, **more):
        given = {"max_tokens": self.config.max_tokens} | more
        answer = await client.chat.completions.create(model=ctx.model, messages=messages, **given)
        said = answer.choices[0].message
        kept = {"role", "content", "tool_calls"}
        messages.append(said.model_dump(exclude_none=True, include=kept))
        return said
