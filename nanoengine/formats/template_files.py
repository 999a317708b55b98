"""Where a model folder keeps its chat templates, read in the order of `transformers`.

    chat_template.jinja                       the template "default"
    additional_chat_templates/NAME.jinja      templates of other names, such as "tool_use"
    tokenizer_config.json                     `chat_template`, where there are no files of these two
    chat_template.json                        that of a processor, where there is nothing else

Left out: what the templates mean (chat_template.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPLATE_FILE = "chat_template.jinja"
PROCESSOR_FILE = "chat_template.json"
MORE_FOLDER = "additional_chat_templates"
DEFAULT = "default"


def template_files(folder: str | Path) -> list[str]:
    """The files of templates that a folder has, beside tokenizer_config.json, as paths in it."""
    place = Path(folder)
    more = sorted((place / MORE_FOLDER).glob("*.jinja"))
    names = [TEMPLATE_FILE, PROCESSOR_FILE, *(f"{MORE_FOLDER}/{one.name}" for one in more)]
    return [name for name in names if (place / name).is_file()]


def read_templates(folder: str | Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name; empty where it has none. `config` is the content of its
    tokenizer_config.json. `ValueError` for one that cannot be read."""
    place = Path(folder)
    files = [name for name in template_files(place) if name != PROCESSOR_FILE]
    found = {_name(file): (place / file).read_text(encoding="utf-8") for file in files}
    if found:
        return found
    given = config.get("chat_template")
    source = "tokenizer_config.json"
    if given is None and (place / PROCESSOR_FILE).is_file():
        given, source = _of_processor(place / PROCESSOR_FILE), PROCESSOR_FILE
    return _named(given, place / source)


def remove_templates(folder: str | Path) -> None:
    """Remove the files that would be read before tokenizer_config.json is."""
    for name in template_files(folder):
        (Path(folder) / name).unlink()


def as_config(templates: Mapping[str, str]) -> str | list[dict[str, str]]:
    """`templates` in the form of tokenizer_config.json."""
    if list(templates) == [DEFAULT]:
        return templates[DEFAULT]
    return [{"name": name, "template": source} for name, source in templates.items()]


def _name(file: str) -> str:
    return DEFAULT if file == TEMPLATE_FILE else Path(file).name.removesuffix(".jinja")


def _of_processor(file: Path) -> Any:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}; download it again") from error
    return data.get("chat_template") if isinstance(data, dict) else data


def _named(given: Any, file: Path) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, dict):
        given = [{"name": name, "template": source} for name, source in given.items()]
    try:
        named = {entry["name"]: entry["template"] for entry in given}
    except (TypeError, KeyError):
        named = {0: 0}
    if not all(isinstance(one, str) for pair in named.items() for one in pair):
        raise ValueError(
            f"{file}: chat_template must be a text, or a list of "
            '{"name": ..., "template": ...}; download the file again'
        )
    return named
