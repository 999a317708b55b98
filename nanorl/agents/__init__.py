"""An agent: a policy that plays a task's episode in an environment, token by token.

loop.py     `Agent.play`: generate, step the environment, append what it says, until an answer
limits.py   how large a rollout may grow
tokens.py   `TurnBuilder`: the ids, loss mask, log-probs and versions of the rollout that grows
"""
