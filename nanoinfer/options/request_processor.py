"""Receives the requests of one engine that ask for more than a plain draw."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Rows
from pathlib import Path
from pkgutil import resolve_name

from nanoengine.adapters.lora import Adapter
from nanoengine.model.transformer import Transformer
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.options.full_sequence import FullSequence, resume
from nanoinfer.options.logit_edits import GrammarCompiler
from nanoinfer.options.param_checks import check_can_go_on, check_ids, wants_text
from nanoinfer.options.text import TextStream
from nanoinfer.params import Output, SamplingParams
from nanoinfer.scheduler import BatchScheduler
from nanoinfer.sequence import Sequence
from nanoinfer.variants.adapters import AdapterPool

_CHECK_PICTURES = "nanoinfer.vision.step_pictures:check_pictures"


class RequestProcessor:
    """Knows the adapters that are loaded, and the grammars that were compiled."""

    def __init__(self, model: Transformer) -> None:
        self.adapters = AdapterPool(model)
        self._model = model
        self._vocab_size, self._device = model.config.vocab_size, model.device
        self._grammars: GrammarCompiler | None = None

    def check(
        self,
        ids: Rows[int],
        params: SamplingParams,
        eos_ids: Iterable[int],
        tokenizer: ChatTokenizer | None,
    ) -> None:
        """`ValueError` for a prompt with params that this engine cannot serve."""
        self.adapters.check(params.adapter)
        check_ids(params, self._vocab_size)
        if params.images:
            resolve_name(_CHECK_PICTURES)(self._model, ids, params)
        check_can_go_on(params, eos_ids)
        if params.logps_mode == "kept":
            from nanoinfer.options.kept_sampling import check_device  # here: few requests need it

            check_device(self._device)
        if wants_text(params):
            _needed(tokenizer, "stop or detokenize")
        if params.grammar is not None:
            self._compiler(tokenizer).matcher(params.grammar)

    def sequence(
        self,
        handle: int,
        ids: list[int],
        params: SamplingParams,
        eos_ids: tuple[int, ...],
        priority: int,
        tokenizer: ChatTokenizer | None,
    ) -> Sequence:
        """The request, with all that it names."""
        seq = FullSequence(handle, ids, params, eos_ids, priority)
        grammar = params.grammar
        matcher = None if grammar is None else self._compiler(tokenizer).matcher(grammar)
        text = None
        if wants_text(params):
            text = TextStream.of(_needed(tokenizer, "stop or detokenize"), params)
        seq.bring(matcher, text, self.adapters if params.adapter else None)
        return seq

    def resume(self, seq: Sequence, sampled: Output) -> None:
        """`full_sequence.resume`."""
        resume(seq, sampled)

    def load_adapter(
        self,
        name: str,
        source: str | Path | Adapter,
        sequences: Iterable[Sequence],
        scheduler: BatchScheduler,
    ) -> None:
        """Load an adapter in place of what the name stood for; its requests in flight begin anew
        with it, their tokens kept."""
        mine = [seq for seq in sequences if seq.params.adapter == name]
        self.adapters.load(name, source)
        scheduler.restart(mine)
        for seq in mine:
            seq.cache_key = self.adapters.key(name)
            seq.start_version()  # the old adapter's scores

    def unload_adapter(self, name: str, sequences: Collection[Sequence]) -> None:
        """Forget an adapter that no request in flight needs. `ValueError` if one does."""
        self.adapters.check(name)
        count = sum(seq.params.adapter == name for seq in sequences)
        if name and count:
            raise ValueError(
                f"adapter={name!r}: {count} requests in flight use it; let them end or abort them"
            )
        self.adapters.unload(name)

    def _compiler(self, tokenizer: ChatTokenizer | None) -> GrammarCompiler:
        if self._grammars is None:
            tokenizer = _needed(tokenizer, "grammar")
            self._grammars = GrammarCompiler(tokenizer, self._vocab_size)
        return self._grammars


def _needed(tokenizer: ChatTokenizer | None, what: str) -> ChatTokenizer:
    if tokenizer is None:
        raise ValueError(f"{what}: needs text; give the engine a tokenizer")
    return tokenizer
