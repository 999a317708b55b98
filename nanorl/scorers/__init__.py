"""Models that score rollouts beside the policy that sampled them, and the learner that asks them.

scored_learner.py    the learner of algorithms that read more than the rollouts say; the choice
references.py        the policy that KL terms and distillation compare with, or several teachers
averaged_teacher.py  the average of the policy over time, which teaches in hindsight
value_critic.py      the values that PPO's advantages read, and their own regression to the returns
gap_probe.py         rollouts to compare both engines on, where a batch has none

The learner of GRPO on its own rollouts (nanorl/learner.py) asks nobody.
"""
