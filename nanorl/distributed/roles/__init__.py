"""The roles of a run: who computes what, in this process or in others.

policy_role.py      a rank of the training engine, and the engine that its ranks are together
replica_role.py     an inference engine; router.py shares requests out among several
servers.py     engines that somebody else started: ours (http_replica.py), vLLM, SGLang
collector_role.py   agents, environments and sandboxes
scorers.py     the reference and the critic
judge_role.py  a judge that rewards ask; judge_set.py starts them, judge_routers.py leads to them
role.py        a role is called by the name of a method; in one process that is a call
actor_role.py  a role in a process of its own, under supervision: its handle, its restarts
base.py        what a run asks of its roles; inline_roles.py and cluster.py are the two answers

Where a role runs never changes what it computes: weights and rollouts of a synchronous run are
equal bit for bit in one process, in several, and on Ray. docs/scheduler.md has the picture.
"""
