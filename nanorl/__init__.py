"""nanorl: agents that read a task, act, see what came of it, and learn from the score.

The root is the loop. Read types.py first, then, in the order of a run:

config.py, presets.py   every option, and two sets of them that work
parts.py, sizes.py      tasks, tokenizer and the options of the engines, sized for the machine
roles/                  who computes what: engines, agents, store; here (inline.py) or in processes
run.py                  the phases of a run, checkpoints, what it leaves behind
warm_start.py           supervised steps before RL
trainer.py              the RL loop: which rollouts may start, which groups make a batch
collector.py            plays the rollouts of a group
batching.py             groups become samples with advantages and weights
learner.py              samples become an optimizer step, and its weights the engine's
evaluate.py, store.py   success on held-out tasks; every rollout, kept
bounds.py, colocation.py   what a number may be; two engines on one GPU

Around it: algorithms/ (advantages and losses), agents/ (one rollout), envs/ (what answers the
agent), sandbox/ (where programs run), tasks/, rewards/, report/, weights/ (how they reach engines
in other processes) and monitor/ (who looks on).
"""
