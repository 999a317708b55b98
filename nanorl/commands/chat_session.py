"""What a chat in the terminal holds and shows: engines, sandbox, conversation, and its commands.

Next: nanorl/agents/conversation.py (the conversation itself). Left out: messages of several lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.text import Text

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.llm import LLM
from nanoinfer.params import SamplingParams
from nanorl.agents.conversation import Conversation, End, Listener, Reply, picture_line
from nanorl.commands.terminal import STYLES, labelled, printable
from nanorl.distributed.roles.give_sight import give_sight
from nanorl.envs.base import Environment
from nanorl.envs.images import Image
from nanorl.options.agent_kit import AgentKit
from nanorl.options.parts import load_tasks
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import folder_sees, pictures_folder, run_kind, run_tokenizer
from nanorl.options.trust import PLAYED, require
from nanorl.run.saved_models import SavedModels, find_models
from nanorl.task import Task
from nanorl.types import InfrastructureError

TRAINED, BASE = "trained", "base"
PLAIN_TURN_TOKENS = 512
"""The longest turn of a model that belongs to no run."""
NO_TEXT = "(no text)"
OWN_WORDS = "chat"
"""The id of a task that a person made up."""
ENDS = MappingProxyType(
    {
        "done": "",
        "turns": "cut off: no turn is left (agent.max-turns)",
        "turn": "cut off: the turn is too long (--max-tokens)",
        "response": "cut off: the reply is too long (agent.max-response-tokens)",
        "context": "cut off: the conversation is as long as it may be; /reset begins a new one",
        "stopped": "stopped",
        "failed": "the environment could not answer, which is not the agent's doing",
    }
)


def make_sampling(temperature: float) -> SamplingParams:
    if not 0.0 <= temperature <= 10.0:
        raise ValueError(f"temperature {temperature:g}: must be 0 to 10")
    return SamplingParams(temperature=temperature)


@contextlib.contextmanager
def opened_session(
    source: str, *, base: str | None, env: str, temperature: float, max_tokens: int | None
) -> Iterator[ChatSession]:
    """A session with all that it holds: the model's folder, the sandbox, the event loop."""
    sampling = make_sampling(temperature)
    saved = find_models(source)
    if base is not None:
        find_models(base)  # here: the engine is made when it is first asked
    config = saved.run or _plain_config()
    if saved.run is not None:
        is_theirs = not env or env == "code" or isinstance(config.env, tuple)
        require(config.to_json(), config.run_dir, PLAYED if is_theirs else ("agent", "sandbox"))
    if isinstance(config.env, tuple):
        config = _one_of(config, env, source)
    elif env and env != "code":
        config = replace(config, env=env, env_args=(), reward="", tasks=None)
    if max_tokens is not None:
        most = max(config.agent.max_context_tokens, max_tokens + 1)
        agent = replace(config.agent, max_turn_tokens=max_tokens, max_context_tokens=most)
        config = replace(config, agent=agent)
    with ExitStack() as stack:
        folder = stack.enter_context(saved.folder())
        if folder_sees(folder):  # its pictures are the chat's, and go with it
            scratch = stack.enter_context(TemporaryDirectory(prefix="nanorl-chat-"))
            http = replace(config.http, store=config.http_store)
            config = replace(config, out=Path(scratch), http=http)
        engines = stack.enter_context(Engines(saved, folder, base, pictures_folder(config)))
        limits = replace(config.agent, max_context_tokens=engines.get(TRAINED).engine.room(0))
        environment = None
        if saved.run is not None or env:
            environment = stack.enter_context(_environments(config, folder))
        tokenizer = run_tokenizer(config, folder)
        conversation = Conversation(tokenizer, limits, sampling, environment)
        yield ChatSession(saved, config, engines, conversation)


def _one_of(config: RunConfig, env: str, source: str) -> RunConfig:
    """The options of a run in several environments for the one of that name. ValueError where there
    is none: what a person says does not tell whose task it is."""
    from nanorl.options.env_mix import alone, members_of  # here: few runs have several

    members = members_of(config)
    if env not in members:
        raise ValueError(
            f"--env {env or '(none)'}: {source} was trained in several environments; name the one "
            f"that answers: {', '.join(members)}"
        )
    return alone(config, members[env])


def _plain_config() -> RunConfig:
    """The options of a model that belongs to no run."""
    config = get_preset("smollm2").config()
    agent = replace(
        config.agent, max_turn_tokens=PLAIN_TURN_TOKENS, max_context_tokens=8 * PLAIN_TURN_TOKENS
    )
    return replace(config, agent=agent)


