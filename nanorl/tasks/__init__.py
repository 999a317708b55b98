"""Tasks and the teachers that show how to solve them. Start at `source.py`.

source.py       TaskSource: which task comes at which step; a user's own tasks from a file
problem.py      a task that knows its own solutions; what every generator returns
smollm2.py      generators of the `smollm2` family; tiny.py those of the `tiny` family
teachers.py     sloppy scripted teachers for the supervised warm start, and their mistakes
tiny_model.py   the folder of the tiny model, from nothing but a seed
"""
