"""`CallTree`: the calls of one episode, joined by their tokens, as sequences to train on.

Each call is a node: the prompt's ids, then those that the engine sampled. A call whose prompt goes
on from all ids of an earlier one is its child; the others begin sequences of their own. A sequence
is the way from a root to a leaf, and every sampled token is trained in exactly one of them, in the
context in which it was sampled; where ways share it, the others repeat it with mask 0. What
sequences have in common is computed once in training (`nanoengine/prefix_tree.py`).

    ask("2+2?") -> "4"                          one sequence, two turns
      ask("2+2?", "4", "sure?") -> "yes"
      ask("2+2?", "4", "why?") -> "because"     a second sequence: it repeats "4" with mask 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nanoengine.spans import ImageSpan, content_ids
from nanoinfer.params import Output
from nanorl.types import Branch, TurnSpan


@dataclass(eq=False)
class CallNode:
    """One completion: `ids` of its prompt, then of its output; `images` are the prompt's."""

    prompt: list[int]
    output: Output
    parent: CallNode | None
    images: tuple[ImageSpan, ...] = ()
    children: list[CallNode] = field(default_factory=list)

    @cached_property
    def ids(self) -> list[int]:
        return self.prompt + self.output.ids

    @cached_property
    def keys(self) -> list[int]:
        """The content ids that another prompt must begin with to go on from here."""
        return content_ids(self.ids, self.images)

    @property
    def path(self) -> list[CallNode]:
        """From the root to this node."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]


class CallTree:
    """Grows by `add`; `sequences` reads it. `nodes` are in the order in which they ended."""

    def __init__(self) -> None:
        self.nodes: list[CallNode] = []

    def parent_of(self, prompt: Sequence[int], images: Sequence[ImageSpan] = ()) -> CallNode | None:
        """The call from which a prompt goes on: of all that it begins with, the longest."""
        best: CallNode | None = None
        given = content_ids(list(prompt), images)
        for node in self.nodes:
            if best is not None and len(node.ids) <= len(best.ids):
                continue
            if given[: len(node.ids)] == node.keys:
                best = node
        return best

    def add(
        self, prompt: Sequence[int], output: Output, images: tuple[ImageSpan, ...] = ()
    ) -> CallNode:
        """Note a completion that was given to the client."""
        parent = self.parent_of(prompt, images)
        node = CallNode(list(prompt), output, parent, images)
        if parent is not None:
            parent.children.append(node)
        self.nodes.append(node)
        return node

    def sequences(self) -> list[Branch]:
        """All sequences: first the one of the call that ended last, then the others in the order of
        their tokens, which does not depend on who was faster."""
        if not self.nodes:
            return []
        main = self.nodes[-1]  # nothing goes on from it: a child ends after its parent
        leaves = [node for node in self.nodes if not node.children and node is not main]
        leaves.sort(key=lambda node: (node.keys, node.output.logps))
        taken: set[int] = set()
        return [_sequence(leaf.path, taken) for leaf in (main, *leaves)]


def _sequence(path: Sequence[CallNode], taken: set[int]) -> Branch:
    """The tokens of the last node of `path`; those sampled by nodes in `taken` have mask 0."""
    tokens = path[-1].ids
    mask, logps, versions = [0] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens)
    starts = []
    for node in path:
        if id(node) in taken:
            continue
        taken.add(id(node))
        start, end = len(node.prompt), len(node.prompt) + len(node.output.ids)
        mask[start:end] = [1] * (end - start)
        logps[start:end] = node.output.logps
        versions[start:end] = node.output.versions
        starts.append((start, end))
    ends = [start for start, _ in starts[1:]] + [len(tokens)]
    spans = [
        TurnSpan(action_start=start, action_end=end, observation_end=until)
        for (start, end), until in zip(starts, ends, strict=True)
    ]
    return Branch(
        tokens=tokens,
        loss_mask=mask,
        logps=logps,
        versions=versions,
        turn_spans=spans,
        images=list(path[-1].images),
    )