@contextlib.contextmanager
def _environments(config: RunConfig, folder: Path) -> Iterator[Callable[[], Environment]]:
    """Makes the environment of one episode; the sandbox ends with the context."""
    kit = AgentKit(replace(config, tool=replace(config.tool, workers=1)), folder)
    try:
        yield kit.environment
    finally:
        kit.close()


class Engines:
    """The engines of the models that may answer, each loaded when it is first asked."""

    def __init__(self, saved: SavedModels, folder: Path, base: str | None, pictures: Path) -> None:
        """`pictures` is the folder of what models that see are shown."""
        self._saved = saved
        self._pictures = pictures
        self._folder = folder
        self._base = base
        self._loaded: dict[str, AsyncEngine] = {}
        self.runner = asyncio.Runner()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._loaded.values():
            self.runner.run(engine.close())
        self.runner.close()

    @property
    def names(self) -> tuple[str, ...]:
        has_base = self._saved.run is not None or self._base is not None
        return (TRAINED, BASE) if has_base else (TRAINED,)

    def get(self, name: str) -> AsyncEngine:
        """`ValueError` for a name that is none, or a base of another tokenizer."""
        if name not in (TRAINED, BASE):
            raise ValueError(f"model {name!r}: there is {' and '.join(self.names)}")
        if name not in self._loaded:
            self._loaded[name] = self._load(
                self._folder if name == TRAINED else self._base_folder()
            )
        return self._loaded[name]

    def _base_folder(self) -> Path:
        if self._base is None:
            return self._saved.base()
        folder = find_models(self._base).place
        theirs, ours = ChatTokenizer.from_folder(folder), ChatTokenizer.from_folder(self._folder)
        if theirs.to_json() != ours.to_json():
            raise ValueError(
                f"--base {self._base}: has another tokenizer than {self._saved.name}, so it "
                "cannot go on with the same tokens; start a chat of its own with it"
            )
        return folder

    def _load(self, folder: Path) -> AsyncEngine:
        eos_ids = tuple(sorted(ChatTokenizer.from_folder(folder).eos_ids))
        config = InferConfig(eos_ids=eos_ids)
        engine = LLM(folder, config, dtype=self._saved.dtype).engine
        give_sight(engine.model, folder, self._pictures if folder_sees(folder) else None)
        return AsyncEngine(engine)


