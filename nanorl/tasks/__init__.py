"""Tasks, and the teachers that show how to solve them in the warm start.

source.py       `TaskSource`: the tasks of each step; `FileTasks`: a user's own from a file
problem.py      `Problem`, a task that knows its own solutions: what every generator returns
smollm2.py      generators of the `smollm2` family, in plain English
tiny.py         generators of the `tiny` family, in a few tokens
teachers.py     sloppy scripted teachers, and the mistakes that they make
tiny_model.py   the folder of the tiny model, from nothing but a seed
"""
