"""An agent: a policy that plays a task's episode in an environment, token by token.

kit.py      `Kit.play`: one rollout, of an agent and an episode of the environment
loop.py     `Agent.play`: a loop in an environment, then the score; the loops `tool`, `single_turn`
episode.py  `Episode`: what a loop is given of one rollout
context.py  `Context`: one token sequence, and the turns that a policy takes in it
tokens.py   `TurnBuilder`: the ids, loss mask, log-probs and versions of the rollout that grows
limits.py   how large a rollout may grow
endpoint    an API in place of a loop, every token of whose calls is recorded
loops.py    the other loops by their names: feedback.py, compact.py, sub_agents.py, command.py
"""
