"""Rewards score what the policy did, on the host and outside of the sandbox.

base.py          the contract: `Reward`, its verdict `Score`, and what it reads (`Transcript`)
function_reward.py a user's plain function as a reward (`as_reward`)
load.py          finds a reward by its name or by where the user's own lies
rule.py          1 if the answer equals the hidden one, numbers compared by value; else 0
math_reward.py          the same for formulas, through math-verify
tests.py         hidden unit tests against the policy's function; inside.py runs in the sandbox
reward_model.py  a sequence-classification folder
judge.py         an LLM's verdict; judge_questions.py has it asked, judge_models.py is who gives it,
                 judge_costs.py what it costs
group_judge.py   an LLM's comparison of the rollouts of a group
weighted.py      a weighted sum, its parts recorded

What each defends against, and what not, stands in its first lines.
"""
