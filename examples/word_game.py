"""A word game with two tools: which of three words has the most letters, or the most vowels?

nanorl train --env examples/word_game.py
"""

from pathlib import Path

import nanorl

WORDS = Path(__file__).with_name("words.txt").read_text().split()


def letters(words: list[str]) -> str:
    """Find the word with the most letters."""
    return max(words, key=len)


def vowels(words: list[str]) -> str:
    """Find the word with the most vowels."""
    return max(words, key=lambda word: sum(map(word.count, "aeiou")))


class WordGame(nanorl.Env):
    system = "Say the word and nothing else."
    tools = (letters, vowels)
    parser = "pythonic"  # [vowels(words=['oak', 'iron'])]: shorter than JSON
    defaults = {  # noqa: RUF012
        "agent.max_turns": 2,
        "agent.max_turn_tokens": 40,
        "warm_start.steps": 10,
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        words, tool = rng.sample(WORDS, 3), rng.choice(self.tools)
        if letters(words) == vowels(words):  # either tool would do: draw again
            return self.tasks(rng)
        task = f"Most {tool.__name__}: {', '.join(words)}?"
        return nanorl.Task(task, answer=tool(words), data={"words": words})

    def teacher(self, observations, rng):  # shows how a tool is called, but not which one
        if not observations:
            return nanorl.ToolCall(rng.choice(["letters", "vowels"]), self.task.data)
        return next(word for word in self.task.data["words"] if word in observations[0].split())
