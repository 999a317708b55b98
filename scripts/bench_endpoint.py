"""What the recording server costs: the same rollouts through HTTP and in process, in turns.

    bash scripts/bench.sh endpoint [--preset tiny] [--episodes 64] [--turns 3] [--runs 3]

Episodes of several turns of the same length are played at once on one engine: by a loop of the
project, which hands token ids to the engine, and by a client of the `openai` package, which sends
the conversation as JSON to the endpoint each turn. Both end every turn at the same number of
tokens. The client's own work (building requests, reading answers) is part of what is measured: it
shares the process and its cores. Row: tokens/s through HTTP, the peer is the loop.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench_output import print_rows, write_json

from nanoinfer.params import SamplingParams
from nanorl.agents.api_agent import ApiLoop
from nanorl.agents.episode import Episode
from nanorl.agents.loop import AgentLoop
from nanorl.distributed.roles.player import Player
from nanorl.options.parts import Parts, num_threads
from nanorl.options.run_config import RunConfig
from nanorl.run.parse import parse_arguments
from nanorl.task import Task, derive_seed
from nanorl.types import Rollout

QUESTION = "Tell me about the number {}, in a few words, then say which number comes next."
MORE = "Go on."


async def in_process(episode: Episode) -> None:
    """Turns of one conversation, as any loop of the project takes them."""
    await episode.start()
    while await episode.turn() or episode.context.builder.num_turns:
        episode.context.builder.truncation = None  # each turn is cut at its length, on purpose
        if episode.context.turns_left < 1 or not episode.observe(MORE):
            return


def through_http(num_turns: int) -> ApiLoop:
    async def agent(task, client):  # type: ignore[no-untyped-def]
        messages = list(task.messages)
        for _ in range(num_turns):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": MORE}]
        return 0.0

    return ApiLoop(agent)


async def play_all(player: Player, loop: AgentLoop, tasks: list[Task], run: int) -> float:
    """Sampled tokens a second of all tasks at once."""

    async def one(index: int, task: Task) -> Rollout:
        sampling = SamplingParams(
            temperature=1.0, seed=derive_seed("bench", run, index), ignore_eos=True
        )
        agent = replace(player.kit.agent(player.generator), loop=loop)
        return await agent.play(
            task,
            player.kit.environment(),
            group_id=f"g{index}",
            rollout_id=f"r{index}",
            sampling=sampling,
        )

    start = time.perf_counter()
    rollouts = await asyncio.gather(*(one(index, task) for index, task in enumerate(tasks)))
    seconds = time.perf_counter() - start
    failed = [rollout.error for rollout in rollouts if rollout.error]
    assert not failed, failed[0]
    counts = {rollout.num_action_tokens for rollout in rollouts}
    assert len(counts) == 1, f"rollouts of different lengths: {counts}"
    return sum(rollout.num_action_tokens for rollout in rollouts) / seconds


async def measure(player: Player, options: Namespace, tasks: list[Task]) -> dict[str, list[float]]:
    loops: dict[str, AgentLoop] = {"http": through_http(options.turns), "in process": in_process}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for run in range(options.runs + 1):
        for name in list(loops)[:: 1 if run % 2 else -1]:
            speed = await play_all(player, loops[name], tasks, run)
            if run:  # the first is for warming up
                found[name].append(speed)
    await player.close_loop()
    return found


def config_of(options: Namespace, folder: Path) -> RunConfig:
    file = folder / "tasks.jsonl"
    lines = [
        {"prompt": QUESTION.format(i), "answer": "", "split": "train" if i else "heldout"}
        for i in range(options.episodes + 1)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = f"""--preset {options.preset} --out {folder / "run"} --env answer --tasks {file}
        --agent.max-turns {options.turns} --agent.max-turn-tokens {options.tokens}
        --agent.max-context-tokens 512 --dtype {options.dtype} --threads {options.threads}
        --warm-start.steps 0"""
    return parse_arguments(words.split())


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="smollm2")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        parts = Parts(config_of(options, Path(scratch)))
        tasks = list(parts.tasks.train.batch(0, options.episodes))
        player = Player(parts)
        try:
            found = asyncio.run(measure(player, options, tasks))
        finally:
            player.close()
    value, peer = median(found["http"]), median(found["in process"])
    row = {
        "name": f"endpoint-{options.episodes}-episodes",
        "dtype": options.dtype,
        "threads": num_threads(parts.config),
        "value": value,
        "unit": "tokens/s",
        "peer": "the same rollouts in process",
        "peer_value": peer,
        "ratio": value / peer,
        "bound": None,
        "runs": found,
    }
    print_rows([row])
    if options.json is not None:
        write_json(options.json, [row])


if __name__ == "__main__":
    main()
