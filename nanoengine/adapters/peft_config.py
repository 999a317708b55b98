"""`PeftConfig`: what the adapter_config.json of a LoRA folder says, every key of it.

A key is used, or it is without effect on what a saved adapter computes, or it must have the one
value that changes nothing; anything else is refused by its name, since such an adapter would load
and compute something that nobody trained. A key that the lists do not know, of a newer `peft`, may
be off (null, false, empty): each release adds some, and writes them so.

Left out: adapters of other kinds than LoRA, and default modules for a `target_modules` of null,
which `peft` has when it makes an adapter: the folder's tensors say what it adapts.
Source: `LoraConfig` and `check_target_module_exists` of `peft` 0.21.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.adapters.lora_config import ALL_LINEAR, scale_of
from nanoengine.adapters.patterns import matches_end, matches_whole

HEAD = "lm_head"
USED = frozenset(
    (
        "peft_type",
        "r",
        "rank_pattern",
        "lora_alpha",
        "alpha_pattern",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
    )
)
WITHOUT_EFFECT = frozenset(
    (
        # who made it, from what, for what
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        # how it is run
        "inference_mode",
        "runtime_config",
        "megatron_core",
        # how it was trained: dropout and VeLoRA's backward pass are not in what was learnt
        "lora_dropout",
        "velora_config",
        # how A and B began
        "eva_config",
        "corda_config",
        "loftq_config",
        "lora_ga_config",
        # of something that has a key of its own and is refused
        "qalora_group_size",
        "ensure_weight_tying",
    )
)
PLAIN: dict[str, Any] = {
    "fan_in_fan_out": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "megatron_config": None,
    "alora_invocation_tokens": None,
    "use_dora": False,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
}
"""Keys that change the arithmetic, with the one value that is supported."""
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
_LAYERS = "layers"  # the list of layers in every model here


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The modules that a folder adapts, and the rank and scale of each."""

    rank: int
    ranks: Mapping[str, int]
    """By patterns of modules, of which the first that matches counts; so are `alphas`."""
    alpha: float
    alphas: Mapping[str, float]
    rslora: bool
    targets: tuple[str, ...] | str | None
    """Ends of names, or one regular expression of whole names; None: whatever the tensors are."""
    excluded: tuple[str, ...] | str
    layers: frozenset[int] | None
    """None: every layer."""

    def rank_of(self, module: str) -> int:
        """`ValueError` for a pattern that is not taken."""
        return int(_of_pattern("rank_pattern", self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of B·A in this module. `ValueError` for a pattern that is not taken."""
        alpha = _of_pattern("alpha_pattern", self.alphas, module, self.alpha)
        return scale_of(alpha, self.rank_of(module), rslora=self.rslora)

    def check_modules(self, found: Iterable[str]) -> None:
        """`ValueError` where the folder has tensors of a module that its config does not name."""
        for module in found:
            if not self._is_meant(module):
                raise ValueError(
                    f"target_modules={_short(self.targets)}: the tensors adapt {module}, which "
                    "target_modules, exclude_modules and layers_to_transform do not name; fetch "
                    "the folder again, or mend its adapter_config.json"
                )

    def check_complete(self, found: Iterable[str], every: Iterable[str]) -> None:
        """`ValueError` where the config names some of `every`, the modules of the model, and the
        folder has no tensors of them. A target that the model does not have names nothing."""
        found, meant = set(found), [module for module in every if self._is_meant(module)]
        for group in self._groups(meant):
            if group and not found & set(group):
                raise ValueError(
                    f"target_modules={_short(self.targets)}: names {group[0]}"
                    f"{' and others like it' if len(group) > 1 else ''}, of which there are no "
                    "tensors; fetch the folder again, or mend its adapter_config.json"
                )

    def _groups(self, meant: list[str]) -> list[list[str]]:
        """Group the modules that are meant: by target, or by kind of module where the targets are a
        regular expression, and again by layer of `layers_to_transform`."""
        groups: list[list[str]]
        if isinstance(self.targets, tuple):
            groups = [[m for m in meant if _is_end(target, m)] for target in self.targets]
        else:
            kinds = dict.fromkeys(m.rpartition(".")[2] for m in meant if self.targets is not None)
            groups = [[m for m in meant if m.rpartition(".")[2] == kind] for kind in kinds]
        if self.layers is not None:
            groups += [[m for m in meant if _layer_of(m) == layer] for layer in self.layers]
        return groups

    def _is_meant(self, module: str) -> bool:
        if self.excluded and _names("exclude_modules", self.excluded, module):
            return False
        if self.targets is None:
            return True
        is_named = _names("target_modules", self.targets, module)
        # a regular expression says itself which layers it means
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return is_named
        return is_named and _layer_of(module) in self.layers


def read_peft_config(file: Path) -> PeftConfig:
    """`ValueError` names a file that is missing or damaged, or a key that is not supported."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist: give a folder that peft saved an adapter to")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON ({error}); fetch it again") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{file} holds no options; fetch it again")
    try:
        _refuse(fields)
        return PeftConfig(
            rank=_rank("r", fields.get("r")),
            ranks=_patterns(fields, "rank_pattern", _rank),
            alpha=_alpha("lora_alpha", fields.get("lora_alpha")),
            alphas=_patterns(fields, "alpha_pattern", _alpha),
            rslora=bool(fields.get("use_rslora")),
            targets=_modules(fields, "target_modules"),
            excluded=_modules(fields, "exclude_modules") or (),
            layers=_layers(fields),
        )
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _refuse(fields: Mapping[str, Any]) -> None:
    """Keys that stand for arithmetic that is not done here, or that nobody knows."""
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"peft_type={fields.get('peft_type')!r}; only LORA is supported")
    for name, value in fields.items():
        is_off = value is None or value is False or value == [] or value == {} or value == ""
        if name in PLAIN and not is_off and value != PLAIN[name]:
            raise ValueError(f"{name}={_short(value)} is not supported; only {PLAIN[name]!r}")
        if name not in (*USED, *WITHOUT_EFFECT, *PLAIN) and not is_off:
            raise ValueError(
                f"{name}={_short(value)}: is no key of LoRA that is known here, and may change "
                "what the adapter computes; remove it if it does not"
            )
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights={start!r}: such an adapter belongs to weights that it has changed; "
            "save it with peft's path_initial_model_for_weight_conversion"
        )


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={_short(value)}: must be a whole number of at least 1")
    return value


