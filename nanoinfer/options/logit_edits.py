"""What requests do to their logits before sampling: penalties, bias, allowed tokens, grammar.

`LogitEdits` says what one request wants, `EditPlan` holds that for all edited rows of a step, as
tensors that travel to the logits' device, where the ops of logits/sampling.py apply them: there is
one implementation of each edit, and no logits leave a GPU for it.

Everything is a function of the request's own tokens, so a token still depends on (logits, seed,
position) and its request alone, whatever runs beside it and however often it was preempted.
The penalties are those of Keskar et al. 2019 (repetition) and of the OpenAI API (presence,
frequency). A grammar is walked by `llguidance` (the extra `grammar`, imported when the first one
arrives), which knows the tokenizer's trie and says which tokens may follow.

Left out: bans of phrases, temperature schedules; tokens that a grammar forces are still sampled one
at a time, by the model.

Legend: R edited rows, V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import apply_penalties_, apply_token_bitmask_
from nanoengine.extras import missing
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import Grammar, SamplingParams


class LogitEdits:
    """The edits that one request wants. `ids` is the request's own growing list, prompt first;
    `stop_ids` are barred until it has sampled `min_tokens`."""

    def __init__(
        self,
        ids: list[int],
        num_prompt: int,
        params: SamplingParams,
        matcher: Matcher | None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self.matcher = matcher
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._ids = ids
        self._num_prompt = num_prompt
        self._params = params
        self.bias = (  # token ids, and what is added to their logits
            torch.tensor(list(params.logit_bias), dtype=torch.int64),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float32),
        )
        self._allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self._allowed = torch.tensor(sorted(set(params.allowed_token_ids)))

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency, presence; neutral at 1, 0 and 0."""
        params = self._params
        return params.repetition_penalty, params.frequency_penalty, params.presence_penalty

    @property
    def has_penalties(self) -> bool:
        return self.penalties != (1, 0, 0)

    def output_counts(self) -> tuple[Tensor, Tensor]:
        """Token ids that were sampled so far, and how often (int32)."""
        ids, counts = torch.tensor(self._ids[self._num_prompt :], dtype=torch.int64).unique(
            return_counts=True
        )
        return ids, counts.int()

    def prompt_mask(self) -> tuple[Tensor, Tensor]:
        """Token ids of the prompt, and True for each."""
        ids = torch.tensor(self._ids[: self._num_prompt]).unique()
        return ids, torch.ones(len(ids), dtype=torch.bool)

    def allowed(self, vocab: int) -> Tensor | None:
        """Boolean [vocab] of what may be sampled; None: everything."""
        may_stop = len(self._ids) - self._num_prompt >= self._params.min_tokens
        if self._allowed is not None:
            allowed = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, self._allowed, True)
        elif may_stop:
            return None if self.matcher is None else self.matcher.allowed()
        else:
            allowed = torch.ones(vocab, dtype=torch.bool)
        barred = self._stop_ids[self._stop_ids < vocab]
        return allowed if may_stop else allowed.index_fill_(0, barred, False)


@dataclass(frozen=True)
class Entries:
    """Values at places of an [R, V] table that is 0 elsewhere; no place twice."""

    at: Tensor  # int64, of the flat table
    values: Tensor

    @classmethod
    def of(cls, rows: Sequence[tuple[Tensor, Tensor]], vocab: int) -> Entries:
        """`rows` has (token ids, values) of each row."""
        at = torch.cat([ids + row * vocab for row, (ids, _) in enumerate(rows)])
        return cls(at, torch.cat([values for _, values in rows]))

    def table(self, shape: torch.Size) -> Tensor:
        """The table itself, on the entries' device."""
        flat = torch.zeros(shape.numel(), dtype=self.values.dtype, device=self.at.device)
        return flat.index_copy_(0, self.at, self.values).view(shape)


@dataclass(frozen=True)
class EditPlan:
    """The edits of the logits of R rows; a field is None where no row wants it. It is made on the
    host and sent to the logits' device with the rest of the step (`to_device`)."""

    penalties: Tensor | None  # fp32 [3, R]: repetition, frequency, presence
    output_counts: Entries | None  # int32
    prompt_mask: Entries | None  # bool
    bias: Entries | None  # fp32
    bitmask: Tensor | None  # int32 [R, V / 32], bit set: allowed

    @classmethod
    def of(cls, edits: Sequence[LogitEdits], vocab: int) -> EditPlan:
        """One entry of `edits` a row."""
        penalties = output_counts = prompt_mask = bias = None
        if any(edit.has_penalties for edit in edits):
            penalties = torch.tensor([edit.penalties for edit in edits]).T.contiguous()
            output_counts = Entries.of([edit.output_counts() for edit in edits], vocab)
            prompt_mask = Entries.of([edit.prompt_mask() for edit in edits], vocab)
        if any(len(edit.bias[0]) for edit in edits):
            bias = Entries.of([edit.bias for edit in edits], vocab)
        return cls(penalties, output_counts, prompt_mask, bias, _bitmask(edits, vocab))

    def apply_(self, z_RV: Tensor) -> None:
        """Change contiguous fp32 logits in place, in the order that `SamplingParams` promises:
        penalties, bias, allowed tokens."""
        if self.penalties is not None:
            assert self.output_counts is not None and self.prompt_mask is not None, "made together"
            repetition, frequency, presence = self.penalties
            apply_penalties_(
                z_RV,
                self.output_counts.table(z_RV.shape),
                self.prompt_mask.table(z_RV.shape),
                repetition=repetition,
                frequency=frequency,
                presence=presence,
            )
        if self.bias is not None:
            z_RV.view(-1).index_add_(0, self.bias.at, self.bias.values)
        if self.bitmask is not None:
            apply_token_bitmask_(z_RV, self.bitmask)


