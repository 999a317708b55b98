"""Documents to search in: read from files, or generated together with questions about them.

    read_corpus("notes/")            every .md and .txt file below, named by its path
    read_corpus("pages.jsonl")       one {"name": ..., "text": ...} a line
    Town(seed=0).documents           people, towns and workshops that nobody has heard of

A generated corpus has one right answer to each question and is in no model's memory. Left out:
PDF and HTML, which want to be turned into text first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_FIRST = [
    "Alva",
    "Bero",
    "Cira",
    "Dorn",
    "Elin",
    "Fynn",
    "Gerda",
    "Hale",
    "Ilva",
    "Joss",
    "Kera",
    "Lorn",
    "Mirel",
    "Nevin",
    "Orla",
    "Pell",
]
_LAST = [
    "Abend",
    "Brack",
    "Corvin",
    "Dray",
    "Ebers",
    "Falk",
    "Grane",
    "Holm",
    "Imker",
    "Jarl",
    "Kessel",
    "Lund",
    "Mohr",
    "Naske",
]
_TOWNS = [
    "Altrun",
    "Birsk",
    "Calden",
    "Dovre",
    "Elmsee",
    "Farholm",
    "Gellow",
    "Harsk",
    "Istrup",
    "Jorvik",
    "Kelm",
    "Lohne",
]
_RIVERS = [
    "Aller",
    "Brim",
    "Cauld",
    "Drave",
    "Esk",
    "Fulda",
    "Garn",
    "Hase",
    "Inn",
    "Jagst",
    "Kerr",
    "Leine",
]
_TRADES = [
    "baker",
    "carpenter",
    "glazier",
    "mason",
    "miller",
    "potter",
    "saddler",
    "smith",
    "tailor",
    "weaver",
]
_WARES = [
    "barrels",
    "bells",
    "boots",
    "candles",
    "clocks",
    "kites",
    "lamps",
    "looms",
    "pots",
    "saddles",
    "sails",
    "scales",
]
_NUM_PEOPLE, _NUM_SHOPS = 96, 36


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and what it is called; names are unique in a corpus."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its only answer, and the documents that lead there, in order."""

    text: str
    answer: str
    path: tuple[str, ...]


class Town:
    """A country of people, towns and workshops, the same one for a seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"corpus {seed}")
        names = [f"{first} {last}" for first in _FIRST for last in _LAST]
        people = rng.sample(names, _NUM_PEOPLE)
        self._river = dict(zip(_TOWNS, rng.sample(_RIVERS, len(_RIVERS)), strict=True))
        self._born = {one: (rng.randint(1801, 1899), rng.choice(_TOWNS)) for one in people}
        self._trade = {one: rng.choice(_TRADES) for one in people}
        shops = [f"{town} {ware}" for town in _TOWNS for ware in _WARES]
        self._founder = dict(
            zip(rng.sample(shops, _NUM_SHOPS), rng.sample(people, _NUM_SHOPS), strict=True)
        )
        self._year = {shop: rng.randint(1825, 1935) for shop in self._founder}

    @property
    def documents(self) -> list[Document]:
        towns = {t: f"{t} is a town on the river {r}." for t, r in self._river.items()}
        people = {
            one: f"{one} was born in {town} in {year} and became a {self._trade[one]}."
            for one, (year, town) in self._born.items()
        }
        shops = {
            shop: f"The workshop {shop} was founded in {self._year[shop]} by {founder}."
            for shop, founder in self._founder.items()
        }
        return [Document(name=name, text=text) for name, text in (towns | people | shops).items()]

    def questions(self, num_hops: int) -> list[Question]:
        """All questions whose answer stands in the last of `num_hops` documents, 1 or 2."""
        if num_hops == 1:
            return [*self._of_people(), *self._of_shops(), *self._of_towns()]
        return [*self._over_towns(), *self._over_founders()]

    def _of_people(self) -> Iterator[Question]:
        for one, (year, town) in self._born.items():
            yield Question(text=f"When was {one} born?", answer=str(year), path=(one,))
            yield Question(text=f"Where was {one} born?", answer=town, path=(one,))
            yield Question(
                text=f"What trade did {one} learn?", answer=self._trade[one], path=(one,)
            )

    def _of_shops(self) -> Iterator[Question]:
        for shop, founder in self._founder.items():
            yield Question(text=f"Who founded {shop}?", answer=founder, path=(shop,))
            yield Question(
                text=f"When was {shop} founded?", answer=str(self._year[shop]), path=(shop,)
            )

    def _of_towns(self) -> Iterator[Question]:
        for town, river in self._river.items():
            yield Question(text=f"On which river is {town}?", answer=river, path=(town,))

    def _over_towns(self) -> Iterator[Question]:
        for one, (_, town) in self._born.items():
            yield Question(
                text=f"On which river is the town where {one} was born?",
                answer=self._river[town],
                path=(one, town),
            )

    def _over_founders(self) -> Iterator[Question]:
        for shop, founder in self._founder.items():
            year, town = self._born[founder]
            path = (shop, founder)
            yield Question(
                text=f"When was the founder of {shop} born?", answer=str(year), path=path
            )
            yield Question(text=f"Where was the founder of {shop} born?", answer=town, path=path)


def read_corpus(source: str) -> list[Document]:
    """The documents of a folder or of a JSONL file. ValueError names what is wrong with them."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix in (".md", ".txt"))
        found = [Document(name=str(one.relative_to(path)), text=_text_of(one)) for one in files]
    elif path.is_file():
        found = [_of_line(line, f"{path}, line {n}") for n, line in _lines(path)]
    else:
        raise ValueError(f"--env-args corpus={source}: there is no such folder or file")
    if not found:
        raise ValueError(
            f"--env-args corpus={source}: holds no document; give a folder with .md and .txt "
            'files, or a file with one {"name": ..., "text": ...} a line'
        )
    _require_unique(found, source)
    return found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_text_of(path).splitlines(), 1):
        if line.strip():
            yield number, line


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text ({error})") from None


def _of_line(line: str, where: str) -> Document:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    for name in ("name", "text"):
        if not isinstance(record, dict) or not isinstance(record.get(name), str):
            raise ValueError(f"{where}: the field {name!r} must be a text")
    return Document(name=record["name"], text=record["text"])


def _require_unique(documents: Sequence[Document], source: str) -> None:
    names: set[str] = set()
    for one in documents:
        if one.name.casefold() in names:
            raise ValueError(f"--env-args corpus={source}: two documents are called {one.name!r}")
        names.add(one.name.casefold())
