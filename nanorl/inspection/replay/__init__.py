"""Plays stored rollouts of a run again and says whether they come out equal, or where and why not.

In reading order:
    past_run.py    what a run left on the disk: options, rollouts, checkpoints, manifests
    replay.py      `replay`: weights, version by version, and the rollouts that they played
    weights.py     the weights of a version, made again from a checkpoint and stored rollouts
    tasks.py       today's tasks, and what is another one in them
    forced.py      rollouts whose tokens are of several versions: all that does not depend on time
    difference.py  the first place where two rollouts differ
    causes.py      why: what was recorded then and is another thing now, the likeliest first
    replay_result.py      what comes of it, as text and JSON
"""
