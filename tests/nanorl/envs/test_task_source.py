"""Which task comes when: pure functions of integers, disjoint splits, clear errors for files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from nanorl.envs.tasks.family import generators_of
from nanorl.envs.tasks.readers import read_tasks
from nanorl.envs.tasks.smollm2 import smollm2_family
from nanorl.envs.tasks.source import GeneratedTasks, ListTasks
from nanorl.envs.tasks.tiny import tiny_family
from nanorl.task import Task, content_id

BOTH = [smollm2_family(), tiny_family()]


def test_a_batch_depends_on_nothing_but_seed_and_step() -> None:
    source = GeneratedTasks(generators_of(BOTH), seed=3)
    later = source.batch(17, 12)
    for step in range(5):
        source.batch(step, 12)
    assert source.batch(17, 12) == later
    assert GeneratedTasks(generators_of(BOTH), seed=3).batch(17, 12) == later
    assert GeneratedTasks(generators_of(BOTH), seed=4).batch(17, 12) != later
    assert source.batch(18, 12) != later


def test_every_round_of_kinds_has_an_order_of_its_own_and_every_heldout_seed_its_tasks() -> None:
    source = GeneratedTasks(generators_of([tiny_family()]), seed=3)
    num_kinds = len(source.generators)
    rounds = [[task.kind for task in source.batch(step, num_kinds)] for step in range(4)]
    assert len({tuple(kinds) for kinds in rounds}) == 4
    assert len({tuple(sorted(kinds)) for kinds in rounds}) == 1
    first, other = (source.heldout(8, seed) for seed in (0, 1))
    assert first != other and first == GeneratedTasks(
        generators_of([tiny_family()]), seed=4
    ).heldout(8, 0)


def test_task_ids_are_equal_in_another_process() -> None:
    program = (
        "from nanorl.envs.tasks.family import generators_of\n"
        "from nanorl.envs.tasks.source import GeneratedTasks\n"
        "from nanorl.envs.tasks.tiny import tiny_family\n"
        "tasks = GeneratedTasks(generators_of([tiny_family()]), 5).batch(2, 40)\n"
        "print(*[task.task_id for task in tasks])"
    )
    for hash_seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            check=True,
        )
        expected = [
            t.task_id for t in GeneratedTasks(generators_of([tiny_family()]), 5).batch(2, 40)
        ]
        assert out.stdout.split() == expected


def test_no_prompt_is_both_trained_on_and_held_out() -> None:
    source = GeneratedTasks(generators_of(BOTH), seed=0)
    trained = {task.prompt for step in range(150) for task in source.batch(step, 33)}
    held = {task.prompt for seed in range(3) for task in source.heldout(500, seed)}
    assert len(held) > 1200
    assert not trained & held
    assert {t.split for t in source.batch(0, 33)} == {"train"}
    assert {t.split for t in source.heldout(33, 1)} == {"heldout"}


@pytest.mark.parametrize("family", BOTH, ids=lambda f: f.name)
def test_every_kind_comes_equally_often(family) -> None:  # type: ignore[no-untyped-def]
    num_kinds = len(family.generators)
    source = GeneratedTasks(generators_of([family]), seed=1)
    counts = Counter(t.kind for step in range(num_kinds) for t in source.batch(step, 10))
    assert set(counts.values()) == {10}
    held = Counter(t.kind for t in source.heldout(10 * num_kinds, seed=1))
    assert max(held.values()) - min(held.values()) <= 1


def test_a_kind_of_few_tasks_ends_and_the_others_go_on() -> None:
    kinds = {
        "many": lambda rng: Task(f"{rng.randint(1, 10**6)}?", split="heldout"),
        "three": lambda rng: Task(f"one of three: {rng.randint(1, 3)}", split="heldout"),
        "two": lambda rng: Task(f"one of two: {rng.randint(1, 2)}", split="heldout"),
    }
    tasks = GeneratedTasks(kinds, seed=0).heldout(40, seed=1)
    counts = Counter(task.prompt.partition(":")[0] for task in tasks if ":" in task.prompt)
    assert counts == {"one of three": 3, "one of two": 2}
    assert len({task.prompt for task in tasks}) == 40
    few = GeneratedTasks({name: kinds[name] for name in ("three", "two")}, seed=0)
    assert len(few.heldout(40, seed=1)) == 5


def test_heldout_tasks_are_all_different() -> None:
    tasks = GeneratedTasks(generators_of([tiny_family()]), seed=0).heldout(400, seed=9)
    assert len({task.prompt for task in tasks}) == 400


def test_the_task_id_covers_prompt_answer_and_files() -> None:
    base = content_id("k", "p", "a", {"f": "t"})
    assert base == content_id("k", "p", "a", {"f": "t"})
    others = [("j", "p", "a", {"f": "t"}), ("k", "q", "a", {"f": "t"}), ("k", "p", "b", {"f": "t"})]
    others += [("k", "p", "a", {"f": "u"}), ("k", "p", "a", {"g": "t"}), ("k", "p", "a", {})]
    others += [("k", "p", "af", {"": "t"}), ("k", "pa", "", {"f": "t"})]
    assert len({base, *(content_id(*other) for other in others)}) == len(others) + 1


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="split='test' is unknown; use 'train' or 'heldout'"):
        GeneratedTasks(generators_of(BOTH), seed=0, split="test")  # type: ignore[arg-type]


def write(path: Path, records: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def test_a_task_file_is_read_split_and_shuffled_by_epoch(tmp_path: Path) -> None:
    records: list[object] = [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(60)]
    records.append({"prompt": "Sum a.txt", "answer": "6", "files": {"a.txt": "1 2 3"}, "kind": "s"})
    source = ListTasks(read_tasks(write(tmp_path / "t.jsonl", records)), seed=2)
    n = len(source.tasks)
    held = source.heldout(1000, seed=0)
    assert n + len(held) == 61
    twice = ListTasks(read_tasks(write(tmp_path / "twice.jsonl", records + records)), seed=2)
    assert (len(twice.tasks), len(twice.heldout_tasks)) == (n, len(held)), "a task twice is one"
    assert source.heldout(5, seed=0) == held[:5] != source.heldout(5, seed=1)
    assert not {t.prompt for t in source.tasks} & {t.prompt for t in held}
    epochs = [[source.batch(step, 1)[0] for step in range(e * n, e * n + n)] for e in range(2)]
    assert Counter(t.prompt for t in epochs[0]) == Counter(t.prompt for t in epochs[1])
    assert epochs[0] != epochs[1]
    one = next(t for t in [*source.tasks, *held] if t.kind == "s")
    assert (one.answer, one.files) == ("6", {"a.txt": "1 2 3"})
    assert isinstance(one, Task)
    assert any(t.answer == "60" for t in [*source.tasks, *held])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", r"t\.jsonl:2: not JSON at column 2"),
        ("[1, 2]", r"t\.jsonl:2: a list, but a task is a JSON object"),
        ('{"prompt": "x"}', r"t\.jsonl:2: field 'answer' is missing"),
        ('{"answer": "x"}', r"t\.jsonl:2: field 'prompt' is missing"),
        ('{"prompt": "x", "answer": [1]}', r":2: field 'answer' is \[1\], a list; a text or a num"),
        ('{"prompt": "x", "answer": null}', r":2: field 'answer' is None"),
        ('{"prompt": "x", "answer": true}', r":2: field 'answer' is True, a bool"),
        ('{"prompt": 5, "answer": 1}', r":2: field 'prompt' is 5, a int; a text or a list of"),
        ('{"prompt": " ", "answer": 1}', r":2: field 'prompt' is empty"),
        ('{"prompt": "x", "answer": " "}', r":2: field 'answer' is empty"),
        ('{"prompt": "x", "answer": 1, "file": {}}', r":2: field 'file' is unknown; use \('prom"),
        ('{"prompt": "x", "answer": 1, "files": "a"}', r":2: field 'files' is 'a', a str"),
        ('{"prompt": "x", "answer": 1, "files": {"a": 1}}', r":2: field 'files' holds 1 under 'a'"),
        ('{"prompt": "x", "answer": 1, "files": {"../a": ""}}', r"names '\.\./a'; use plain names"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "What is 1 + 1?", "answer": 2}\n' + line)
    with pytest.raises(ValueError, match=message):
        ListTasks(read_tasks(path), seed=0)


def test_missing_empty_and_too_small_files_say_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        ListTasks(read_tasks(tmp_path / "none.jsonl"), seed=0)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no task"):
        ListTasks(read_tasks(tmp_path / "empty.jsonl"), seed=0)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ValueError, match="not UTF-8"):
        ListTasks(read_tasks(tmp_path / "latin.jsonl"), seed=0)
    write(tmp_path / "one.jsonl", [{"prompt": "a", "answer": 1}])
    with pytest.raises(ValueError, match="none of its 1 tasks falls into the split"):
        ListTasks(read_tasks(tmp_path / "one.jsonl"), seed=0)
