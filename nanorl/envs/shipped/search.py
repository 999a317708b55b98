"""`search`: questions over documents that the policy has to find and read.

The tool `search` ranks the documents by BM25 (the package bm25s) and shows how the best ones begin,
`read` shows one. A turn without a call is the answer, after "Answer:" where there is that word. It
pays 1 if it equals the task's but for case, articles and punctuation, else nothing; an answer that
lists several does not equal it.

    nanorl train --env search                          # a generated corpus, its facts in no model
    nanorl train --env search --env-args hops=2        # the answer is in a document that another
                                                       # one names
    nanorl train --env search --env-args corpus=notes/ --tasks questions.jsonl

The teacher searches for the names in the question, reads what it finds and answers.
Left out: dense retrieval, and passages: a document is shown as a whole, and what is too long for an
observation loses its middle.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from nanoengine.extras import missing
from nanoinfer.chat.base import ToolCall
from nanoinfer.chat.hermes import HermesParser
from nanorl.envs.env import Env
from nanorl.envs.rewards.base import Transcript
from nanorl.envs.shipped.corpus import Document, Question, Town, read_corpus
from nanorl.envs.tools.base import ToolError
from nanorl.task import Task

_NUM_SHOWN = 3
_BEGINNING = 60
_ARTICLES = re.compile(r"\b(a|an|the)\b")


class SearchCorpus(Env):
    """`corpus`: a folder, a JSONL file, or nothing for a generated one, of which `seed` makes
    another and whose questions need `hops` documents, 1 or 2."""

    system = "Answer the question from the documents. Reply `Answer: X` when you know."
    parser = "hermes"
    defaults: Mapping[str, Any] = MappingProxyType(
        {
            "agent.max_turn_tokens": 64,
            "agent.max_context_tokens": 1024,
            "agent.max_observation_tokens": 128,
            "warm_start.steps": 60,
        }
    )

    def __init__(self, corpus: str = "", hops: int = 1, seed: int = 0) -> None:
        if hops not in (1, 2):
            raise ValueError(f"--env-args hops={hops}: must be 1 or 2")
        self.corpus, self.num_hops = corpus, hops
        self.defaults = {**self.defaults, "agent.max_turns": 2 * hops + 2}
        self.library = Library(corpus, seed)
        self.tools = (self.library.search, self.library.read)
        if corpus:
            self.teacher = None  # type: ignore[assignment,method-assign]

    def setup(self) -> Library:
        """The library that the tools read. An episode's own one stays unread."""
        self.library.load()
        return self.library

    def tasks(self, rng: random.Random) -> Task:
        """A question about the generated corpus; those about your own come with --tasks."""
        if self.corpus:
            raise ValueError(
                f"--env-args corpus={self.corpus}: questions about it must come with --tasks "
                "questions.jsonl, a prompt and an answer each"
            )
        one = rng.choice(self.shared.questions[self.num_hops])
        return Task(
            one.text, one.answer, kind=f"search{self.num_hops}", data={"path": list(one.path)}
        )

    def score(self, transcript: Transcript) -> float:
        given = normalised(transcript.answer or "")
        return float(given != "" and given == normalised(self.task.answer_text))

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str:
        number, is_reading = divmod(len(observations), 2)
        path = self.task.data["path"]
        if number == len(path):
            return f"Answer: {self.task.answer_text}"
        call = ("read", "document") if is_reading else ("search", "query")
        return HermesParser().write(ToolCall(call[0], {call[1]: path[number]}))


class Library:
    """The documents and their index, made when they are first asked for."""

    def __init__(self, corpus: str, seed: int) -> None:
        self._corpus, self._seed = corpus, seed

    def load(self) -> None:
        """Read and index everything. ValueError for a corpus that cannot be read."""
        _ = self._index, self._by_name

    def search(self, query: str) -> str:
        """Find documents by the words in them.

        Args:
            query: words that the document should have
        """
        hits = self._index.best(query)
        if not hits:
            raise ToolError("no document has these words")
        return "\n".join(f"{one.name}: {_beginning(one.text)}" for one in hits)

    def read(self, document: str) -> str:
        """Read a document.

        Args:
            document: its name, as search shows it
        """
        found = self._by_name.get(document.strip().casefold())
        if found is None:
            raise ToolError(f"there is no document {document!r:.80}; search shows names")
        return found.text

    @cached_property
    def questions(self) -> Mapping[int, Sequence[Question]]:
        """The questions of the generated corpus, by the number of documents that they need."""
        return {hops: Town(self._seed).questions(hops) for hops in (1, 2)}

    @cached_property
    def _documents(self) -> Sequence[Document]:
        return read_corpus(self._corpus) if self._corpus else Town(self._seed).documents

    @cached_property
    def _by_name(self) -> Mapping[str, Document]:
        return {one.name.casefold(): one for one in self._documents}

    @cached_property
    def _index(self) -> DocumentIndex:
        return DocumentIndex(self._documents)


class DocumentIndex:
    """BM25 over names and texts."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._bm25s = _require_bm25s()
        self._documents = documents
        self._retriever = self._bm25s.BM25()
        texts = [f"{one.name}\n{one.text}" for one in documents]
        self._retriever.index(self._words(texts), show_progress=False)

    def best(self, query: str) -> list[Document]:
        """The best few of the documents that have a word of the query."""
        words = self._words([query])
        if not words[0]:
            return []
        count = min(_NUM_SHOWN, len(self._documents))
        found, scores = self._retriever.retrieve(words, k=count, show_progress=False)
        return [
            self._documents[place]
            for place, score in zip(found[0], scores[0], strict=True)
            if score > 0
        ]

    def _words(self, texts: list[str]) -> list[list[str]]:
        return self._bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def normalised(answer: str) -> str:
    """Lower case, without articles and punctuation, blanks single; other scripts stay as they
    are."""
    bare = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(_ARTICLES.sub(" ", bare).split())


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _BEGINNING else f"{line[:_BEGINNING]}..."


def _require_bm25s() -> Any:
    try:
        import bm25s  # here: an extra
    except ImportError as error:
        raise missing("the environment search", "bm25s", extra="search") from error
    return bm25s
