"""Tasks, and the teachers that show how to solve them in the warm start.

source.py       the tasks of each step: `GeneratedTasks` by rng, `ListTasks` from a list
readers.py      `read_tasks`: a user's own, from files, tables, data sets and Python objects
harbor_tasks.py       `read_harbor_tasks`: directories in the Harbor layout
records.py      one record of them as a task: its fields, and how columns are mapped
family.py       `Family`: the generators of a preset, and the tasks that they make
problem.py      `Problem`, a task that knows its own solutions: what every generator returns
smollm2.py      generators of the `smollm2` family, in plain English
tiny.py         generators of the `tiny` family, in a few tokens
teachers.py     scripted teachers, and the mistakes that they make
tiny_model.py   the folder of the tiny model, from nothing but a seed
"""
