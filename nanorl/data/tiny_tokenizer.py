"""A tokenizer of 512 tokens, trained on the traces that it will encode.

Numbers are cut into pairs from the left; a pair is one token, and so is a pair with the comma
before it: `[38,45,1234]` is `[` `38` `,45` `,12` `34` `]`. Copying a list of numbers below 100 is
then one induction step per number. Brackets, quotes and capital letters stand alone, so that an
argument is the same tokens in the question, in the program and in the output. Everything else is
plain BPE over printable ASCII; other characters become `<unk>` (the tasks have none).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
CHAT_MARKERS = ("<pad>", "<unk>", "<usr>", "<bot>", "<out>", "<eos>")
# Not `special`: a decoder that skips special tokens must still show what an action asks for.
ACTION_MARKERS = ("<run>", "</run>", "<ans>")
ALPHABET = ("\n", *map(chr, range(32, 127)))
PAIRS = tuple(f"{n:02d}" for n in range(100))
PIECES = Regex(
    r",?\d{1,2}"  # a pair of digits, with the comma before it
    r"|[ \n]?[a-z_]+(?:,[a-z])*\(?"  # a word or names `a,b`, with a blank before, ( after
    r"|[A-Z]|[\[\]\"]"  # alone
    r"|(?:(?!,\d|[ \n][a-z_])[^A-Za-z0-9_\[\]\"])+"  # other marks together
)
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<bot>{{ m['content'] }}<eos>"
    "{% elif m['role'] == 'tool' %}<out>{{ m['content'] }}"
    "{% else %}<usr>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """The tokenizer for `texts` (traces without markers); the same texts give the same one."""
    markers = [*CHAT_MARKERS, *ACTION_MARKERS]
    num_words = VOCAB_SIZE - 2 * len(PAIRS)
    learner = new_tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(
        vocab_size=num_words,
        special_tokens=markers,
        initial_alphabet=list(ALPHABET),
        limit_alphabet=len(ALPHABET),
        show_progress=False,
    )
    # Without numbers: all pairs become tokens anyway, however often each occurs.
    learner.train_from_iterator((re.sub(r",?\d{1,2}", "", text) for text in texts), trainer)
    learned = json.loads(learner.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].get)
    tokens = [*words, *PAIRS, *(f",{pair}" for pair in PAIRS)]
    merges = [tuple(merge) for merge in learned["merges"]]
    merges += [(pair[0], pair[1]) for pair in PAIRS] + [(",", pair) for pair in PAIRS]
    if len(tokens) != VOCAB_SIZE:
        raise ValueError(
            f"{len(tokens)} tokens instead of {VOCAB_SIZE}: the texts hold too few different "
            "words to learn from; pass more of them"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = new_tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CHAT_MARKERS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ACTION_MARKERS])
    return tokenizer


def new_tokenizer(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(PIECES, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """What goes into tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