def _bitmask(edits: Sequence[LogitEdits], vocab: int) -> Tensor | None:
    allowed = [edit.allowed(vocab) for edit in edits]
    if all(row is None for row in allowed):
        return None
    bits = torch.ones(len(edits), -(-vocab // 32) * 32, dtype=torch.bool)
    for row, is_allowed in enumerate(allowed):
        if is_allowed is not None:
            bits[row, :vocab] = is_allowed
    packed = np.packbits(bits.numpy(), axis=1, bitorder="little")
    return torch.from_numpy(packed.view(np.int32))


class Matcher:
    """The place that a request has reached in its grammar."""

    def __init__(self, walker: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._walker = walker
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)

    @property
    def is_done(self) -> bool:
        """Nothing but an end-of-sequence token may follow."""
        return bool(self._walker.is_stopped())

    @property
    def error(self) -> str:
        """Why the library gave up on this request (a limit of its own); empty if it did not."""
        return str(self._walker.get_error())

    def allowed(self) -> Tensor:
        """Boolean [vocabulary], never all False."""
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        if not self.is_done:
            packed = np.frombuffer(self._walker.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
            mask[: len(bits)] = torch.from_numpy(bits.astype(np.bool_))
        if not mask.any():
            mask[self._eos_ids] = True
        return mask

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed."""
        self._walker.consume_token(token)


_LEXER_FUEL = 100_000
"""Parts of a pattern that may be made, a tenth of the library's default: `(a{1000}){1000}` would
hold up a step of the engine, and with it every request, for seconds. A schema of 150 fields with
patterns, or of 1,000 texts, needs less than half."""


class GrammarCompiler:
    """Makes matchers for one tokenizer; holds its trie (made once, shared by all requests)."""

    def __init__(self, tokenizer: ChatTokenizer, vocab_size: int) -> None:
        try:
            import llguidance  # here: an extra
        except ImportError as error:
            raise missing("a grammar", "llguidance", extra="grammar") from error
        self._library = llguidance
        self._vocab_size = vocab_size
        self._eos_ids = tuple(sorted(tokenizer.eos_ids))
        self._compiled = lru_cache(maxsize=64)(self._compile)
        self._trie = llguidance.LLTokenizer(
            _readable(tokenizer.to_json()), n_vocab=vocab_size, eos_token=list(self._eos_ids)
        )

    def matcher(self, grammar: Grammar) -> Matcher:
        """`ValueError` says what is wrong with the grammar."""
        return Matcher(self._compiled(grammar).deep_copy(), self._vocab_size, self._eos_ids)

    def _compile(self, grammar: Grammar) -> Any:
        source = self._source(grammar)
        problem = self._library.LLMatcher.validate_grammar(source, self._trie)
        if problem and not problem.startswith("WARNING"):
            raise _refusal(grammar, problem)
        limits = self._library.LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)
        walker = self._library.LLMatcher(self._trie, source, log_level=0, limits=limits)
        if problem := walker.get_error() or _problem_of_a_step(walker.deep_copy()):
            raise _refusal(grammar, problem)
        return walker

    def _source(self, grammar: Grammar) -> str:
        make = self._library.LLMatcher
        if grammar.kind == "json_schema":
            try:
                return str(make.grammar_from_json_schema(grammar.value))
            except ValueError as error:
                raise _refusal(grammar, str(error)) from error
        if grammar.kind == "regex":
            return str(make.grammar_from_regex(grammar.value))
        if grammar.kind == "choice":
            texts = " | ".join(json.dumps(text) for text in grammar.choices)
            return str(make.grammar_from_lark(f"start: {texts}"))
        return str(make.grammar_from_lark(_as_lark(grammar)))


def _problem_of_a_step(walker: Any) -> str:
    """The error of taking a first token; empty if there is none. The cost of a pattern shows there:
    better here, in a thread of its own, than in a step of the engine."""
    packed = np.frombuffer(walker.compute_bitmask(), dtype=np.uint8)
    allowed = np.unpackbits(packed, bitorder="little").nonzero()[0]
    if len(allowed):
        walker.consume_token(int(allowed[0]))
    return str(walker.get_error())


def _readable(tokenizer: str) -> str:
    """A `tokenizer.json` as llguidance reads it. It refuses those whose tokens are the text itself,
    joined without a change; said as bytes that fall back to text, they mean the same to it."""
    fields = json.loads(tokenizer)
    if fields["decoder"] != {"type": "Fuse"}:
        return tokenizer
    fields["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}
    return json.dumps(fields)


def _as_lark(grammar: Grammar) -> str:
    """A grammar in Lark's form, where it came in llama.cpp's."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark  # here: an extra

    if "::=" not in grammar.value:
        return grammar.value
    try:
        return str(gbnf_to_lark(grammar.value))
    except (GbnfToLarkError, ValueError, RecursionError) as error:
        raise _refusal(grammar, str(error) or type(error).__name__) from None


def _refusal(grammar: Grammar, problem: str) -> ValueError:
    """One line of what the library says: the cause, without its own view of the source."""
    lines = [line.strip() for line in problem.strip().splitlines()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    cause = causes[0] if causes else re.sub(r"^(at )?\d+\(\d+\): ", "", lines[0])
    return ValueError(f"grammar {grammar.kind}: is not valid: {cause[:200]}; correct it")
