"""Rewards score what the policy did, on the host and outside of the sandbox.

base.py   the contract: `Reward`, its verdict `Score`, what it reads (`Transcript`), and a user's
          plain function as one (`as_reward`)
rule.py   `RuleReward`: 1 if the answer equals the hidden one, numbers compared by value; else 0
"""
