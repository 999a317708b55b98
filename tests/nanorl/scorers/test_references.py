"""Several teachers as one reference: what the option means, whom it asks, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_cases import DENSE, write_model
from test_recipe_references import NUM_BATCHES, same
from torch import Tensor

from nanoengine.heads.scorer import Scorer
from nanoengine.packing import Sample, TopTokens
from nanorl.algorithms.recipes import named_spec
from nanorl.options.engine_config import EngineLimits
from nanorl.options.phase_config import RLConfig
from nanorl.options.reference_check import check_reference
from nanorl.options.reference_names import ReferenceName, parse_references, shares_of
from nanorl.options.run_config import RunConfig
from nanorl.scorers.references import References, load_reference, reference_folders


@dataclass
class Teacher:
    """Gives every sample the log-probs that it is told, and notes whom it was asked about."""

    logps: dict[tuple[int, ...], np.ndarray]
    asked: list[str] = field(default_factory=list)

    def forward_logprobs(self, samples: Sequence[Sample], **_: float) -> list[Tensor]:
        self.asked += [sample.kind for sample in samples]
        return [torch.tensor(self.logps[tuple(sample.tokens)]) for sample in samples]

    def forward_top(self, samples: Sequence[Sample], k: int, **_: float) -> list[TopTokens]:
        self.asked += [sample.kind for sample in samples]
        shape = [(len(sample.tokens), k) for sample in samples]
        mine = [self.logps[tuple(sample.tokens)][0] for sample in samples]
        return [
            TopTokens(torch.zeros(size, dtype=torch.int64), torch.full(size, float(one)))
            for size, one in zip(shape, mine, strict=True)
        ]


def test_the_option_by_hand(tmp_path: Path) -> None:
    assert parse_references("") == []
    assert parse_references("org/a") == [ReferenceName("org/a")]
    assert parse_references("org/a=3, org/b") == [
        ReferenceName("org/a", weight=3.0),
        ReferenceName("org/b"),
    ]
    assert parse_references("math:org/a,code:org/b=0.5") == [
        ReferenceName("org/a", "math"),
        ReferenceName("org/b", "code", 0.5),
    ]
    odd = tmp_path / "a,b=1:c"
    odd.mkdir()
    assert parse_references(str(odd)) == [ReferenceName(str(odd))], "a folder is a folder"


@pytest.mark.parametrize("text", ["a,", "a=0", "a=-1", "a=x", "a=inf", ":a", "math:", "a=nan"])
def test_what_is_no_reference_is_refused_where_options_are_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"--rl.reference .* is no reference; write NAME"):
        RLConfig(reference=text, algorithm=named_spec("opd"))


def test_shares_by_hand() -> None:
    mixed = parse_references("a=3,b")
    assert shares_of("any", mixed) == [0.75, 0.25]
    by_kind = parse_references("math:a,code:b,code:c=3,d")
    assert shares_of("math", by_kind) == [1, 0, 0, 0]
    assert shares_of("code", by_kind) == [0, 0.25, 0.75, 0]
    assert shares_of("chat", by_kind) == [0, 0, 0, 1], "one without a kind is for the others"
    with pytest.raises(ValueError, match=r"kind 'chat' \(there are: code, math\); add"):
        shares_of("chat", by_kind[:3])


def drawn(rng: np.random.Generator) -> list[Sample]:
    sizes = rng.integers(2, 9, rng.integers(1, 8))
    kinds = rng.choice(["math", "code", "chat"], len(sizes))
    return [
        Sample(tokens=[i, *rng.integers(0, 9, n - 1).tolist()], loss_mask=[0] * n, kind=str(kind))
        for i, (n, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]


def test_the_weighted_mean_against_numpy() -> None:
    rng = np.random.default_rng(41)
    for _ in range(NUM_BATCHES):
        samples, weights = drawn(rng), rng.uniform(0.1, 3, 3)
        said = [
            {tuple(s.tokens): -rng.exponential(size=len(s.tokens)) for s in samples}
            for _ in weights
        ]
        names = [ReferenceName(f"t{i}", weight=float(w)) for i, w in enumerate(weights)]
        found = References(names, [Teacher(one) for one in said]).forward_logprobs(samples)
        for sample, values in zip(samples, found, strict=True):
            those = [one[tuple(sample.tokens)] for one in said]
            same(values, np.average(those, axis=0, weights=weights))


def test_each_kind_is_scored_by_its_own_teacher_alone() -> None:
    rng = np.random.default_rng(42)
    names = parse_references("math:a,code:b,c")
    samples = [sample for _ in range(5) for sample in drawn(rng)]
    said = [{tuple(s.tokens): np.full(len(s.tokens), -1.0 - i) for s in samples} for i in range(3)]
    teachers = [Teacher(one) for one in said]
    found = References(names, teachers).forward_logprobs(samples)
    place = {"math": 0, "code": 1, "chat": 2}
    assert [float(v[0]) for v in found] == [-1.0 - place[s.kind] for s in samples]
    assert [set(t.asked) for t in teachers] == [{"math"}, {"code"}, {"chat"}]
    tops = References(names, teachers).forward_top(samples, 2)
    assert [float(t.logps[0, 0]) for t in tops] == [-1.0 - place[s.kind] for s in samples]


def test_likeliest_tokens_of_a_mixture_are_refused() -> None:
    with pytest.raises(ValueError, match="several are mixed here; name one for each kind"):
        RLConfig(reference="a,b", algorithm=named_spec("opd_topk"))
    RLConfig(reference="math:a,b", algorithm=named_spec("opd_topk"))
    samples = drawn(np.random.default_rng(43))
    with pytest.raises(ValueError, match="several are mixed here"):
        References(parse_references("a,b"), [Teacher({}), Teacher({})]).forward_top(samples, 2)


# -- folders ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from dataclasses import replace

    root = tmp_path_factory.mktemp("teachers")
    other = replace(DENSE, vocab_size=DENSE.vocab_size + 8)
    return {
        "a": write_model(root / "a", DENSE, 1),
        "b": write_model(root / "b", DENSE, 2),
        "other": write_model(root / "other", other, 3),
    }


def config_of(reference: str) -> RunConfig:
    limits = EngineLimits(micro_batch_tokens=256)
    return RunConfig(
        dtype="fp32", engine=limits, rl=RLConfig(reference=reference, algorithm=named_spec("opd"))
    )


def test_one_name_is_a_scorer_and_several_are_their_mean(folders: dict[str, Path]) -> None:
    def refuse(_: Path) -> None:
        raise AssertionError("there is a reference")

    def loaded(text: str) -> object:
        config = config_of(text)
        found = reference_folders(config, Path("none"), has_begun=True, write_policy=refuse)
        return load_reference(config, found, torch.device("cpu"))

    a, b = (loaded(str(folders[name])) for name in "ab")
    assert isinstance(a, Scorer) and isinstance(b, Scorer)
    samples = [Sample(tokens=[1, 2, 3, 4], loss_mask=[0, 1, 1, 1], kind="math")]
    mixed = loaded(f"{folders['a']}=3,{folders['b']}")
    expected = [
        0.75 * x + 0.25 * y
        for x, y in zip(a.forward_logprobs(samples), b.forward_logprobs(samples), strict=True)
    ]
    got = mixed.forward_logprobs(samples)  # type: ignore[attr-defined]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_a_teacher_of_another_vocabulary_is_refused_by_name(folders: dict[str, Path]) -> None:
    vocab = DENSE.vocab_size
    check_reference(config_of(f"{folders['a']},{folders['b']}"), Path(), DENSE)
    for text in (f"math:{folders['a']},{folders['other']}", str(folders["other"])):
        with pytest.raises(ValueError, match=f"other: its vocabulary of {vocab + 8} is not the"):
            check_reference(config_of(text), Path(), DENSE)
    with pytest.raises(ValueError, match=r"--rl.reference /nowhere: .*no such folder"):
        check_reference(config_of(f"{folders['a']},/nowhere"), Path(), DENSE)


def test_without_a_name_the_policy_as_rl_began_is_the_reference(tmp_path: Path) -> None:
    written: list[Path] = []
    own = tmp_path / "reference"
    found = reference_folders(config_of(""), own, has_begun=False, write_policy=written.append)
    assert found == [own] == written
    with pytest.raises(ValueError, match="is missing: it holds the policy as RL began"):
        reference_folders(config_of(""), own, has_begun=True, write_policy=written.append)


def test_sizes_count_every_teacher() -> None:
    from nanorl.options.run_sizes import resident_bytes

    one, two = (resident_bytes(config_of(text), DENSE) for text in ("a", "a,b"))
    none = resident_bytes(RunConfig(dtype="fp32"), DENSE)
    assert two - one == one - none > 0