def _alpha(name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        raise ValueError(f"{name}={_short(value)}: must be a finite number")
    return float(value)


def _patterns(fields: Mapping[str, Any], name: str, read: Any) -> dict[str, Any]:
    given = fields.get(name) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{name}={_short(given)}: must be an object of patterns")
    return {pattern: read(f"{name} {pattern[:40]!r}", value) for pattern, value in given.items()}


def _modules(fields: Mapping[str, Any], name: str) -> tuple[str, ...] | str | None:
    given = fields.get(name)
    if given is None or isinstance(given, str):
        return given or None
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise ValueError(f"{name}={_short(given)}: must be a list of names, or one pattern")
    return tuple(given)


def _layers(fields: Mapping[str, Any]) -> frozenset[int] | None:
    given = fields.get("layers_to_transform")
    if given is None or given == []:
        return None
    layers = given if isinstance(given, list) else [given]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in layers):
        raise ValueError(f"layers_to_transform={_short(given)}: must be numbers of layers")
    pattern = fields.get("layers_pattern")
    if pattern and _LAYERS not in ([pattern] if isinstance(pattern, str) else pattern):
        raise ValueError(
            f"layers_pattern={_short(pattern)}: layers are called {_LAYERS!r} in every model here"
        )
    return frozenset(layers)


def _of_pattern(name: str, values: Mapping[str, float], module: str, default: float) -> float:
    for pattern, value in values.items():
        try:
            if matches_end(pattern, module):
                return value
        except ValueError as error:
            raise ValueError(f"{name} {pattern[:40]!r} {error}") from None
    return default


def _names(key: str, given: tuple[str, ...] | str, module: str) -> bool:
    if not isinstance(given, str):
        return any(_is_end(each, module) for each in given)
    if given == ALL_LINEAR:
        return module != HEAD
    try:
        return matches_whole(given, module)
    except ValueError as error:
        raise ValueError(f"{key} {given[:40]!r} {error}; or write a list of their names") from None


def _is_end(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _layer_of(module: str) -> int | None:
    parts = module.split(".")
    at = parts.index(_LAYERS) + 1 if _LAYERS in parts[:-1] else len(parts)
    return int(parts[at]) if at < len(parts) and parts[at].isdecimal() else None


def _short(value: Any) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
