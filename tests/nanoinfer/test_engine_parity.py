"""Greedy output is transformers', token for token, in fp32."""

from pathlib import Path

import pytest
import torch
from tiny_models import FAMILY_SHAPES, MOE_SHAPES, SHAPES, save_reference
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanoengine.formats.hf import load_model
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams

pytestmark = pytest.mark.sweep


def reference_greedy(
    reference: PreTrainedModel, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    width = max(len(p) for p in prompts)
    ids = torch.stack([nn.functional.pad(torch.tensor(p), (width - len(p), 0)) for p in prompts])
    lengths = torch.tensor([len(p) for p in prompts])
    out = reference.generate(
        ids,
        attention_mask=(torch.arange(width) >= width - lengths[:, None]).long(),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return out[:, width:].tolist()


def engine_greedy(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    engine = LLMEngine(
        load_model(folder), InferConfig(num_blocks=400, max_batch_tokens=96, max_num_seqs=16)
    )
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, greedy)
    engine.check()
    return [o.ids for o in outputs]


@pytest.mark.parametrize("shape", [*SHAPES, *MOE_SHAPES, *FAMILY_SHAPES])
def test_greedy_equals_transformers(shape: str, tmp_path: Path) -> None:
    reference = save_reference(shape, tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(3, 211, (n,), generator=generator).tolist() for n in (2, 7, 16, 31, 60, 150)
    ]
    assert engine_greedy(tmp_path, prompts, 40) == reference_greedy(reference, prompts, 40)


TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village",
    "def fibonacci(n):",
    "What is 17 times 23?",
    "Water boils at",
    "List three fruits:",
    "The quick brown fox",
    "import numpy as np\n",
    "In 1969, humans first",
    "A haiku about autumn:",
    "Explain gravity to a child.",
    "The opposite of hot is",
    "To be, or not to be",
    "SELECT name FROM users",
    "My favourite season is",
    "2, 4, 8, 16,",
    "The largest planet in the solar system",
    "for i in range(10):\n    print(",
    "Dear Sir or Madam,",
    "E = mc^2 means that",
    "Roses are red,",
    "The mitochondria is",
    "How do I boil an egg?",
    "<html>\n<head>",
    "Monday, Tuesday, Wednesday,",
    "The French word for cat is",
    "A prime number is a number that",
    "She opened the door and saw",
    '{"name": "Ada", "age":',
    "The recipe needs two cups of",
    "Once the war had ended,",
    "Q: Why is the sky blue?\nA:",
)


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_greedy_equals_transformers(smollm2_folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in TEXTS]
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32).eval()
    assert engine_greedy(smollm2_folder, prompts, 64) == reference_greedy(reference, prompts, 64)
