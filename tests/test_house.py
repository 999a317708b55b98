"""The rules of the house that a program can check: import direction, packaging, first lines, and
one home for each concept.

Every law of the second half has a dict of exceptions with their reasons. An exception that is not
needed any more fails too, so the lists can only shrink.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from house import MOST_PARAMETERS, PACKAGES, House, comment_lines, parse  # noqa: E402

ALLOWED = {
    "kernels": set(),
    "nanosched": set(),
    "nanoengine": {"kernels"},
    "nanoinfer": {
        *("kernels", "nanoengine.model", "nanoengine.parallel"),
        *("nanoengine.architectures", "nanoengine.formats", "nanoengine.text"),
        *("nanoengine.spans", "nanoengine.vision"),
        *("nanoengine.adapters.lora", "nanoengine.adapters.lora_config"),  # adapters as data
        "nanoengine.adapters.low_rank",
        *("nanoengine.command_line", "nanoengine.extras"),  # words, no engine
    },
    "nanorl": {"kernels", "nanosched", "nanoengine", "nanoinfer"},
}


def modules_imported(path: Path) -> set[str]:
    tree = parse(path.read_text(), path)
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_only_downwards(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for name in modules_imported(path):
            top = name.split(".")[0]
            if top not in (*PACKAGES, "scripts", "tests") or top == package:
                continue
            is_allowed = any(
                name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[package]
            )
            assert is_allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_kernels_is_our_package_and_not_the_unrelated_one_of_that_name() -> None:
    import kernels

    assert Path(kernels.__file__).resolve().parent == ROOT / "kernels"


def test_setup_lists_every_package_that_exists_and_no_other() -> None:
    tree = parse((ROOT / "setup.py").read_text(), ROOT / "setup.py")
    assigned = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    listed = set(ast.literal_eval(assigned["PACKAGES"]))
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found


def test_source_files_say_what_they_are() -> None:
    hold(without_first_lines(our_house()), WITHOUT_FIRST_LINES, "write the module's docstring")


# -- one home for each concept -----------------------------------------------------------------

FRONT_DOOR = "a front door: users import it"

IMPORT_CIRCLES: dict[str, str] = {}
CLASSES_OF_ONE_NAME: dict[str, str] = {}
WITHOUT_A_USER: dict[str, str] = {
    "BoundedQueue": FRONT_DOOR,
    "build_value_engine": FRONT_DOOR,
    "HostedReward": "a front door: a reward in workers, of episodes that are in none",
    "split_calls": "a front door: Hermes' calls where no model is at hand",
    "Scheduler.get_actor": "a front door: programs look up an actor that they named",
    "Finder.create_module": "tests_side.py's: Python's `import` calls it",
    "enter_pid_namespace": "first.py's: named in the same text as `main`",
    "main": "worker.py's: the program that starts a sandbox worker is a text, and names it",
}
BROKEN_FILE_NAMES: dict[str, str] = {
    **dict.fromkeys(
        ("linux/filter.h", "linux/seccomp.h", "asm/unistd_64.h", "asm-generic/unistd.h"),
        "of Linux",
    ),
    **dict.fromkeys(("src/stats.py", "test_stats.py", "my-task/instruction.md"), "an example's"),
    "llama.cpp": "a project",
    **dict.fromkeys(("file.py", "mine.py", "score.py"), "a user's"),
    **dict.fromkeys(
        (
            "counter.py",
            "hall.py",
            "my_agent.py",
            "patient.py",
            "shop.py",
            "test_my_game.py",
            "wiki.py",
        ),
        "a user's",
    ),
    **dict.fromkeys(("NAME.py", "test_NAME.py"), "what nanorl new writes"),
    **dict.fromkeys(("letters.py", "test_letters.py"), "what nanorl new letters writes"),
    "solution/solve.sh": "of a Harbor task",
    "bench.py": "nano-vllm's",
    "docs/advance/fully_async.md": "verl's",
    "flash_attn/flash_attn_interface.py": "of flash-attn",
    "hopper/flash_attn_interface.py": "of flash-attn",
    "liger_kernel/transformers/functional.py": "of Liger-Kernel",
}
PRIVATE_IMPORTS: dict[str, str] = {}
# What these functions are given they may run; so both ends are ours, and nobody else can write.
UNPICKLERS = {
    *(f"{module}.{name}" for module in ("pickle", "_pickle") for name in ("load", "loads")),
    *(f"{module}.Unpickler" for module in ("pickle", "_pickle", "cloudpickle", "ray.cloudpickle")),
    *("cloudpickle.load", "cloudpickle.loads", "ray.cloudpickle.load", "ray.cloudpickle.loads"),
    *("dill.load", "dill.loads", "joblib.load", "pandas.read_pickle", "shelve.open"),
    *("marshal.load", "marshal.loads", "multiprocessing.connection.Client"),
    *("multiprocessing.connection.Listener", "torch.distributed.recv_object_list"),
    *("torch.distributed.broadcast_object_list", "torch.distributed.all_gather_object"),
    *("torch.distributed.gather_object", "torch.distributed.scatter_object_list"),
}
UNLESS = {  # safe where this keyword has this value
    "torch.load": ("weights_only", True),
    "numpy.load": ("allow_pickle", False),
}
UNLESS_GIVEN = {"numpy.load"}  # its default is the safe one
UNPICKLES: dict[str, str] = {
    "nanosched.local.channel": "a socket pair between the driver and a process that it forked",
    "nanosched.local.payload": "arguments and results that came over such a socket pair",
    "nanosched.ray_host": "this process's own memory: can what was raised be pickled? And tensors "
    "of Ray, whose network is the trust domain, with weights_only",
    "nanorl.envs.hosting.host_pool": "an answer of a worker that the pool started, by its channel",
}
WITHOUT_A_CALLER: dict[str, str] = {
    "grouped_gemm": "fused_moe launches its Triton kernels in parts; the op is their definition",
    "paged_attention_decode": "paged_attention's own path for decodes, measured alone",
}
MANY_PARAMETERS: dict[str, str] = {
    "kv_cache.PagedContext.__init__": "a step's arrays; ModelRunner.context names them",
    "stage.Stage.__init__": "the facts about one pipeline stage; one caller, which names them",
    "tensor_parallel.vocab_parallel_logprob": "linear_logprob's arguments, and the split",
}
# Functions of `kernels` with many parameters, those apart that Triton compiles: their parameters
# are pointers, strides and tile sizes. May only fall.
CEILING_OF_KERNELS = 25

WITHOUT_FIRST_LINES: dict[str, str] = {}
CATCHING_ALL_UNEXPLAINED: dict[str, str] = {}

Found = Mapping[str, str]  # what breaks a law -> where that stands


def without_first_lines(house: House) -> Found:
    docstrings = {name: ast.get_docstring(one.tree) for name, one in house.modules.items()}
    return {name: text or "" for name, text in docstrings.items() if not text or "TODO" in text}


def import_circles(house: House) -> Found:
    return {" <-> ".join(circle): "" for circle in house.import_circles()}


def classes_of_one_name(house: House) -> Found:
    return {name: ", ".join(homes) for name, homes in house.classes_of_one_name().items()}


def without_a_user(house: House) -> Found:
    return {one.name: one.module for one in house.without_a_user()}


def private_imports(house: House) -> Found:
    return dict.fromkeys(house.private_imports(), "")


def unpickles(house: House) -> Found:
    """Modules of the packages, scripts and examples that call what may run the bytes it is given,
    by whatever name they imported it."""
    found: dict[str, str] = {}
    for module in house.all_modules:
        if "tests" in module.path.relative_to(house.root).parts:
            continue
        names = _imported_names(module.tree)
        for node in ast.walk(module.tree):
            called = _dotted(node.func, names) if isinstance(node, ast.Call) else ""
            named = _dotted(node, names) if isinstance(node, ast.Attribute | ast.Name) else ""
            is_called = isinstance(node, ast.Call) and _is_unsafe(called, node.keywords)
            if is_called or named in UNPICKLERS:
                found[module.name] = f"{called or named} in line {node.lineno}"
    return found


def catching_all_unexplained(house: House) -> Found:
    """Handlers of all exceptions without a comment on their line, the one before, or down to the
    first line of what they do."""
    found: dict[str, str] = {}
    for module in house.all_modules:
        comments = comment_lines(module)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and _catches_all(node):
                near = range(node.lineno - 1, node.body[0].lineno + 1)
                if not comments & set(near):
                    found[f"{module.name}:{node.lineno}"] = ""
    return found


def _catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))
        for kind in kinds
    )


def _imported_names(tree: ast.Module) -> dict[str, str]:
    """What a name of this module stands for: `import pickle as p` makes p pickle."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return ""


