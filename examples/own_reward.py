"""A reward of your own: the right answer and nothing else, in as few words as possible.

nanorl train --env answer --tasks examples/own_tasks.jsonl --reward examples/own_reward.py
"""


def score(text, task):
    """1 for the answer alone; less, the more words stand around it; 0 for a wrong one."""
    words = text.replace(".", "").split()
    if task.answer not in " ".join(words):
        return 0.0
    return 1.0 / (1 + len(words) - len(task.answer.split()))
