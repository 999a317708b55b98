"""Environments: each belongs to one episode, opens its chat and answers the agent's actions.

base.py      the contract: `Environment` and its reply `TimeStep`
env.py       `Env`, the short form; env_episode.py plays one of its episodes
env_kind.py  an environment as a whole run knows it: its tasks, who shows how they are played
hooks.py     what a class of the short form may define; its methods as tools
judged.py    an environment with another reward; group_judged.py with a judge of whole groups
installed.py `--env NAME` of packages that are installed
actions.py   `ActionFormat`: how calls and answers are written and read
code.py      `CodeEnv`: an action is a program, the observation is what it printed
repair.py    `Repair`: a repository with a bug, and hidden calls
harbor.py    `Harbor`: task directories in the Harbor layout
"""