def _is_unsafe(called: str, keywords: list[ast.keyword]) -> bool:
    if called not in UNLESS:
        return called in UNPICKLERS
    name, safe = UNLESS[called]
    given = [one.value for one in keywords if one.arg == name]
    if not given:
        return called not in UNLESS_GIVEN
    return not (isinstance(given[0], ast.Constant) and given[0].value is safe)


def without_a_caller(house: House) -> Found:
    return {op.name: op.module for op in house.ops_without_a_caller(house.packages[0])}


def many_parameters(house: House) -> Found:
    """Of every package but the first, `kernels`, which has a ceiling."""
    return {
        f"{one.module.split('.')[-1]}.{one.name}": f"{one.num_parameters} in {one.module}"
        for package in house.packages[1:]
        for one in house.of_many_parameters(package)
    }


def many_parameters_of_kernels(house: House) -> Found:
    """Of the first package, without what Triton compiles."""
    found = house.of_many_parameters(house.packages[0])
    return {f"{f.module}.{f.name}": str(f.num_parameters) for f in found if not f.is_kernel}


def hold(found: Found, exceptions: Mapping[str, str], help: str) -> None:
    """Fail for what has no exception, and for exceptions that nothing needs any more."""
    broken = [
        f"{name} ({found[name]})" if found[name] else name
        for name in sorted(found.keys() - exceptions.keys())
    ]
    assert not broken, f"{'; '.join(broken)}: {help}"
    stale = sorted(exceptions.keys() - found.keys())
    assert not stale, f"take these exceptions out of the list, nothing needs them: {stale}"
    assert all(exceptions.values()), "an exception without a reason"


