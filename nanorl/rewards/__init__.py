"""Rewards score what the policy answered, on the host and outside of the sandbox.

rule.py   `RuleReward`: 1 if the answer equals the hidden one, numbers compared by value; else 0
"""
