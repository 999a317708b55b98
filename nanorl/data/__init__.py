"""Tasks, the teachers that show how to solve them, and where rollouts are kept.

tasks.py          TaskSource: which task comes at which step; start here. file_tasks.py: your own
problem.py        a task that knows its own solutions; what every generator returns
formats.py        how an action is written as text: a program to run, or the final answer
smollm2_*.py      generators of the `smollm2` family; tiny_*.py those of the `tiny` family
teachers.py       sloppy scripted teachers for the supervised warm start; slips.py their mistakes
tiny_model.py     the folder of the tiny model, built from nothing but a seed
transfer_queue.py complete groups on their way to the trainer
store.py          every rollout of a run, in SQLite
"""