def homeless_tests(root: Path) -> list[str]:
    """Files of tests that lie deeper than a room, or in a folder that is none."""
    files = [path.relative_to(root) for path in root.glob("tests/nano*/**/test_*.py")]
    rooms = {Path("tests", *path.relative_to(root).parts) for path in root.glob("nano*/*/")}
    homes = rooms | {room.parent for room in rooms}
    homes |= {home / "on_gpu" for home in homes}
    return sorted(str(file) for file in files if file.parent not in homes)


@cache
def our_house() -> House:
    return House()


def test_every_import_of_ours_finds_what_it_names() -> None:
    assert not our_house().broken_imports(["tests"])


def test_documents_and_comments_name_files_that_are_there() -> None:
    hold(our_house().broken_file_names(), BROKEN_FILE_NAMES, "name the file as it is called now")


def test_no_module_imports_itself_through_others() -> None:
    help = "move what both need into one of them, or let one be given what it needs"
    hold(import_circles(our_house()), IMPORT_CIRCLES, help)


def test_a_public_class_name_means_one_thing() -> None:
    hold(classes_of_one_name(our_house()), CLASSES_OF_ONE_NAME, "give one of them another name")


def test_every_public_name_has_a_user_besides_the_tests() -> None:
    help = "use it or delete it; what stays on purpose stands in WITHOUT_A_USER"
    hold(without_a_user(our_house()), WITHOUT_A_USER, help)


def test_what_is_private_stays_in_its_package() -> None:
    hold(private_imports(our_house()), PRIVATE_IMPORTS, "use a public name, or make this one so")


def test_bytes_that_may_run_come_from_our_own_ends_alone() -> None:
    """A pickle runs what it says. From a socket that others can reach it is their program."""
    help = "send JSON or structs of known kinds, or say in UNPICKLES whose both ends are"
    hold(unpickles(our_house()), UNPICKLES, help)


def test_who_catches_all_exceptions_says_why() -> None:
    help = "name the exceptions, or say in a comment at the line why it must be all of them"
    hold(catching_all_unexplained(our_house()), CATCHING_ALL_UNEXPLAINED, help)


def test_every_op_of_kernels_has_a_caller_in_an_engine() -> None:
    help = "call it from an engine or the trainer, or say in WITHOUT_A_CALLER why it is kept"
    hold(without_a_caller(our_house()), WITHOUT_A_CALLER, help)


