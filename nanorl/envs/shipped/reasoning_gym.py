"""`reasoning_gym`: any family of the package reasoning-gym, scored by the family's own scorer.

The prompt is the entry's question; the answer stands between <answer> tags, once. It pays 1 where
the scorer gives 1, else nothing: many scorers give a share to an answer that only holds the right
one somewhere, or is merely well formed (`partial=true` pays those shares). The scorer gets the
family's own entry, generated anew from its number, in a worker with limits of CPU seconds and of
memory. An answer that it chokes on is wrong, if it can score the entry's own under these limits.
A family whose scorer always pays for some text is refused (of version 0.1.25: coin_flip for "0",
complex_arithmetic for "nan", game_of_life_halting for anything).

    nanorl train --env reasoning_gym --env-args family=chain_sum max_terms=3 max_digits=2
    nanorl train --env reasoning_gym --env-args family=gcd,lcm tool=python
    nanorl train --env reasoning_gym --env-args family=maze level=1 size=2000 seed=7

Entries are drawn by number and generated one by one; one question in four, chosen by its hash, is
held out, so equal questions of different numbers never fall into both splits.
The teacher says the entry's answer; with tool=python it computes it by a program, for the families
in `PROGRAMS`. Left out: composite, and families that reasoning-gym builds as a whole beforehand,
in sizes for which that takes long (`size` makes them smaller).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nanoengine.extras import missing
from nanoinfer.chat.base import ToolCall
from nanoinfer.chat.fenced import FencedParser
from nanorl.envs.env import Done, Env
from nanorl.envs.hosting.fork import NoResultError, call_in_fork
from nanorl.envs.hosting.host_pool import HostingLimits, WorkerPool
from nanorl.envs.rewards.base import Transcript
from nanorl.envs.shipped.tagged_text import tagged
from nanorl.envs.tools.python import python
from nanorl.task import Task, content_id, split_of
from nanorl.types import InfrastructureError

_TAG = "answer"
_LONGEST_ANSWER = 10_000
_NUM_PROBED = 6
_MASTER_KEYS = ("qzxw", "0", "1", "-1", "nan", "inf", "True", "None", "[]", "x", "0 1 2 yes no A B")
"""Texts that a scorer must not pay for in most entries."""
_CPU_S, _MEMORY_BYTES = 10, 2 << 30
_WITHOUT_ANSWER = frozenset(
    ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
)
"""Families whose entries hold no answer of their own, for there are many: nobody can show one."""

PROGRAMS: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType(
    {
        "basic_arithmetic": lambda data: f"print(round({data['expression']}))",
        "chain_sum": lambda data: f"print({data['expression']})",
        "products": lambda data: f"print({data['expression']})",
        "gcd": lambda data: f"import math\nprint(math.gcd({_listed(data['numbers'])}))",
        "lcm": lambda data: f"import math\nprint(math.lcm({_listed(data['numbers'])}))",
        "count_bits": lambda data: f"print(bin({data['number']}).count('1'))",
        "letter_counting": lambda data: (
            f"print({' '.join(data['span'])!r}.lower().count({data['target_letter']!r}))"
        ),
    }
)
"""How the teacher solves an entry with Python, given its metadata."""


class ReasoningGym(Env):
    """`family`: one name, or several with commas between. `level` makes them harder by so many
    steps of the package's curriculum; further arguments are the families' own options."""

    parser = "fenced"
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turns": 1,
            "agent.max_turn_tokens": 64,
            "agent.max_context_tokens": 512,
            "warm_start.steps": 40,
        }
    )

    def __init__(
        self,
        family: str,
        *,
        tool: str = "",
        partial: bool = False,
        level: int | None = None,
        **options: Any,
    ) -> None:
        self.families = tuple(one.strip() for one in family.split(","))
        if tool not in ("", python.name):
            raise ValueError(f"--env-args tool={tool}: python, or nothing")
        self.is_partial = partial
        self._choice = FamilyOptions(self.families, level, options)
        self.system = f"Write the final answer as <{_TAG}>answer</{_TAG}>."
        known: Any = PROGRAMS if tool else set(self.families) - _WITHOUT_ANSWER
        self.has_program = bool(tool)
        if tool:
            self.tools = (python,)
            self.defaults = {**self.defaults, "agent.max_turns": 4}
        if not set(self.families) <= set(known):
            self.teacher = None  # type: ignore[assignment,method-assign]

    def setup(self) -> FamilyScorer:
        return FamilyScorer(self._choice)

    def tasks(self, rng: random.Random) -> Task:
        """One entry; equal questions are one task."""
        family = rng.choice(self.families)
        dataset = self.shared.datasets[family]
        number = rng.randrange(len(dataset))
        entry = dataset[number]
        question = entry["question"]
        metadata = entry["metadata"]
        data: dict[str, Any] = {"family": family, "number": number}
        if self.has_program and family in PROGRAMS:
            data["program"] = PROGRAMS[family](metadata)
        answer = entry["answer"]
        return Task(
            question,
            None if answer is None else str(answer),
            kind=family,
            data=data,
            task_id=content_id(family, question, None, {}),
            split=split_of(question),
        )

    def step(self, text: str) -> Done:
        answer = tagged(text, _TAG)
        if answer is None:
            self.metric("num_no_answer")
        return self.done(answer=answer)

    async def score(self, transcript: Transcript) -> float:
        answer = transcript.answer
        if not answer or len(answer) > _LONGEST_ANSWER:
            return 0.0
        data = self.task.data
        score = await self.shared.score(data["family"], data["number"], answer)
        return score if self.is_partial else float(score >= 1.0)

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        """The answer; with a tool, the program first, and then what it printed."""
        said = self.task.answer_text
        if self.has_program:
            if not observations:
                return FencedParser().write(ToolCall("python", {"code": self.task.data["program"]}))
            said = observations[-1].strip().splitlines()[-1]
        return f"<{_TAG}>{said}</{_TAG}>"


class FamilyOptions:
    """The families that are asked for and their options; makes their datasets in any process."""

    def __init__(
        self, families: Sequence[str], level: int | None, options: Mapping[str, Any]
    ) -> None:
        self.families, self.level = tuple(families), level
        self.options = {"seed": 0, "size": 10_000, **options}

    def datasets(self) -> dict[str, Any]:
        """By family. ValueError for a family or an option that there is not."""
        factory = _require_reasoning_gym()
        return {family: self._dataset(factory, family) for family in self.families}

    def _dataset(self, factory: Any, family: str) -> Any:
        if family not in factory.DATASETS:
            raise ValueError(
                f"--env-args family={family}: reasoning-gym has no such family; there are "
                f"{', '.join(sorted(factory.DATASETS))}"
            )
        try:
            options = self._of_level(factory, family) | self.options
            return factory.create_dataset(family, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"--env-args {self.options}: the family {family} refuses them: {error}"
            ) from error

    def _of_level(self, factory: Any, family: str) -> dict[str, Any]:
        """The options of the curriculum's level; an attribute with fewer levels is at its last."""
        if self.level is None:
            return {}
        curriculum = factory.create_curriculum(family)
        for name, attribute in curriculum.attributes.items():
            curriculum.set_attr_level(name, min(self.level, len(attribute.levels) - 1))
        config = vars(curriculum.generate_configuration())
        return {name: value for name, value in config.items() if name not in ("seed", "size")}