@dataclass
class ChatSession:
    """A chat on the screen: the conversation, who answers, and the commands."""

    saved: SavedModels
    config: RunConfig
    engines: Engines
    conversation: Conversation
    model: str = TRAINED

    def __post_init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._waiting: list[str] = []  # pictures of the next message, by their hash
        self._is_line_open = False

    def typed_lines(self) -> Iterator[str]:
        """Yield the lines that the person types, until Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit lines and recall earlier ones
        self._show(f"{self.saved.describe()}\n/help lists the commands, Ctrl-D ends.", "dim")
        while True:
            try:
                yield input("you    " if sys.stdin.isatty() else "")
            except KeyboardInterrupt:
                print()
            except EOFError:
                return

    def take(self, line: str, *, is_typed: bool) -> None:
        """Answer a message or obey a command. What is wrong with a typed one is said; of others
        it is raised."""
        text = line.strip()
        if not text:
            return
        if not is_typed:
            self._console.print(labelled("you", text))
        try:
            if text.startswith("/"):
                self._obey(text)
            else:
                self._ask(Task(task_id=OWN_WORDS, kind="chat", prompt=text, answer=""))
        except KeyboardInterrupt:
            self._end_line()
            self._show(ENDS["stopped"], "dim")
        except (ValueError, OSError) as error:
            if not is_typed:
                raise
            self._end_line()
            self._show(f"error: {error}", "red")

    def choose(self, name: str) -> None:
        """Let that model answer from now on; it is loaded here."""
        self.engines.get(name)
        self.model = name

    # Commands; each is given what stands after its name

    def switch(self, name: str) -> None:
        if name:
            self.choose(name)
        self._show(f"{self.model} answers; there is {' and '.join(self.engines.names)}", "dim")

    def compare(self, _: str) -> None:
        """Ask the last message again: each model answers from the same tokens."""
        for name in self.engines.names:
            self._show(f"--- {name} ---", "dim")
            self._run(self.conversation.ask_again, self.engines.get(name), name)

    def temperature(self, value: str) -> None:
        try:
            self.conversation.sampling = make_sampling(float(value))
        except ValueError:
            raise ValueError(f"/temperature {value}: give a number from 0 to 10") from None

    def task(self, number: str) -> None:
        """Give the agent a held-out task of the run, its files included."""
        if self.saved.run is None:
            raise ValueError("/task: a model that belongs to no run has no tasks")
        tasks = load_tasks(self.config, run_kind(self.config)).heldout
        if not (number or "0").isdecimal() or int(number or "0") >= len(tasks):
            raise ValueError(f"/task {number}: give a number from 0 to {len(tasks) - 1}")
        chosen = tasks[int(number or "0")]
        self._console.print(labelled("task", chosen.prompt_text))
        self._ask(chosen)
        self._console.print(labelled("wanted", chosen.answer_text))

    def image(self, file: str) -> None:
        """Show a picture with the next message; without a file, show none."""
        if not file:
            self._waiting = []
            self._show("no picture waits for the next message", "dim")
            return
        store = getattr(self.conversation.tokenizer, "store", None)
        if store is None:
            raise ValueError(
                f"/image {file}: {self.saved.name} reads text alone; talk to a model with a vision "
                "tower"
            )
        try:
            sha256 = store.add(Image(Path(file).expanduser()).data())
        except (ValueError, OSError) as error:
            raise ValueError(f"/image {file}: {error}") from None
        self._waiting.append(sha256)
        line = picture_line(self.conversation.tokenizer, sha256, len(self._waiting))
        self._show(f"{line} goes with the next message", "dim")

    def reset(self, _: str) -> None:
        self._waiting = []
        self.conversation.clear()

    def save(self, file: str) -> None:
        if not file:
            raise ValueError("/save: name the file, /save chat.json")
        data = {"source": self.saved.name, "model": str(self.saved.place)}
        data |= self.conversation.to_json()
        Path(file).expanduser().write_text(json.dumps(data, indent=2), encoding="utf-8")
        self._show(f"saved to {file}", "dim")

    def help(self, _: str) -> None:
        self._show("\n".join(f"{usage:<20} {text}" for usage, text in COMMANDS.items()), "dim")

    # What happens, and what is shown of it

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        known = {usage.split()[0]: usage for usage in COMMANDS}
        if name not in known:
            raise ValueError(f"{name}: no such command; there are {', '.join(known)}")
        methods: dict[str, Callable[[str], None]] = {
            "/model": self.switch,
            "/compare": self.compare,
            "/task": self.task,
            "/image": self.image,
            "/temperature": self.temperature,
            "/reset": self.reset,
            "/save": self.save,
            "/help": self.help,
        }
        methods[name](rest.strip())

    def _ask(self, task: Task) -> None:
        say = partial(self.conversation.say, pictures=tuple(self._waiting))
        try:
            end = self._run(say, task, self.engines.get(self.model), self.model)
            if end == "failed" and task.task_id == OWN_WORDS:
                self._show("it may need a task of its own, which words are not: /task", "dim")
        except InfrastructureError as error:
            raise ValueError(
                f"{error}; an environment that needs tasks of its own is given one by /task"
            ) from error
        self._waiting = []

    def _run(self, method: Callable[..., Coroutine[Any, Any, Reply]], *arguments: Any) -> End:
        """Let an agent reply, on the screen. Ctrl-C stops the reply, not the program."""
        listener = Listener(on_text=self._on_text, on_observation=self._on_observation)
        reply = self.engines.runner.run(method(*arguments, listener=listener))
        if not reply.text:
            self._on_text(NO_TEXT)
        self._end_line()
        speed = f"{reply.num_tokens / reply.generation_s:.0f} tokens/s"
        num_turns = sum(turn["role"] == "agent" for turn in reply.turns)
        facts = [f"{num_turns} turn{'s' * (num_turns != 1)}", f"{reply.num_tokens} tokens", speed]
        self._show(", ".join([*facts, *filter(None, (ENDS[reply.end], reply.note))]), "dim")
        return reply.end

    def _on_text(self, text: str) -> None:
        if not self._is_line_open and text:
            self._console.print(Text(f"{'agent':<7}", style=STYLES["agent"]), end="")
            self._is_line_open = True
        self._console.print(Text(printable(text).replace("\n", "\n       ")), end="")

    def _on_observation(self, text: str) -> None:
        self._end_line()
        self._console.print(labelled("tool", text))

    def _end_line(self) -> None:
        if self._is_line_open:
            self._console.print()
        self._is_line_open = False

    def _show(self, text: str, style: str) -> None:
        self._console.print(Text(printable(text), style=style))


COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/model [NAME]": "who answers: trained, or base, the model that the run began with",
        "/compare": "the last message again, answered by each model in the same place",
        "/task [N]": "give the agent a held-out task of its run",
        "/image FILE": "show a picture with the next message; without a file: none",
        "/temperature X": "0 takes the likeliest token",
        "/reset": "forget the conversation",
        "/save FILE.json": "write the conversation, with its token ids",
        "/help": "this",
    }
)