def test_tests_lie_in_folders_named_as_the_rooms() -> None:
    """tests/nanorl/envs holds the tests of nanorl/envs; those of the root's files lie at the root.
    The GPU check runs on_gpu/."""
    assert not homeless_tests(ROOT)


def test_no_two_files_of_tests_have_one_name() -> None:
    """They import each other by it (tests/conftest.py)."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    shared = {name for name, count in names.items() if count > 1}
    assert shared == {"__init__.py", "conftest.py"}


def test_functions_take_few_parameters() -> None:
    help = f"more than {MOST_PARAMETERS}: let a record carry what belongs together"
    hold(many_parameters(our_house()), MANY_PARAMETERS, help)


def test_the_ceiling_of_long_parameter_lists_in_kernels_only_falls() -> None:
    found = many_parameters_of_kernels(our_house())
    assert len(found) <= CEILING_OF_KERNELS, f"more than {MOST_PARAMETERS} parameters: {found}"
    assert len(found) == CEILING_OF_KERNELS, f"lower CEILING_OF_KERNELS to {len(found)}"


# -- the laws notice what is planted -----------------------------------------------------------


def planted(root: Path, **files: str) -> House:
    """A house of two packages, `low` and `high`, and scripts; `low__a="..."` is low/a.py."""
    for package in ("low", "high", "scripts"):
        (root / package).mkdir()
        (root / package / "__init__.py").touch()
    for name, text in files.items():
        folder, _, stem = name.partition("__")
        (root / folder / f"{stem or '__init__'}.py").write_text(text)
    return House(root, packages=("low", "high"), users=("scripts",))


LAZY = "def g():\n    from low.a import f\n    f()\n"
ONLY_FOR_TYPES = (
    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from low.a import f\ng = 1\n"
)
WHOLE_MODULE = "import low.a\ng = 1\n"
THROUGH_THE_DOOR = "from low import f\ng = 1\n"


@pytest.mark.parametrize("text", [LAZY, ONLY_FOR_TYPES, WHOLE_MODULE, THROUGH_THE_DOOR])
def test_a_planted_import_circle_is_found(tmp_path: Path, text: str) -> None:
    house = planted(
        tmp_path, low="from low.a import f\n", low__a="from low.b import g\nf = 1\n", low__b=text
    )
    assert list(import_circles(house)) == ["low.a <-> low.b"]


def test_a_door_that_only_hands_names_on_makes_no_circle(tmp_path: Path) -> None:
    door = "from low.a import f\nfrom low.b import g\n__all__ = ['f', 'g']\n"
    house = planted(tmp_path, low=door, low__a="from low import g\nf = 1\n", low__b="g = 1\n")
    assert not import_circles(house)


def test_a_door_with_code_of_its_own_does(tmp_path: Path) -> None:
    door = "from low.a import f\ndef g(): ...\n"
    house = planted(tmp_path, low=door, low__a="from low import g\nf = 1\n")
    assert list(import_circles(house)) == ["low <-> low.a"]


def test_planted_files_that_do_not_say_what_they_are_are_found(tmp_path: Path) -> None:
    house = planted(tmp_path, low='"""A."""', low__b='"""TODO b"""', high='"""C."""', high__d="d=1")
    assert without_first_lines(house) == {"low.b": "TODO b", "high.d": ""}


def test_planted_imports_of_what_is_not_there_are_found(tmp_path: Path) -> None:
    house = planted(
        tmp_path,
        low__a="import sys\ndef f():\n    from low.gone import g\n    g(sys)\n",
        high__b="from low import a\nfrom low.a import f, h\nimport low.a\n",
        scripts__c="import torch\nimport high.d\n",
    )
    assert house.broken_imports() == [
        "high.b -> low.a.h",
        "low.a -> low.gone.g",
        "scripts.c -> high.d",
    ]


def test_planted_names_of_files_that_are_not_there_are_found(tmp_path: Path) -> None:
    comment = '"""Next: a.py, low/gone.py."""\n# and b.py\nx = "no_prose.py"\nclass C:\n    y = x\n'
    house = planted(tmp_path, low__a=comment)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "log.md").write_text("long_gone.py")
    text = "`low/a.py: C.y` `a.py: C.z` `low/a.py: D` ../low/a.py ../low/c.py scripts/*.py <x>.py"
    (tmp_path / "README.md").write_text(text)
    assert house.broken_file_names() == {
        "a.py: C.z": "README.md",
        "b.py": "low/a.py",
        "low/a.py: D": "README.md",
        "low/c.py": "README.md",
        "low/gone.py": "low/a.py",
    }


def test_planted_tests_of_no_room_are_found(tmp_path: Path) -> None:
    (tmp_path / "nanolow" / "room").mkdir(parents=True)
    for name in ("test_a.py", "room/test_b.py", "on_gpu/test_c.py", "gone/test_d.py"):
        file = tmp_path / "tests" / "nanolow" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert homeless_tests(tmp_path) == ["tests/nanolow/gone/test_d.py"]


def test_a_planted_second_class_of_a_name_is_found(tmp_path: Path) -> None:
    one = "class Run: ...\nclass _Own: ...\n"
    house = planted(tmp_path, low__a=one, high__b=one, high="from high.b import Run\n")
    assert classes_of_one_name(house) == {"Run": "high.b, low.a"}


def test_planted_names_without_a_user_are_found(tmp_path: Path) -> None:
    house = planted(
        tmp_path,
        low="from low.a import listed, through_door\n__all__ = ['listed', 'through_door']\n",
        low__a="""
