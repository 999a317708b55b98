"""Tasks and their rubric: the retold word should be made of letters."""

import verifiers.v1 as vf

from word_relay.servers.tool import WordRelayToolset

WORDS = ("harbour", "meadow", "lantern", "copper", "willow", "granite", "feather", "orchard")


class WordRelayData(vf.TaskData):
    word: str


class WordRelayTask(vf.Task[WordRelayData]):
    @vf.reward(weight=1.0)
    async def letters(self, trace: vf.Trace) -> float:
        said = trace.messages[-1].content or ""
        return sum(one in self.data.word for one in said) / max(len(said), 1)

    @vf.reward(weight=0.5)
    async def looked(self, trace: vf.Trace) -> float:
        return float(any(message.role == "tool" for message in trace.messages))

    @vf.metric
    async def num_said(self, trace: vf.Trace) -> float:
        return float(len(trace.messages[-1].content or ""))


class WordRelayConfig(vf.TasksetConfig):
    num_tasks: int = 16
    num_different: int = 1000
    has_tools: bool = True
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class WordRelayTaskset(vf.Taskset[WordRelayTask, WordRelayConfig]):
    def load(self) -> list[WordRelayTask]:
        return [
            WordRelayTask(
                WordRelayData(
                    prompt=f"Read {1 + place // 8} letters, then say the word.",
                    system_prompt="You read words.",
                    word=WORDS[place % 8],
                ),
                self.config.task,
            )
            for place in (one % self.config.num_different for one in range(self.config.num_tasks))
        ]

    @classmethod
    def toolsets(cls, config: WordRelayConfig) -> list[vf.Toolset]:
        return [WordRelayToolset(config.tools)] if config.has_tools else []
