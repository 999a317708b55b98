"""Doubles of an engine and a sandbox, and a tiny handmade tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.chat import ToolChat
from nanoinfer.params import Output, SamplingParams
from nanorl.envs.actions import MARKDOWN, ActionFormat
from nanorl.envs.base import Services
from nanorl.envs.code import CodeEnv
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.tools.python import python
from nanorl.sandbox.base import ExecResult, ExecStatus, Sandbox

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS, START, OTHER_EOS = 256, 257, 258


def tiny_tokenizer(template: str | None = TEMPLATE, eos_ids: tuple[int, ...] = (EOS, OTHER_EOS)):
    """One token a byte, and a merge of 'a'+'b' (259) that the policy need not use."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    special = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]
    vocab |= {token: 256 + index for index, token in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab | {"ab": 259}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return ChatTokenizer(tokenizer, eos_ids=eos_ids, chat_template=template)


def output_of(ids: list[int], finish: str = "stop", version: int = 3) -> Output:
    logps = [-0.5 - 0.01 * place for place in range(len(ids))]
    return Output(ids=ids, logps=logps, versions=[version] * len(ids), finish_reason=finish)


@dataclass
class ScriptedGenerator:
    """Says the scripted texts (or `Output`s) one after the other and records what it was asked."""

    tokenizer: ChatTokenizer
    script: list[str | Output]
    calls: list[tuple[list[int], SamplingParams]] = field(default_factory=list)

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.calls.append((list(ids), params))
        said = self.script[len(self.calls) - 1]
        if isinstance(said, Output):
            return said
        said_ids = [*self.tokenizer.encode(said), EOS]
        if len(said_ids) > params.max_tokens:
            return output_of(said_ids[: params.max_tokens], "length")
        return output_of(said_ids)


def exec_result(
    status: str = "ok", stdout: bytes = b"", stderr: bytes = b"", exit_code: int = 0
) -> ExecResult:
    return ExecResult(
        status=ExecStatus(status),
        exit_code=exit_code,
        stdout=stdout,
        stderr=stderr,
        truncated=status == "output_limit",
        cpu_s=0.0,
        wall_s=0.0,
        maxrss_bytes=0,
        backend="none",
    )


@dataclass
class FakeSandbox:
    results: list[ExecResult | Exception]
    programs: list[tuple[str, dict[str, str], float]] = field(default_factory=list)

    async def run(self, code: str, *, files: Mapping[str, str], timeout_s: float) -> ExecResult:
        self.programs.append((code, dict(files), timeout_s))
        result = self.results[len(self.programs) - 1]
        if isinstance(result, Exception):
            raise result
        return result


class CodeEpisode(EnvEpisode):
    """An episode of the code environment, which counts how often it is closed."""

    def __init__(
        self,
        sandbox: Sandbox,
        form: ActionFormat = MARKDOWN,
        *,
        timeout_s: float = 5.0,
        is_tool_enabled: bool = True,
    ) -> None:
        services = Services(
            tokenizer=tiny_tokenizer(),
            sandbox=sandbox,
            timeout_s=timeout_s,
            is_tool_enabled=is_tool_enabled,
        )
        chat = ToolChat(parser=form, description=form.system)
        super().__init__(CodeEnv(form), (python,), chat, services)
        self.num_closed = 0

    async def close(self) -> None:
        self.num_closed += 1
        await super().close()