def listed(): return listed()
def in_a_script(): ...
def by_module(): ...
def through_door(): ...
def _private(): return in_module
in_module = 1
in_quotes = 1
def imported_alone(): ...
class Kept:
    def called(self): ...
    def phase_one(self): ...
    def forgotten(self): return self.called()
    def run(self, name): return getattr(self, f"phase_{name}")
def compared_ref(): ...
""",
        high__b="""
import low.a as a, low
from low.a import in_quotes, imported_alone
def f(x: "in_quotes", kept: a.Kept): return a.by_module() + low.through_door() + kept.run(1)
""",
        scripts__c="from low.a import in_a_script\nfrom high.b import f\nin_a_script(f)\n",
    )
    assert sorted(without_a_user(house)) == ["Kept.forgotten", "imported_alone", "listed"]


def test_methods_that_a_base_from_elsewhere_calls_need_no_user(tmp_path: Path) -> None:
    text = "import ast\nclass V(ast.NodeVisitor):\n    def visit_Name(self, node): ...\nV()\n"
    assert not without_a_user(planted(tmp_path, low__a=text))


def test_a_name_in_a_table_of_texts_is_a_use_of_it(tmp_path: Path) -> None:
    house = planted(
        tmp_path, low__a="def f(): ...\ndef g(): ...\n", high__b='_TABLE = {"f": "low.a:f"}\n'
    )
    assert sorted(without_a_user(house)) == ["g"]


def test_planted_uses_of_private_names_are_found(tmp_path: Path) -> None:
    private = "def _f(): ...\n"
    house = planted(
        tmp_path,
        low__a=private,
        low___own="def g(): ...\n",
        low__c="from low._own import g\nfrom low.a import _f\n_f(g)\n",
        high__b="from low import a\nfrom low._own import g\na._f(g)\n",
        scripts__c="from low.a import _f\n",
    )
    assert sorted(private_imports(house)) == [
        "high.b -> low._own.g",
        "high.b -> low.a._f",
        "scripts.c -> low.a._f",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\nx = pickle.loads(b'')",
        "import pickle as p\nclass R(p.Unpickler): ...",
        "from pickle import loads as read\nx = read(b'')",
        "from pickle import loads\nx = map(loads, [])",
        "import torch\nx = torch.load('f')",
        "import torch\nx = torch.load('f', weights_only=False)",
        "from ray import cloudpickle\nx = cloudpickle.loads(b'')",
        "import marshal\nx = marshal.load(None)",
        "import shelve\nx = shelve.open('f')",
        "import numpy as np\nx = np.load('f', allow_pickle=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
    ],
)
def test_planted_readers_of_pickles_are_found(tmp_path: Path, text: str) -> None:
    safe = "import pickle, torch, numpy as np\npickle.dumps(1)\nnp.load('f')\n"
    safe += "torch.load('f', weights_only=True)"
    house = planted(tmp_path, **{"low__a": text, "low__b": safe})
    assert list(unpickles(house)) == ["low.a"]
    with pytest.raises(AssertionError, match=r"low\.a"):
        hold(unpickles(house), {}, "send JSON")


def test_planted_handlers_of_all_exceptions_without_a_reason_are_found(tmp_path: Path) -> None:
    silent = [
        "try:\n    f()\nexcept Exception:\n    pass\n",
        "try:\n    f()\nexcept (OSError, BaseException):\n    pass\n",
        "try:\n    f()\nexcept:  # noqa: E722\n    pass  # type: ignore\n    # too late\n",
    ]
    told = [
        "try:\n    f()\nexcept Exception:  # why\n    pass\n",
        "try:\n    f()\n# why\nexcept Exception:\n    pass\n",
        "try:\n    f()\nexcept Exception:\n    # why\n    pass\n",
        "try:\n    f()\nexcept Exception:\n    pass  # why\n",
        "try:\n    f()\nexcept OSError:\n    pass\n",
    ]
    house = planted(tmp_path, low__a="".join(silent), low__b="".join(told), scripts__c=silent[0])
    assert sorted(catching_all_unexplained(house)) == [
        "low.a:11",
        "low.a:3",
        "low.a:7",
        "scripts.c:3",
    ]


def test_planted_ops_without_a_caller_are_found(tmp_path: Path) -> None:
    house = planted(
        tmp_path,
        low="from low.a import bare, called\n",
        low__a="""
