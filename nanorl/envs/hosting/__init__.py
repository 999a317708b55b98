"""Somebody else's code in processes that may be killed: rewards, and episodes of environments.

host_worker.py        what runs in each process: loads the code, holds its objects, answers
fork.py          `call_in_fork`: one call with limits of CPU seconds and memory
host_pool.py          `WorkerPool`: the processes, a deadline for every call, and what outlives none
reward.py        `HostedReward`: a reward whose code runs in a pool
environment.py   `HostedEnvironment`: an episode whose code runs in a pool
"""
