"""A reward of your own: the right answer, in a few words.

nanorl train --env answer --tasks examples/own_tasks.jsonl --reward examples/own_reward.py
"""

FEW = 8


def score(text, task):
    """1 for the right answer in a few words, less for more of them, 0 for a wrong answer."""
    if task.answer not in text:
        return 0.0
    return min(1.0, FEW / len(text.split()))