from low.b import through_another
def called(x, *, backend="auto"): return _launch(x)
def _launch(x): return through_another(x)
def bare(x): ...
def for_scripts(x, *, backend="auto"): return below(x)
def below(x, *, backend="auto"): ...
def no_op(x): ...
""",
        low__b="def through_another(x, *, backend='auto'): ...\n",
        high__c="import low\nlow.called(1)\n",
        scripts__d="from low.a import for_scripts, bare\nfor_scripts(bare)\n",
    )
    assert sorted(without_a_caller(house)) == ["bare", "below", "for_scripts"]


def test_planted_long_parameter_lists_are_found(tmp_path: Path) -> None:
    text = "class C:\n    def seven(self, {0}): ...\n    def eight(self, {0}, *, h): ...\n"
    house = planted(tmp_path, high__a=text.format("a, b, c, d, e, f, g"))
    assert list(many_parameters(house)) == ["a.C.eight"]


def test_of_kernels_only_those_count_that_triton_does_not_compile(tmp_path: Path) -> None:
    text = "def op(a, b, c, d, e, f, g, h): ...\n"
    house = planted(tmp_path, low__a=f"import triton\n{text}@triton.jit\n{text.replace('op', 'k')}")
    assert many_parameters_of_kernels(house) == {"low.a.op": "8"}
    assert not many_parameters(house)


def test_an_exception_that_nothing_needs_fails() -> None:
    hold({"a": ""}, {"a": "a reason"}, "")
    with pytest.raises(AssertionError, match=r"b .low.a.: mend it"):
        hold({"a": "", "b": "low.a"}, {"a": "a reason"}, "mend it")
    with pytest.raises(AssertionError, match=r"nothing needs them: ..b.."):
        hold({"a": ""}, {"a": "a reason", "b": "a reason"}, "")
    with pytest.raises(AssertionError, match="without a reason"):
        hold({"a": ""}, {"a": ""}, "")


@pytest.mark.parametrize(("given", "found"), [(None, "AVX512_CORE_BF16"), ("AVX2", "AVX2")])
def test_onednn_is_told_to_leave_the_matrix_unit_alone(given: str | None, found: str) -> None:
    """There a row's bits depend on how many rows are multiplied; tests/kernels shows it, on a
    processor that has one. What a user has set stays."""
    env = {k: v for k, v in os.environ.items() if k != "ONEDNN_MAX_CPU_ISA"}
    env |= {} if given is None else {"ONEDNN_MAX_CPU_ISA": given}
    program = "import os, kernels; print(os.environ['ONEDNN_MAX_CPU_ISA'])"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [found], done.stderr


@pytest.mark.parametrize("package", ["nanoengine", "nanoinfer", "nanorl"])
def test_openmp_is_told_how_long_to_spin_before_torch_loads_it(package: str) -> None:
    program = f"""
import os, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
sys.meta_path.insert(0, Watch())
import {package}, torch
"""
    env = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.split() == ["1000"], done.stderr