class FamilyScorer:
    """The datasets, and the scorers in a worker, which starts when it is needed."""

    def __init__(self, choice: FamilyOptions) -> None:
        """ValueError for families that are not there, or that always pay for some text."""
        self.datasets = choice.datasets()
        for family, dataset in self.datasets.items():
            _refuse_payer(family, dataset)
        self._pool = WorkerPool(
            ScorerSide, (choice,), num_workers=1, limits=HostingLimits(deadline_s=20.0 * _CPU_S)
        )

    async def score(self, family: str, number: int, answer: str) -> float:
        return await self._pool.call("score", family, number, answer)

    def close(self) -> None:
        """End the worker. Closing twice is fine."""
        self._pool.close()


class ScorerSide:
    """Lives in the worker; every score is a fork of it."""

    def __init__(self, choice: FamilyOptions) -> None:
        self._datasets = choice.datasets()

    def score(self, family: str, number: int, answer: str) -> float:
        """InfrastructureError where not even the entry's own answer can be scored."""
        dataset = self._datasets[family]
        entry = dataset[number]
        try:
            return _score_in_fork(dataset, entry, answer)
        except NoResultError:
            pass
        try:
            own = entry["answer"]
            if own is not None:
                _score_in_fork(dataset, entry, own)
        except NoResultError as error:
            raise InfrastructureError(
                f"the scorer of {family} fails on the entry's own answer: {error}"
            ) from error
        return 0.0


def _score_in_fork(dataset: Any, entry: Mapping[str, Any], answer: str) -> float:
    return call_in_fork(
        lambda: float(dataset.score_answer(answer, entry)),
        cpu_s=_CPU_S,
        memory_bytes=_MEMORY_BYTES,
    )


def _refuse_payer(family: str, dataset: Any) -> None:
    """ValueError if the family's scorer gives 1 to one and the same text for most entries whose
    answer it is not: a policy would find it."""
    entries = [dataset[number] for number in range(min(_NUM_PROBED, len(dataset)))]
    for text in _MASTER_KEYS:
        others = [entry for entry in entries if entry["answer"] != text]
        if 2 * sum(_pays(dataset, text, entry) for entry in others) > len(entries):
            raise ValueError(
                f"--env-args family={family}: its scorer gives 1 to {text!r}, whatever the entry, "
                "so there is nothing to learn; choose another family"
            )


def _pays(dataset: Any, text: str, entry: Mapping[str, Any]) -> bool:
    try:
        return bool(dataset.score_answer(text, entry) >= 1.0)
    except Exception:  # the boundary of a plug-in: a scorer that chokes on a text does not pay
        return False


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _require_reasoning_gym() -> Any:
    try:
        from reasoning_gym import factory  # here: an extra
    except ImportError as error:
        name = "reasoning-gym"
        raise missing("the environment reasoning_gym", name, extra=name) from error
    return factory
