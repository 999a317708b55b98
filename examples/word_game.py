"""A word game with two tools: find the word that starts and ends with these letters.

nanorl train --env examples/word_game.py
"""

from pathlib import Path

import nanorl

WORDS = Path(__file__).with_name("words.txt").read_text().split()


def starting(letter: str) -> str:
    """List the words that start with a letter."""
    return " ".join(word for word in WORDS if word.startswith(letter))


def ending(letter: str) -> str:
    """List the words that end with a letter."""
    return " ".join(word for word in WORDS if word.endswith(letter))


class WordGame(nanorl.Env):
    system = "Find the word. Say the word and nothing else."
    tools = (starting, ending)
    parser = "pythonic"  # [starting(letter='c')]: shorter than JSON
    defaults = {"agent.max_turns": 3, "agent.max_turn_tokens": 32}  # noqa: RUF012

    def tasks(self):
        return [nanorl.Task(f"From {word[0]} to {word[-1]}.", answer=word) for word in WORDS]

    def step(self, text):  # a turn without a call of a tool
        if text.strip(" .\n") == self.task.answer:
            return self.done(reward=1.0)
        self.reward(-0.1)
        return "No."

    def teacher(self, observations, rng):  # shows the calls, and guesses wildly
        first, last = self.task.answer[0], self.task.answer[-1]
        if observations:
            return rng.choice((starting(first) + " " + ending(last)).split())
        calls = {"starting": first, "ending": last}  # both in one turn
        return [nanorl.ToolCall(name, {"letter": one}) for name, one in calls.items()]
