"""Generated problems: are the answers right, hard to guess, and short enough to learn from?"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_runner import run_program

from nanorl.envs.actions import COMPACT, MARKDOWN, program
from nanorl.envs.tasks.family import Family
from nanorl.envs.tasks.problem import ProblemGenerator
from nanorl.envs.tasks.smollm2 import smollm2_family
from nanorl.envs.tasks.tiny import tiny_family
from nanorl.task import split_of

# One problem a kind, its answer worked out by hand from the text (and the file, where one counts).
BY_HAND = {
    "smollm2": {
        "arithmetic": ("What is 210 * 74 - 410?", "15130"),
        "area": ("A field is 964 long and 91 wide. What is its area?", "87724"),
        "change": ("You buy 33 bags for 30 each and pay with 6186. What is left?", "5196"),
        "powers": ("What is 6 to the power of 4, plus 187?", "1483"),
        "remainders": ("Find the remainder of 2929 divided by 212.", "173"),
        "shopping": (
            "A cup costs 13 and a book costs 137. What do 34 cups and 44 books cost?",
            "6470",
        ),
    },
    "tiny": {
        "sum": ("sum[26,14,12,85]", "137"),
        "squares": ("squares[87,23,22]", "8582"),
        "spread": ("spread[47,90,18,42]", "72"),
        "top_two": ("top two[72,33,11,40]", "112"),
        "product": ("product[14,69]", "966"),
        "modulo": ("a*b%c[63,19,97]", "33"),
        "power": ("power mod[79,98,59]", "57"),
        "mul_add": ("a*b+c[29,94,92]", "2818"),
        "add_mul": ("(a+b)*c[50,37,98]", "8526"),
        "octal": ("octal[79,20]", "3054"),
        "range_sum": ("range[18,53]", "1278"),
        "evens": ("evens[60,95,31,82,34]", "176"),
        "above": ("sum[58,55,57]if i>56", "115"),
        "ends": ("ends[28,55,95,57]", "1596"),
        "look_file": ('sum file"1038"', "419"),
        "look_module": ("call h(92,43)", "1624"),
        "chain": ('follow file"8949"', "163"),
        "repair_types": ('sum list"4944"', "227"),
        "repair_lines": ('sum lines"9375"', "468"),
    },
}
FAMILIES = {family.name: family for family in (smollm2_family(), tiny_family())}
KINDS = [(name, kind) for name, family in FAMILIES.items() for kind in family.generators]


def generator_of(family: str, kind: str) -> ProblemGenerator:
    return FAMILIES[family].generators[kind]


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_every_solution_prints_the_answer(family: str, kind: str, tmp_path: Path) -> None:
    rng = random.Random(f"oracle {kind}")
    for _ in range(60):
        problem = generator_of(family, kind)(rng)
        for programs in problem.solutions:
            outputs = [run_program(p, problem.files, tmp_path) for p in programs]
            assert outputs[-1] == problem.answer, (problem.prompt, programs)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_answers_equal_those_worked_out_by_hand(family: str, kind: str) -> None:
    problem = generator_of(family, kind)(random.Random(f"golden {kind}"))
    question = problem.prompt if family == "tiny" else "".join(problem.files.values())
    assert (question, problem.answer) == BY_HAND[family][kind]


def test_neither_a_question_nor_a_file_s_name_occurs_in_both_splits() -> None:
    for kind, generator in FAMILIES["smollm2"].generators.items():
        rng = random.Random(f"questions {kind}")
        for problem in (generator(rng) for _ in range(300)):
            ((name, question),) = problem.files.items()
            assert name in problem.prompt
            assert problem.split == split_of(problem.prompt) == split_of(question)


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_no_constant_answer_is_right_in_one_of_twenty(family: str, kind: str) -> None:
    rng = random.Random(f"entropy {kind}")
    answers = Counter(generator_of(family, kind)(rng).answer for _ in range(1500))
    answer, count = answers.most_common(1)[0]
    assert count / 1500 <= 0.05, f"always answering {answer!r} scores {count / 1500:.1%}"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_copying_from_the_question_or_the_files_does_not_score(family: str, kind: str) -> None:
    rng = random.Random(f"leak {kind}")
    score = 0.0
    for _ in range(300):
        problem = generator_of(family, kind)(rng)
        texts = [problem.prompt, *problem.files, *problem.files.values()]
        words = " ".join("".join(c if c.isalnum() else " " for c in t) for t in texts).split()
        numbers = {word for word in words if word.isdigit() == problem.answer.isdigit()}
        score += (problem.answer in numbers) / max(1, len(numbers))
    assert score / 300 <= 0.05, "copying a word of the question is too often right"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_kinds_of_several_turns_need_them(family: str, kind: str, tmp_path: Path) -> None:
    rng = random.Random(f"turns {kind}")
    for _ in range(20):
        problem = generator_of(family, kind)(rng)
        assert problem.kind == kind
        for programs in problem.solutions:
            assert (len(programs) > 1) == (kind in FAMILIES[family].several_turns)
            if len(programs) > 1:
                first = run_program(programs[0], problem.files, tmp_path)
                assert first != problem.answer
                assert ("Error" in first) == kind.startswith("repair")


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_habits_are_mostly_wrong(family: str, kind: str, tmp_path: Path) -> None:
    rng = random.Random(f"habit {kind}")
    right = 0
    for _ in range(60):
        problem = generator_of(family, kind)(rng)
        assert problem.habit
        outputs = [run_program(p, problem.files, tmp_path) for p in problem.habit]
        right += outputs[-1] == problem.answer
    assert right <= 30


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_same_seed_gives_the_same_problem(family: Family) -> None:
    for generator in family.generators.values():
        assert generator(random.Random(7)) == generator(random.Random(7))
        assert generator(random.Random(7)) != generator(random.Random(8))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_about_a_quarter_of_each_kind_is_held_out(family: Family) -> None:
    for kind, generator in family.generators.items():
        rng = random.Random(f"split {kind}")
        problems = [generator(rng) for _ in range(800)]
        assert all(p.split == split_of(p.prompt) for p in problems)
        share = sum(p.split == "heldout" for p in problems) / 800
        assert 0.17 < share < 0.33, (kind, share)


def lengths(family: Family, tokenizer, form, opening: str) -> Iterator[tuple[int, int]]:  # type: ignore[no-untyped-def]
    for kind, generator in family.generators.items():
        rng = random.Random(f"length {kind}")
        for _ in range(100):
            problem = generator(rng)
            prompt = tokenizer.encode(opening + problem.prompt).ids
            for programs in problem.solutions:
                for code in programs:
                    yield len(prompt), len(tokenizer.encode(form.write(program(code))).ids)


def test_tiny_prompts_and_programs_are_short() -> None:
    from nanorl.envs.tasks.tiny_model import corpus, train_tokenizer

    tokenizer = train_tokenizer(corpus())
    for prompt, code in lengths(FAMILIES["tiny"], tokenizer, COMPACT, "<usr>"):
        assert prompt <= 16
        assert code <= 30


@pytest.mark.smollm2
def test_smollm2_prompts_and_programs_are_short(smollm2_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    opening = f"<|im_start|>system\n{MARKDOWN.system}<|im_end|>\n<|im_start|>user\n"
    for prompt, code in lengths(FAMILIES["smollm2"], tokenizer, MARKDOWN, opening):
        assert prompt <= 100
        assert code <= 64  # 60 of code and the fence around it
