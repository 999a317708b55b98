"""Tasks and the teachers that show how to solve them. Start at `tasks.py`.

problem.py        a task that knows its own solutions; what every generator returns
formats.py        how an action is written as text: a program to run, or the final answer
smollm2_*.py      generators of the `smollm2` family; tiny_family.py those of the `tiny` family
tasks.py          TaskSource: which task comes at which step; file_tasks.py: a user's own
teachers.py       sloppy scripted teachers for the supervised warm start; slips.py their mistakes
drills.py         copy drills, which come before the traces where the weights are random
tiny_model.py     the folder of the tiny model, from nothing but a seed; tiny_tokenizer.py
"""
