"""A game against a scripted opponent, who plays rock, paper and scissors in turn.

nanorl train --env examples/duel.py
"""

import nanorl

MOVES = ("rock", "paper", "scissors")  # each is beaten by the next


class Duel(nanorl.Env):
    system = "Play rock, paper or scissors."
    defaults = {  # noqa: RUF012
        "agent.max_turns": 4,
        "agent.max_turn_tokens": 8,
        "warm_start.steps": 10,
        "warm_start.traces_per_step": 32,  # they are short
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        first = rng.randrange(3)
        return nanorl.Task(f"Game {rng.randint(10, 999)}. I had {MOVES[first]}.", answer=first)

    def reset(self):
        self.theirs, self.num_won = int(self.task.answer), 0

    def step(self, text):
        self.theirs = (self.theirs + 1) % 3
        won = text.strip().lower() == MOVES[(self.theirs + 1) % 3]
        self.num_won += won
        if not won or self.num_won == 3:
            return self.done(reward=self.num_won / 3)
        return f"I had {MOVES[self.theirs]}."

    def teacher(self, observations, rng):  # often wrong, so that RL finds something to do
        return MOVES[(self.theirs + 2) % 3] if rng.random() < 0.4 else rng.choice(MOVES)
