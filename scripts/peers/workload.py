"""The workloads that this stack and its peers are timed on. Needs numpy alone.

agent rollouts  8 tasks x 8 members that share a 200-token prompt; 3 turns of 48 sampled tokens, a
                60-token observation of each member's own between turns; 9,216 sampled tokens
GRPO step       4 prompts (about 40 to 110 tokens) x 8 completions of exactly 64 tokens, one
                optimizer step
W1              32 requests at once, prompts of 32 to 256 and outputs of 16 to 128 tokens, greedy,
                end of sequence ignored; 4,531 prompt and 1,926 output tokens
"""

from __future__ import annotations

import numpy as np

GROUPS, MEMBERS, PROMPT, TURN, OBSERVATION, TURNS = 8, 8, 200, 48, 60, 3
FIRST_ID, VOCAB = 17, 49152  # SmolLM2: ids below 17 are control tokens
AGENT_TOKENS = GROUPS * MEMBERS * TURN * TURNS

STEP_GROUP, STEP_COMPLETION = 8, 64
STEP_TOKENS = 4 * STEP_GROUP * STEP_COMPLETION
_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "to",
    "in",
    "is",
    "you",
    "that",
    "it",
    "he",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "word",
    "but",
    "not",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
]


def agent_prompts() -> list[list[int]]:
    """One prompt a rollout, members of a group beside each other."""
    draw = np.random.RandomState(0).randint(FIRST_ID, VOCAB, (GROUPS, PROMPT)).tolist()
    return [list(prompt) for prompt in draw for _ in range(MEMBERS)]


def agent_observations() -> list[list[list[int]]]:
    """[turn][rollout] -> ids; one fewer than turns."""
    shape = (TURNS - 1, GROUPS * MEMBERS, OBSERVATION)
    return np.random.RandomState(1).randint(FIRST_ID, VOCAB, shape).tolist()


def step_prompts() -> list[str]:
    """Four texts of different length."""
    rng = np.random.RandomState(2)
    return [" ".join(rng.choice(_WORDS, size)) for size in (76, 82, 104, 40)]


def reward(ids: list[int]) -> float:
    """Any deterministic reward that differs within a group."""
    return float(sum(ids) % 7)


def w1_requests() -> tuple[list[list[int]], list[int]]:
    """Prompts and numbers of tokens to generate."""
    rng = np.random.RandomState(0)
    prompt_sizes, output_sizes = rng.randint(32, 257, 32), rng.randint(16, 129, 32)
    prompts = [rng.randint(FIRST_ID, VOCAB, size).tolist() for size in prompt_sizes]
    return prompts, output_sizes.tolist()
