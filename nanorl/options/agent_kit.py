"""`AgentKit`: the kit of a run, made of its options: environment, agent loop, sandbox, endpoint.

Left out: playing (nanorl/agents/kit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from nanorl.agents.kit import Kit
from nanorl.agents.loop import Agent, AgentLoop
from nanorl.agents.loops import load_loop
from nanorl.agents.times import RolloutTimes, TimesKept
from nanorl.envs.base import Services
from nanorl.envs.catalog import parse_arguments
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.judged import judges_of
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import num_env_workers, run_kind, run_sandbox, run_tokenizer
from nanorl.sandbox.base import WorkspaceSandbox

if TYPE_CHECKING:
    from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
    from nanorl.agents.endpoint.recording import Recording
    from nanorl.agents.endpoint.report import ReportRules
    from nanorl.envs.http_record.record_access import HttpAccess
    from nanorl.envs.http_record.recorder import RecordingProxy


def run_loop(config: RunConfig, kind: EnvKind) -> AgentLoop:
    """The loop that plays the tasks which name none. ValueError where it cannot be found, or does
    not take its options."""
    agent = config.agent
    arguments = parse_arguments(agent.loop_args, "--agent-args")
    if agent.command:
        loop = load_loop("command", {"command": agent.command, **arguments})
    else:
        loop = load_loop(agent.loop or kind.loop, arguments)
    if agent.scorer_key_file and isinstance(loop, HidesFiles):
        loop.check_hidden(agent.scorer_key_file)
    return loop


@runtime_checkable
class HidesFiles(Protocol):
    """A loop that knows which files its agent may read."""

    def check_hidden(self, file: Path) -> None:
        """ValueError where it may read `file`."""
        ...


def run_scoring(config: RunConfig) -> ReportRules | None:
    """The rules by which rewards may be reported by HTTP; None: nobody may. ValueError for a file
    that holds no key."""
    agent = config.agent
    if agent.scorer_key_file is None:
        return None
    from nanorl.agents.endpoint.report import ReportRules, read_scorer_key  # few runs need it

    return ReportRules(read_scorer_key(agent.scorer_key_file), agent.max_reward)


def open_proxy(config: RunConfig, *, is_given: bool) -> RecordingProxy:
    """The recording proxy of a run. ValueError where its environment could not be led to it."""
    if is_given:
        raise ValueError(
            f"--http.mode {config.http.mode} with an environment that is given as an object: it "
            "plays in this process, which cannot be led to a proxy; name its file instead"
        )
    from nanorl.envs.http_record.recorder import RecordingProxy  # few runs need it

    return RecordingProxy(config.http, store=config.http_store)


def run_hosted(kind: EnvKind, config: RunConfig, folder: Path, http: HttpAccess | None) -> EnvKind:
    """The environment with its episodes in processes of their own, where they belong there. Each of
    several has its own."""
    if isinstance(config.env, tuple):
        from nanorl.options.mixed_kit import hosted_members  # few runs have several

        host = partial(run_hosted, folder=folder, http=http)
        return hosted_members(kind, config, host)
    num_workers = num_env_workers(config)
    if not num_workers:
        return kind
    from nanorl.options.hosted_kind import host_kind  # nanosched's processes: not always needed

    return host_kind(kind, config, folder, num_workers, http)


def run_agent(config: RunConfig, kind: EnvKind) -> Callable[..., Agent]:
    """Make the run's agents: in several environments such as have each one's limits and loop."""
    if not isinstance(config.env, tuple):
        return Agent
    from nanorl.options.mixed_kit import mixed_agent  # few runs have several

    return mixed_agent(config, kind, run_loop)


class AgentKit(Kit):
    """Owns the environment of a run, and its sandbox if it needs one. `close()` ends them."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        kind: EnvKind | None = None,
        is_given: bool = False,
    ) -> None:
        """`folder` is the model's, for its tokenizer; `kind` the environment where it was made
        already. `is_given`: it was given as an object, which other processes could not make."""
        self.config = config
        self.kind = run_kind(config) if kind is None else kind
        self._proxy: RecordingProxy | None = None
        if config.http.mode != "off":
            self._proxy = open_proxy(config, is_given=is_given)
        if not is_given:
            self.kind = run_hosted(self.kind, config, folder, self._http)
        tokenizer = run_tokenizer(config, folder)
        self.sandbox: WorkspaceSandbox | None = None
        if self.kind.needs_sandbox:
            self.sandbox = run_sandbox(config)
        self._scoring = run_scoring(config)
        self._model = folder.name
        self._endpoint: RecordingServer | None = None
        self.times = TimesKept() if "otel" in config.log else None
        services = Services(
            tokenizer=tokenizer, sandbox=self.sandbox, timeout_s=config.tool.timeout_s
        )
        make_agent: Callable[..., Agent] = partial(
            run_agent(config, self.kind),
            tokenizer=tokenizer,
            limits=config.agent,
            loop=run_loop(config, self.kind),
            deadline_s=config.agent.deadline_s or None,
            open_session=self._open_session,
            http=self._http,
            times=self.times,
        )
        if config.rl.truncates:
            from nanorl.agents.kept_notes import noting  # few runs do

            make_agent = noting(make_agent)
        super().__init__(self.kind.open, services, make_agent)

    async def close_loop(self) -> None:
        """Close what belongs to the running event loop; `close` ends the rest."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def close(self) -> None:
        if self.sandbox is not None:
            self.sandbox.close()
        self.kind.close()
        if self._proxy is not None:
            self._proxy.close()

    @property
    def _http(self) -> HttpAccess | None:
        """The way to the recording proxy, where there is one."""
        return None if self._proxy is None else self._proxy.access

    def take_http_counts(self) -> dict[str, float]:
        """Count what the recording proxy has done since the last call."""
        counts = {} if self._proxy is None else self._proxy.take_counts()
        return {f"http/{name}": float(count) for name, count in counts.items()}

    def take_judge_costs(self) -> dict[str, float]:
        """The costs of the LLM judges of this process since the last call, where there are any."""
        judges = judges_of(self.kind)
        if not judges:
            return {}
        from nanorl.envs.rewards.judge_costs import total_costs  # here: few runs need it

        return total_costs(judge.costs for judge in judges)

    def take_times(self) -> Mapping[str, list[RolloutTimes]]:
        """When what happened in the rollouts that have ended since the last call."""
        return {} if self.times is None else self.times.take()

    def _open_session(self, recording: Recording) -> AbstractAsyncContextManager[ApiSession]:
        """A way in for an agent that calls the policy through an API."""
        if self._endpoint is None:
            from nanoinfer.dialects import all_dialects  # few runs need it
            from nanorl.agents.endpoint.endpoint_server import RecordingServer

            self._endpoint = RecordingServer(
                all_dialects(self.tokenizer),
                model=self._model,
                max_model_len=self.config.agent.max_context_tokens,
                host=self.config.agent.host,
                max_calls_at_once=self.config.agent.max_calls_at_once,
                scoring=self._scoring,
            )
            store = getattr(self.tokenizer, "store", None)
            if store is not None:
                self._endpoint.let_see(store)
        return self._endpoint.episode(recording)
